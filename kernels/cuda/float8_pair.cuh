// e4m3 values as pairs of bf16 numbers, exactly: an e4m3 code is a bf16 number's sign, low exponent
// and top mantissa bits, 2^-120 of the value.  Codes that are no numbers become 480.

#ifndef KERNELS_CUDA_FLOAT8_PAIR_CUH_
#define KERNELS_CUDA_FLOAT8_PAIR_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

// Four codes, the first in the lowest byte; each number 2^-120 of its value, also below the
// smallest normal one.
__device__ inline uint2 SpreadFloat8(uint32_t codes) {
  const auto spread = [](uint32_t halves) {  // codes in the high bytes
    return (halves >> 4 & 0x07f007f0u) | (halves & 0x80008000u);
  };
  return {spread(__byte_perm(codes, 0, 0x1404)), spread(__byte_perm(codes, 0, 0x3424))};
}

// Pairs of bf16 numbers, the first in the lower half.
__device__ inline uint32_t MultiplyPair(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLOAT8_PAIR_CUH_
