// e2m1 values as pairs of bf16 numbers, exactly: an e2m1 code is a bf16 number's sign, low exponent
// and top mantissa bit, 2^-126 of the value.

#ifndef KERNELS_CUDA_FLOAT4_PAIR_CUH_
#define KERNELS_CUDA_FLOAT4_PAIR_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels::cuda {

// Codes kPair and kPair + 4 of eight, the first in the lowest bits: each number 2^-126 of its
// value.
template <int32_t kPair>
__device__ inline uint32_t SpreadFloat4(uint32_t codes) {
  constexpr int32_t kShift = 6 - 4 * kPair;  // of exponent and mantissa
  const uint32_t magnitudes =
      kShift >= 0 ? codes << (kShift >= 0 ? kShift : 0) : codes >> (kShift >= 0 ? 0 : -kShift);
  return (magnitudes & 0x01c001c0u) | (codes << (12 - 4 * kPair) & 0x80008000u);
}

// A scale 2^(code - 127) times 2^(126 - kFloat4Exponent), as a pair of bf16 numbers: times what
// SpreadFloat4 gives, the scaled value's 2^-kFloat4Exponent.  A scale is at most 2^65.
inline constexpr int32_t kFloat4Exponent = 64;
__device__ inline uint32_t Float4ScalePair(uint32_t code) {
  constexpr uint32_t kLargest = 127 + kFloat4Exponent + 1;
  return (min(code, kLargest) + (126 - kFloat4Exponent)) * 0x00800080u;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLOAT4_PAIR_CUH_
