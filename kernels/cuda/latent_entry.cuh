// One entry of a latent cache on the device, in each KvFormat (models.md 9).

#ifndef KERNELS_CUDA_LATENT_ENTRY_CUH_
#define KERNELS_CUDA_LATENT_ENTRY_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/numbers.cuh"
#include "kernels/tensor.h"

namespace kernels::cuda {

// REQUIRES: slot >= 0.
__device__ inline std::byte* EntryOfSlot(const KvPages& pages, int64_t slot) {
  return pages.base + slot / pages.block_size * pages.block_stride +
         slot % pages.block_size * pages.entry_bytes;
}

// Entries need no alignment beyond that of their first byte.
__device__ inline uint16_t LoadBytes16(const std::byte* bytes) {
  return static_cast<uint16_t>(static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1])
                                                                     << 8);
}
__device__ inline void StoreBytes16(std::byte* bytes, uint16_t value) {
  bytes[0] = static_cast<std::byte>(value & 0xff);
  bytes[1] = static_cast<std::byte>(value >> 8);
}
__device__ inline float LoadBytesFloat(const std::byte* bytes) {
  return __uint_as_float(LoadBytes16(bytes) | static_cast<uint32_t>(LoadBytes16(bytes + 2)) << 16);
}
__device__ inline void StoreBytesFloat(std::byte* bytes, float value) {
  const uint32_t bits = __float_as_uint(value);
  StoreBytes16(bytes, static_cast<uint16_t>(bits & 0xffff));
  StoreBytes16(bytes + 2, static_cast<uint16_t>(bits >> 16));
}

// Value i of latent ++ k_rope, in the formats of latents.
__device__ inline float LoadEntryValue(const std::byte* entry, KvFormat format, int32_t rank,
                                       int32_t i) {
  switch (format) {
    case KvFormat::kFloat32:
      return reinterpret_cast<const float*>(entry)[i];
    case KvFormat::kBfloat16:
      return FloatFromBfloat16(LoadBytes16(entry + 2 * i));
    case KvFormat::kFp8IndexKey:
    case KvFormat::kFp8SharedKv:
      break;  // no latents
    case KvFormat::kFp8Latent: {
      const int32_t groups = (rank + kFloat8GroupSize - 1) / kFloat8GroupSize;
      if (i >= rank) {
        return FloatFromBfloat16(LoadBytes16(entry + rank + 4 * groups + 2 * (i - rank)));
      }
      return FloatFromE4m3(static_cast<uint8_t>(entry[i])) *
             LoadBytesFloat(entry + rank + 4 * (i / kFloat8GroupSize));
    }
  }
  return 0;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LATENT_ENTRY_CUH_
