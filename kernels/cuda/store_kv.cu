#include "kernels/cuda/store_kv.h"

#include "absl/strings/str_cat.h"
#include "kernels/cuda/latent_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/store_entries.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 128;

// Pair i of the rotation: indices of its elements.
__device__ int32_t FirstOfPair(const RopeTable& rope, int32_t i) {
  return rope.layout == RopeLayout::kInterleaved ? 2 * i : i;
}
__device__ int32_t SecondOfPair(const RopeTable& rope, int32_t i) {
  return rope.layout == RopeLayout::kInterleaved ? 2 * i + 1 : i + rope.rope_dim / 2;
}

struct Pair {
  float a;
  float b;
};

// REQUIRES: the position is in the table.
__device__ Pair Rotate(const RopeTable& rope, int32_t position, int32_t i, Pair x) {
  const int64_t at = int64_t{position} * (rope.rope_dim / 2) + i;
  const float cos = rope.cos[at], sin = rope.sin[at];
  return {x.a * cos - x.b * sin, x.b * cos + x.a * sin};
}

__device__ void EncodeValue(KvFormat format, std::byte* entry, int32_t i, float value) {
  if (format == KvFormat::kFloat32) {
    reinterpret_cast<float*>(entry)[i] = value;
  } else {
    StoreBytes16(entry + 2 * i, Bfloat16FromFloat(value));
  }
}

// latent [rank] in shared memory -> e4m3 values and scales; a warp a group.
__device__ void EncodeFloat8(const float* latent, int32_t rank, std::byte* entry) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t groups = CeilDiv(rank, kFloat8GroupSize);
  for (int32_t group = warp; group < groups; group += kThreads / kWarpSize) {
    const int32_t begin = group * kFloat8GroupSize;
    const int32_t end = min(begin + kFloat8GroupSize, rank);
    float amax = 0;
    for (int32_t i = begin + lane; i < end; i += kWarpSize) amax = fmaxf(amax, fabsf(latent[i]));
    for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    }
    const float scale = Float8GroupScale(amax);
    const float inverse = 1.0f / scale;  // a power of two as well: products are exact
    if (lane == 0) StoreBytesFloat(entry + rank + 4 * group, scale);
    for (int32_t i = begin + lane; i < end; i += kWarpSize) {
      entry[i] = static_cast<std::byte>(E4m3FromFloat(latent[i] * inverse));
    }
  }
}

