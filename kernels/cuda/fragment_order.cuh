// The order of an activation row's bf16 values that quantized weights are multiplied with
// (quantized_products.h): the one in which a warpgroup's threads get a row's codes from shared
// memory.  A thread holds four consecutive codes of every 16 (fp8) or eight of every 32 (fp4), and
// the product takes of each 16 of the depth two neighbours and the two that are eight further on.

#ifndef KERNELS_CUDA_FRAGMENT_ORDER_CUH_
#define KERNELS_CUDA_FRAGMENT_ORDER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/weight_format.h"

namespace kernels::cuda {

// Where value k of a row stands.
__device__ inline int64_t OrderedPlace(WeightFormat format, int64_t k) {
  if (format == WeightFormat::kFloat8) {
    const int64_t t = k % 16 / 4, i = k % 4;
    return k / 16 * 16 + 8 * (i / 2) + 2 * t + i % 2;
  }
  if (format == WeightFormat::kFloat4) {
    const int64_t t = k % 32 / 8, pair = k % 4, second = k % 8 / 4;
    return k / 32 * 32 + 16 * (pair / 2) + 8 * (pair % 2) + 2 * t + second;
  }
  return k;
}

// Eight values from `k` on, a multiple of 8, to their places in `row`.
__device__ inline void StoreOrdered(WeightFormat format, uint16_t* row, int64_t k, uint4 values) {
  if (format == WeightFormat::kFloat8) {
    *reinterpret_cast<uint2*>(row + OrderedPlace(format, k)) = make_uint2(values.x, values.z);
    *reinterpret_cast<uint2*>(row + OrderedPlace(format, k + 2)) = make_uint2(values.y, values.w);
  } else if (format == WeightFormat::kFloat4) {
    const uint32_t pairs[4] = {
        __byte_perm(values.x, values.z, 0x5410), __byte_perm(values.x, values.z, 0x7632),
        __byte_perm(values.y, values.w, 0x5410), __byte_perm(values.y, values.w, 0x7632)};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      *reinterpret_cast<uint32_t*>(row + OrderedPlace(format, k + i)) = pairs[i];
    }
  } else {
    *reinterpret_cast<uint4*>(row + k) = values;
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FRAGMENT_ORDER_CUH_
