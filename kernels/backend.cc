#include "kernels/backend.h"

#include "status/status_macros.h"

namespace kernels {

absl::Status Backend::PrepareAttention(const LaunchContext& context,
                                       const PrepareAttentionParams& params) {
  RETURN_IF_ERROR(Rope(context, params.rope));
  RETURN_IF_ERROR(StoreKv(context, params.store));
  return params.absorb.num_rows == 0 ? absl::OkStatus() : HeadLinear(context, params.absorb);
}

}  // namespace kernels