// One block a row.  Shared: the normed latent.
__global__ void __launch_bounds__(kThreads) StoreKvKernel(StoreKvParams params, Fault* fault) {
  __shared__ double scratch[33];
  auto* latent = reinterpret_cast<float*>(DynamicShared());  // [rank]
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int64_t slot = params.slots[row];
  WaitForPrevious();
  if (slot < 0) return;
  const RopeTable& rope = params.rope;
  const int32_t position = params.positions[row];
  if (rope.rope_dim > 0 && (position < 0 || position >= rope.max_positions)) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  const int32_t rank = params.kv_lora_rank;
  const float* kv_a = params.kv_a + row * params.kv_a_row_stride;
  double sum = 0;
  for (int32_t i = threadIdx.x; i < rank; i += kThreads) {
    sum += static_cast<double>(kv_a[i]) * kv_a[i];
  }
  sum = BlockSum(sum, scratch);
  const float inverse = static_cast<float>(
      1.0 / sqrt(sum / static_cast<double>(rank) + static_cast<double>(params.norm_eps)));
  for (int32_t i = threadIdx.x; i < rank; i += kThreads) {
    latent[i] = kv_a[i] * inverse * params.norm_weight[i];
  }
  __syncthreads();

  const KvFormat format = params.pages.format;
  std::byte* entry = EntryOfSlot(params.pages, slot);
  // Where k_rope's values would start if the whole entry were of their type.
  std::byte* rope_base = entry;
  int32_t rope_begin = rank;
  if (format == KvFormat::kFp8Latent) {
    EncodeFloat8(latent, rank, entry);
    rope_base = entry + rank + 4 * CeilDiv(rank, kFloat8GroupSize);
    rope_begin = 0;
  } else {
    for (int32_t i = threadIdx.x; i < rank; i += kThreads) EncodeValue(format, entry, i, latent[i]);
  }
  for (int32_t i = threadIdx.x; i < rope.rope_dim / 2; i += kThreads) {
    const int32_t first = FirstOfPair(rope, i), second = SecondOfPair(rope, i);
    const Pair rotated = Rotate(rope, position, i, {kv_a[rank + first], kv_a[rank + second]});
    EncodeValue(format, rope_base, rope_begin + first, rotated.a);
    EncodeValue(format, rope_base, rope_begin + second, rotated.b);
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) GatherKvKernel(GatherKvParams params) {
  const int64_t row = blockIdx.x;
  const int64_t slot = params.slots[row];
  const int32_t rank = params.kv_lora_rank;
  const std::byte* entry = slot < 0 ? nullptr : EntryOfSlot(params.pages, slot);
  for (int32_t i = threadIdx.x; i < rank + params.rope_dim; i += kThreads) {
    const float value =
        entry == nullptr ? 0.0f : LoadEntryValue(entry, params.pages.format, rank, i);
    void* out = i < rank ? params.latent : params.k_rope;
    const int64_t at =
        i < rank ? row * params.latent_row_stride + i : row * params.k_rope_row_stride + i - rank;
    if (params.dtype == DType::kBfloat16) {
      static_cast<uint16_t*>(out)[at] = Bfloat16FromFloat(value);
    } else {
      static_cast<float*>(out)[at] = value;
    }
  }
}

// One block a row.
__global__ void __launch_bounds__(kThreads) RopeKernel(RopeParams params, Fault* fault) {
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const RopeTable& rope = params.rope;
  const int32_t position = params.positions[row];
  WaitForPrevious();
  if (position < 0 || position >= rope.max_positions) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kPosition, row, position);
    return;
  }
  const int32_t half = rope.rope_dim / 2;
  for (int32_t i = threadIdx.x; i < params.num_heads * half; i += kThreads) {
    float* x = params.data + row * params.row_stride + (i / half) * params.head_stride;
    const int32_t first = FirstOfPair(rope, i % half), second = SecondOfPair(rope, i % half);
    const Pair rotated = Rotate(rope, position, i % half, {x[first], x[second]});
    x[first] = rotated.a;
    x[second] = rotated.b;
  }
}

}  // namespace

absl::Status CheckLatentFormat(const KvPages& pages) {
  if (pages.format == KvFormat::kFloat32 || pages.format == KvFormat::kBfloat16 ||
      pages.format == KvFormat::kFp8Latent) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError("no cuda kernel yet for this format of cache entries");
}

absl::Status StoreKv(const Launcher& launcher, const StoreKvParams& params) {
  RETURN_IF_ERROR(CheckStoreKv(params));
  if (params.norm_rope || params.index_key.dim > 0 || !CheckLatentFormat(params.pages).ok()) {
    return StoreEntries(launcher, params);
  }
  const size_t shared_bytes = sizeof(float) * static_cast<size_t>(params.kv_lora_rank);
  if (shared_bytes > kMaxSharedBytes - 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("store_kv: no cuda kernel for a kv_lora_rank of ", params.kv_lora_rank));
  }
  return Launch(launcher, "store_kv", StoreKvKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_rows)),
                 .threads = kThreads,
                 .shared_bytes = shared_bytes,
                 .early = true},
                params, launcher.device.fault);
}

absl::Status GatherKv(const Launcher& launcher, const GatherKvParams& params) {
  RETURN_IF_ERROR(CheckGatherKv(params));
  RETURN_IF_ERROR(CheckLatentFormat(params.pages));
  return Launch(launcher, "gather_kv", GatherKvKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads},
                params);
}

absl::Status Rope(const Launcher& launcher, const RopeParams& params) {
  RETURN_IF_ERROR(CheckRope(params));
  if (params.num_heads == 0 || params.rope.rope_dim == 0) return absl::OkStatus();
  if (params.norm_dim > 0) return NormedRope(launcher, params);
  return Launch(
      launcher, "rope", RopeKernel,
      {.grid = dim3(static_cast<uint32_t>(params.num_rows)), .threads = kThreads, .early = true},
      params, launcher.device.fault);
}

}  // namespace kernels::cuda
