#include "kernels/cpu/store_kv.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/kv_entry.h"
#include "kernels/cpu/rms_norm.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/thread_scratch.h"
#include "status/status_macros.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kRowsPerTask = 8;

absl::Status CheckPositions(const StoreKvParams& params) {
  for (int32_t row = 0; row < params.num_rows; ++row) {
    if (params.slots[row] < 0) continue;
    for (const RopeTable* rope : {&params.rope, &params.index_key.rope}) {
      if (rope->rope_dim == 0) continue;
      RETURN_IF_ERROR(CheckPosition(*rope, row, params.positions[row]));
    }
  }
  return absl::OkStatus();
}

void StoreLatent(const StoreKvParams& params, int32_t row, float* scratch) {
  const int32_t rank = params.kv_lora_rank;
  const int32_t rope_dim = params.rope.rope_dim;
  const float* kv_a = params.kv_a + row * params.kv_a_row_stride;
  float* latent = scratch;
  float* k_rope = latent + rank;
  RmsNormRow(kv_a, params.norm_weight, params.norm_eps, params.norm_rope ? rank + rope_dim : rank,
             latent);
  if (rope_dim > 0) {
    if (!params.norm_rope) std::copy_n(kv_a + rank, rope_dim, k_rope);
    Rotate(params.rope, params.positions[row], k_rope);
  }
  StoreEntry(params.pages, PlaceOfSlot(params.pages, params.slots[row]), latent, rank, k_rope,
             rope_dim);
}

void LayerNormRow(const float* x, const float* weight, const float* bias, float eps, int32_t n,
                  float* out) {
  double sum = 0;
  for (int32_t i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / n;
  double squares = 0;
  for (int32_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double inverse = 1.0 / std::sqrt(squares / n + static_cast<double>(eps));
  for (int32_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>((x[i] - mean) * inverse) * weight[i] + bias[i];
  }
}

void StoreIndexKey(const StoreKvParams& params, int32_t row, float* scratch) {
  const IndexKeyParams& index = params.index_key;
  LayerNormRow(index.key + row * index.key_row_stride, index.norm_weight, index.norm_bias,
               index.norm_eps, index.dim, scratch);
  if (index.rope.rope_dim > 0) Rotate(index.rope, params.positions[row], scratch);
  StoreEntry(index.pages, PlaceOfSlot(index.pages, params.slots[row]), scratch, index.dim, nullptr,
             0);
}

}  // namespace

absl::Status StoreKv(ThreadPool& pool, const StoreKvParams& params) {
  RETURN_IF_ERROR(CheckStoreKv(params));
  RETURN_IF_ERROR(CheckPositions(params));
  const int64_t num_tasks = (params.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  pool.ParallelFor(num_tasks, [&](int64_t task) {
    thread_local ThreadScratch<float> scratch;
    float* values = scratch.Get(static_cast<size_t>(
        std::max(params.kv_lora_rank + params.rope.rope_dim, params.index_key.dim)));
    const int32_t begin = static_cast<int32_t>(task) * kRowsPerTask;
    const int32_t end = std::min(begin + kRowsPerTask, params.num_rows);
    for (int32_t row = begin; row < end; ++row) {
      if (params.slots[row] < 0) continue;
      StoreLatent(params, row, values);
      if (params.index_key.dim > 0) StoreIndexKey(params, row, values);
    }
  });
  return absl::OkStatus();
}

absl::Status CopyKvEntries(ThreadPool& pool, const CopyKvEntriesParams& params) {
  RETURN_IF_ERROR(CheckCopyKvEntries(params));
  constexpr int64_t kEntriesPerTask = 32;
  const int64_t num_tasks = (params.num_entries + kEntriesPerTask - 1) / kEntriesPerTask;
  pool.ParallelFor(num_tasks, [&](int64_t task) {
    const int64_t begin = task * kEntriesPerTask;
    const int64_t end = std::min<int64_t>(begin + kEntriesPerTask, params.num_entries);
    for (int64_t i = begin; i < end; ++i) {
      if (params.src_slots[i] < 0 || params.dst_slots[i] < 0) continue;
      CopyEntry(params.src, PlaceOfSlot(params.src, params.src_slots[i]), params.dst,
                PlaceOfSlot(params.dst, params.dst_slots[i]), params.dim, params.rope_dim);
    }
  });
  return absl::OkStatus();
}

}  // namespace kernels::cpu
