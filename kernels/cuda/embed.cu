#include "kernels/cuda/embed.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;

// One block a row.
__global__ void __launch_bounds__(kThreads) EmbedKernel(EmbedParams params) {
  WaitForPrevious();
  const int64_t row = blockIdx.x;
  const int32_t source = params.token_source != nullptr ? params.token_source[row] : -1;
  const int64_t id = source >= 0 ? params.previous_sampled[source] : params.token_ids[row];
  if (threadIdx.x == 0 && params.resolved_ids != nullptr) {
    params.resolved_ids[row] = static_cast<int32_t>(id);
  }
  const int64_t columns = params.table.cols;
  const bool known = id >= 0 && id < params.table.rows;
  float* out = params.output + row * params.output_row_stride;
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    out[i] = known ? LoadElement(params.table.data, params.table.dtype, id * columns + i) : 0.0f;
  }
}

}  // namespace

absl::Status Embed(const Launcher& launcher, const EmbedParams& params) {
  RETURN_IF_ERROR(CheckEmbed(params));
  return Launch(
      launcher, "embed", EmbedKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      params);
}

}  // namespace kernels::cuda
