// Element types of activations, weights and caches.

#ifndef KERNELS_DTYPE_H_
#define KERNELS_DTYPE_H_

#include <cstdint>
#include <string_view>

namespace kernels {

enum class DType : uint8_t {
  kFloat32,
  kBfloat16,
  kFloat16,
  kFloat8E4m3,   // e4m3fn: no infinities, 0x7f and 0xff are NaN, largest 448
  kFloat8E8m0,   // a power-of-two scale: 2^(byte - 127)
  kFloat4E2m1,   // two values a byte, low nibble first
  kInt32,
  kInt64,
};

// Bits of one element (4 for kFloat4E2m1).
int32_t DTypeBits(DType dtype);

// "float32", "bfloat16", ...
std::string_view DTypeName(DType dtype);

}  // namespace kernels

#endif  // KERNELS_DTYPE_H_
