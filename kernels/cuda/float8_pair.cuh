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
  // Codes in the odd bytes, the lower one's sign all over the byte between them: a shift by four
  // then puts either code in its place, behind copies of its sign.
  uint32_t low, high;
  asm("prmt.b32 %0, %1, 0, 0x1804;" : "=r"(low) : "r"(codes));
  asm("prmt.b32 %0, %1, 0, 0x3a24;" : "=r"(high) : "r"(codes));
  const auto place = [](uint32_t halves) {
    return static_cast<uint32_t>(static_cast<int32_t>(halves) >> 4) & 0x87f087f0u;
  };
  return {place(low), place(high)};
}

// The same by fewer instructions in another order: codes 0 and 2, codes 1 and 3.
__device__ inline uint2 SpreadFloat8Apart(uint32_t codes) {
  constexpr uint32_t kNumber = 0x07f007f0, kSign = 0x80008000;
  return {(codes << 4 & kNumber) | (codes << 8 & kSign), (codes >> 4 & kNumber) | (codes & kSign)};
}

// Pairs of bf16 numbers, the first in the lower half.
__device__ inline uint32_t MultiplyPair(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLOAT8_PAIR_CUH_
