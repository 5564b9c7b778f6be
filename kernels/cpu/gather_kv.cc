#include "kernels/cpu/gather_kv.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/kv_entry.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kRowsPerTask = 32;

}  // namespace

absl::Status GatherKv(ThreadPool& pool, const GatherKvParams& params) {
  if (absl::Status status = CheckGatherKv(params); !status.ok()) return status;
  if (params.dtype != DType::kFloat32) {
    return absl::InvalidArgumentError(absl::StrCat("gather_kv: no cpu kernel for rows of dtype ",
                                                   std::string(DTypeName(params.dtype))));
  }
  const int64_t num_tasks = (params.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  pool.ParallelFor(num_tasks, [&](int64_t task) {
    const int32_t begin = static_cast<int32_t>(task) * kRowsPerTask;
    const int32_t end = std::min(begin + kRowsPerTask, params.num_rows);
    for (int32_t row = begin; row < end; ++row) {
      float* latent = static_cast<float*>(params.latent) + row * params.latent_row_stride;
      float* k_rope = params.rope_dim == 0
                          ? nullptr
                          : static_cast<float*>(params.k_rope) + row * params.k_rope_row_stride;
      if (params.slots[row] < 0) {
        std::fill_n(latent, params.kv_lora_rank, 0.0f);
        std::fill_n(k_rope, params.rope_dim, 0.0f);
        continue;
      }
      LoadEntry(params.pages, PlaceOfSlot(params.pages, params.slots[row]), params.kv_lora_rank,
                params.rope_dim, latent, k_rope);
    }
  });
  return absl::OkStatus();
}

}  // namespace kernels::cpu
