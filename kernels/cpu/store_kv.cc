#include "kernels/cpu/store_kv.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/latent_entry.h"
#include "kernels/cpu/rms_norm.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/thread_scratch.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kRowsPerTask = 8;

absl::Status Check(const StoreKvParams& params) {
  if (absl::Status status = CheckRopeTable(params.rope); !status.ok()) return status;
  absl::Status status = CheckLatentPages(params.pages, params.kv_lora_rank, params.rope.rope_dim);
  if (!status.ok()) return status;
  if (params.kv_a == nullptr || params.norm_weight == nullptr || params.positions == nullptr ||
      params.slots == nullptr) {
    return absl::InvalidArgumentError("store_kv: kv_a, norm_weight, positions or slots is null");
  }
  for (int32_t row = 0; row < params.num_rows; ++row) {
    if (params.slots[row] < 0 || params.rope.rope_dim == 0) continue;
    status = CheckPosition(params.rope, row, params.positions[row]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void StoreRow(const StoreKvParams& params, int32_t row) {
  thread_local ThreadScratch<float> scratch;
  const int32_t rank = params.kv_lora_rank;
  const int32_t rope_dim = params.rope.rope_dim;
  const float* kv_a = params.kv_a + row * params.kv_a_row_stride;
  float* latent = scratch.Get(static_cast<size_t>(rank) + rope_dim);
  float* k_rope = latent + rank;
  RmsNormRow(kv_a, params.norm_weight, params.norm_eps, rank, latent);
  if (rope_dim > 0) {
    std::memcpy(k_rope, kv_a + rank, sizeof(float) * static_cast<size_t>(rope_dim));
    Rotate(params.rope, params.positions[row], k_rope);
  }
  EncodeEntry(params.pages.format, latent, rank, k_rope, rope_dim,
              EntryOfSlot(params.pages, params.slots[row]));
}

}  // namespace

absl::Status StoreKv(ThreadPool& pool, const StoreKvParams& params) {
  if (params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("store_kv: ", params.num_rows, " rows"));
  }
  if (params.num_rows == 0) return absl::OkStatus();
  if (absl::Status status = Check(params); !status.ok()) return status;
  const int64_t num_tasks = (params.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  pool.ParallelFor(num_tasks, [&](int64_t task) {
    const int32_t begin = static_cast<int32_t>(task) * kRowsPerTask;
    const int32_t end = std::min(begin + kRowsPerTask, params.num_rows);
    for (int32_t row = begin; row < end; ++row) {
      if (params.slots[row] >= 0) StoreRow(params, row);
    }
  });
  return absl::OkStatus();
}

}  // namespace kernels::cpu
