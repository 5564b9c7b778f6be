// One entry of a cache group on the device, in every KvFormat (models.md 9): `dim` values, then
// `rope_dim` rotary ones.  latent_entry.cuh is the shorter way to entries that lie in one piece.

#ifndef KERNELS_CUDA_KV_ENTRY_CUH_
#define KERNELS_CUDA_KV_ENTRY_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/latent_entry.cuh"
#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {

inline constexpr int32_t kSharedKvGroupSize = 64;  // values of kFp8SharedKv that share a scale

__device__ inline bool HasFloat8(KvFormat format) {
  return format != KvFormat::kFloat32 && format != KvFormat::kBfloat16;
}

// Where an entry's parts lie.
struct EntryParts {
  std::byte* values;  // [dim]
  std::byte* rope;    // [rope_dim]
  std::byte* scales;  // of fp8 values
};

// REQUIRES: slot >= 0.
__device__ inline EntryParts PartsOfSlot(const KvPages& pages, int64_t slot, int32_t dim,
                                         int32_t rope_dim) {
  std::byte* block = pages.base + slot / pages.block_size * pages.block_stride;
  const int64_t entry = slot % pages.block_size;
  std::byte* values = block + entry * pages.entry_bytes;
  switch (pages.format) {
    case KvFormat::kFloat32:
      return {values, values + 4 * dim, nullptr};
    case KvFormat::kBfloat16:
      return {values, values + 2 * dim, nullptr};
    case KvFormat::kFp8Latent: {
      std::byte* scales = values + dim;
      return {values, scales + 4 * CeilDiv(dim, kFloat8GroupSize), scales};
    }
    case KvFormat::kFp8IndexKey:
    case KvFormat::kFp8SharedKv: {  // scales behind all entries of the block
      const int64_t row_bytes = dim + 2 * int64_t{rope_dim};
      values = block + entry * row_bytes;
      return {values, values + dim,
              block + pages.block_size * row_bytes + entry * (pages.entry_bytes - row_bytes)};
    }
  }
  return {};
}

// Value i of the entry, i < dim + rope_dim.
__device__ inline float LoadValue(const EntryParts& parts, KvFormat format, int32_t dim,
                                  int32_t i) {
  const bool rotary = i >= dim;
  const std::byte* from = rotary ? parts.rope : parts.values;
  const int32_t at = rotary ? i - dim : i;
  if (format == KvFormat::kFloat32) return reinterpret_cast<const float*>(from)[at];
  if (rotary || format == KvFormat::kBfloat16) return FloatFromBfloat16(LoadBytes16(from + 2 * at));
  const float value = FloatFromE4m3(static_cast<uint8_t>(from[at]));
  if (format == KvFormat::kFp8SharedKv) {
    return value * FloatFromE8m0(static_cast<uint8_t>(parts.scales[at / kSharedKvGroupSize]));
  }
  return value * LoadBytesFloat(parts.scales + 4 * (at / kFloat8GroupSize));
}

// values [dim] -> e4m3 and scales; a warp a group.
__device__ inline void StoreFloat8(const EntryParts& parts, KvFormat format, const float* values,
                                   int32_t dim) {
  const bool byte_scales = format == KvFormat::kFp8SharedKv;
  const int32_t group_size = byte_scales ? kSharedKvGroupSize : kFloat8GroupSize;
  const int32_t num_warps = static_cast<int32_t>(blockDim.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t groups = CeilDiv(dim, group_size);
  // Bytes of scales come in eights, the last of them zeros.
  const int32_t slots = byte_scales ? CeilDiv(groups, 8) * 8 : groups;
  for (int32_t group = static_cast<int32_t>(threadIdx.x) / kWarpSize; group < slots;
       group += num_warps) {
    if (group >= groups) {
      if (lane == 0) parts.scales[group] = std::byte{0};
      continue;
    }
    const int32_t begin = group * group_size;
    const int32_t end = min(begin + group_size, dim);
    float amax = 0;
    for (int32_t i = begin + lane; i < end; i += kWarpSize) amax = fmaxf(amax, fabsf(values[i]));
    for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    }
    const float scale = Float8GroupScale(amax);
    const float inverse = 1.0f / scale;  // a power of two as well: products are exact
    if (lane == 0) {
      if (byte_scales) {  // a power of two: its exponent, bias included; infinite becomes NaN
        parts.scales[group] = static_cast<std::byte>(__float_as_uint(scale) >> 23);
      } else {
        StoreBytesFloat(parts.scales + 4 * group, scale);
      }
    }
    for (int32_t i = begin + lane; i < end; i += kWarpSize) {
      parts.values[i] = static_cast<std::byte>(E4m3FromFloat(values[i] * inverse));
    }
  }
}

// values [dim + rope_dim] in shared memory -> the entry of `slot`, with the threads of a block of
// whole warps; no barrier.  The bytes are those that the CPU writes.
__device__ inline void StoreEntry(const KvPages& pages, int64_t slot, const float* values,
                                  int32_t dim, int32_t rope_dim) {
  const EntryParts parts = PartsOfSlot(pages, slot, dim, rope_dim);
  const bool float8 = HasFloat8(pages.format);
  if (float8) StoreFloat8(parts, pages.format, values, dim);
  for (int32_t i = static_cast<int32_t>(threadIdx.x) + (float8 ? dim : 0); i < dim + rope_dim;
       i += static_cast<int32_t>(blockDim.x)) {
    std::byte* to = i < dim ? parts.values : parts.rope;
    const int32_t at = i < dim ? i : i - dim;
    if (pages.format == KvFormat::kFloat32) {
      reinterpret_cast<float*>(to)[at] = values[i];
    } else if (pages.format == KvFormat::kBfloat16) {
      reinterpret_cast<uint16_t*>(to)[at] = Bfloat16FromFloat(values[i]);
    } else {
      StoreBytes16(to + 2 * at, Bfloat16FromFloat(values[i]));
    }
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_KV_ENTRY_CUH_
