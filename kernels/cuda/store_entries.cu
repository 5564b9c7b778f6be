#include "kernels/cuda/store_entries.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/kv_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/new_entry.cuh"
#include "kernels/cuda/rotation.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kWarps = kThreads / kWarpSize;

// values [dim] <- the layer norm of the row's index key.
__device__ void NormIndexKey(const IndexKeyParams& params, int64_t row, float* values,
                             double* scratch) {
  const float* key = params.key + row * params.key_row_stride;
  double sum = 0;
  for (int32_t i = threadIdx.x; i < params.dim; i += kThreads) sum += key[i];
  const double mean = BlockSum(sum, scratch) / params.dim;
  double squares = 0;
  for (int32_t i = threadIdx.x; i < params.dim; i += kThreads) {
    squares += (key[i] - mean) * (key[i] - mean);
  }
  squares = BlockSum(squares, scratch);
  const double inverse = 1.0 / sqrt(squares / params.dim + static_cast<double>(params.norm_eps));
  for (int32_t i = threadIdx.x; i < params.dim; i += kThreads) {
    values[i] =
        static_cast<float>((key[i] - mean) * inverse) * params.norm_weight[i] + params.norm_bias[i];
  }
}

// Grid: rows, what is stored of one (its latent, its index key).
__global__ void __launch_bounds__(kThreads) StoreEntriesKernel(StoreKvParams params, Fault* fault) {
  __shared__ double scratch[33];
  auto* values = reinterpret_cast<float*>(DynamicShared());
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int64_t slot = params.slots[row];
  if (slot < 0) return;
  const int32_t position = params.positions[row];
  if (!HasPosition(params.rope, position) ||
      (params.index_key.dim > 0 && !HasPosition(params.index_key.rope, position))) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  if (blockIdx.y == 0) {
    StoreNewEntry(params, row, slot, position, values, scratch);
    return;
  }
  const IndexKeyParams& key = params.index_key;
  NormIndexKey(key, row, values, scratch);
  __syncthreads();
  for (int32_t i = threadIdx.x; i < key.rope.rope_dim / 2; i += kThreads) {
    RotatePair(key.rope, position, 1.0f, i, values);
  }
  __syncthreads();
  StoreEntry(key.pages, slot, values, key.dim, 0);
}

// Grid: rows, groups of heads; a warp a head.
__global__ void __launch_bounds__(kThreads) NormedRopeKernel(RopeParams params, Fault* fault) {
  WaitForPrevious();
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t head =
      static_cast<int32_t>(blockIdx.y) * kWarps + static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  if (head >= params.num_heads) return;
  const RopeTable& rope = params.rope;
  const int32_t position = params.positions[row];
  if (!HasPosition(rope, position)) {
    if (lane == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  float* rotary = params.data + row * params.row_stride + head * params.head_stride;
  float* first = rotary + rope.rope_dim - params.norm_dim;
  double sum = 0;
  for (int32_t i = lane; i < params.norm_dim; i += kWarpSize) {
    sum += static_cast<double>(first[i]) * first[i];
  }
  sum = WarpSum(sum);
  const float inverse = static_cast<float>(1.0 / sqrt(sum / static_cast<double>(params.norm_dim) +
                                                      static_cast<double>(params.norm_eps)));
  for (int32_t i = lane; i < params.norm_dim; i += kWarpSize) first[i] *= inverse;
  __syncwarp();
  for (int32_t i = lane; i < rope.rope_dim / 2; i += kWarpSize) {
    RotatePair(rope, position, 1.0f, i, rotary);
  }
}

// A warp's work.  `num_bytes` at addresses that are multiples of 16 if it is one itself.
__device__ void CopyBytes(std::byte* to, const std::byte* from, int32_t num_bytes) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                    static_cast<uintptr_t>(num_bytes);
  if (bits % 16 == 0) {
    for (int32_t i = lane; i < num_bytes / 16; i += kWarpSize) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
    for (int32_t i = lane; i < num_bytes; i += kWarpSize) to[i] = from[i];
  }
}

// A warp an entry.
__global__ void __launch_bounds__(kThreads)
    CopyKvEntriesKernel(CopyKvEntriesParams params, int32_t entry_bytes) {
  WaitForPrevious();
  const int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (i >= params.num_entries) return;
  const int64_t from = params.src_slots[i], to = params.dst_slots[i];
  if (from < 0 || to < 0) return;
  const EntryParts in = PartsOfSlot(params.src, from, params.dim, params.rope_dim);
  const EntryParts out = PartsOfSlot(params.dst, to, params.dim, params.rope_dim);
  const KvFormat format = params.src.format;
  if (format != KvFormat::kFp8IndexKey && format != KvFormat::kFp8SharedKv) {
    CopyBytes(out.values, in.values, entry_bytes);
    return;
  }
  const int32_t row_bytes = params.dim + 2 * params.rope_dim;
  CopyBytes(out.values, in.values, row_bytes);
  CopyBytes(out.scales, in.scales, entry_bytes - row_bytes);
}

}  // namespace

absl::Status StoreEntries(const Launcher& launcher, const StoreKvParams& params) {
  const int32_t size = std::max(params.kv_lora_rank + params.rope.rope_dim, params.index_key.dim);
  const size_t shared_bytes = sizeof(float) * static_cast<size_t>(size);
  if (shared_bytes > kMaxSharedBytes - 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("store_kv: no cuda kernel for entries of ", size, " values"));
  }
  return Launch(
      launcher, "store_kv", StoreEntriesKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows), params.index_key.dim > 0 ? 2u : 1u),
       .threads = kThreads,
       .shared_bytes = shared_bytes,
       .early = true},
      params, launcher.device.fault);
}

absl::Status NormedRope(const Launcher& launcher, const RopeParams& params) {
  return Launch(launcher, "rope", NormedRopeKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_rows),
                              static_cast<uint32_t>(CeilDiv(params.num_heads, kWarps))),
                 .threads = kThreads,
                 .early = true},
                params, launcher.device.fault);
}

absl::Status CopyKvEntries(const Launcher& launcher, const CopyKvEntriesParams& params) {
  RETURN_IF_ERROR(CheckCopyKvEntries(params));
  return Launch(launcher, "copy_kv_entries", CopyKvEntriesKernel,
                {.grid = dim3(static_cast<uint32_t>(CeilDiv(params.num_entries, kWarps))),
                 .threads = kThreads,
                 .early = true},
                params, KvEntryBytes(params.src.format, params.dim, params.rope_dim));
}

}  // namespace kernels::cuda
