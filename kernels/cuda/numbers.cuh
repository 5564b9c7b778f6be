// Stored numbers on the device: decoding is exact, encoding rounds to nearest even, as in
// kernels/cpu.

#ifndef KERNELS_CUDA_NUMBERS_CUH_
#define KERNELS_CUDA_NUMBERS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/dtype.h"

namespace kernels::cuda {

inline constexpr int32_t kFloat8GroupSize = 128;  // latent values that share a scale

__device__ inline float FloatFromBfloat16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ inline uint16_t Bfloat16FromFloat(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Element `at` of `rounded`, where that is given, or of `exact`.
__device__ inline void StoreElement(float* exact, uint16_t* rounded, int64_t at, float value) {
  if (rounded != nullptr) {
    rounded[at] = Bfloat16FromFloat(value);
  } else {
    exact[at] = value;
  }
}

__device__ inline float FloatFromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return __uint_as_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) {  // zero or subnormal: exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

__device__ inline float FloatFromE4m3(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80) << 24;
  const uint32_t magnitude = bits & 0x7f;
  if (magnitude == 0x7f) return __uint_as_float(sign | 0x7fc00000);
  if (magnitude < 8) {  // zero or subnormal
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return __uint_as_float(sign | ((magnitude << 20) + (120u << 23)));
}

__device__ inline float FloatFromE8m0(uint8_t bits) {
  if (bits == 0xff) return __uint_as_float(0x7fc00000);
  return bits == 0 ? 0x1p-127f : __uint_as_float(static_cast<uint32_t>(bits) << 23);
}

// Beyond 448 saturates, infinities too; NaN stays NaN.
__device__ inline uint8_t E4m3FromFloat(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const uint32_t magnitude_bits = bits & 0x7fffffff;
  if (magnitude_bits > 0x7f800000) return sign | 0x7f;
  const float magnitude = __uint_as_float(magnitude_bits);
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude < 0x1p-6f) {
    // Subnormal: multiples of 2^-9.  At 2^14 a float's last bit is worth 2^-9, so the sum rounds.
    return sign | static_cast<uint8_t>(__float_as_uint(magnitude + 0x1p14f) - 0x46800000);
  }
  const uint32_t rounded = magnitude_bits + 0x7ffff + (magnitude_bits >> 20 & 1);
  return sign | static_cast<uint8_t>((rounded >> 20) - ((127 - 7) << 3));
}

// max(amax, 1e-4) / 448, rounded up to a power of two.
__device__ inline float Float8GroupScale(float amax) {
  const float scale = __fdiv_rn(fmaxf(amax, 1e-4f), 448.0f);
  const uint32_t bits = __float_as_uint(scale);
  if (bits >= 0x7f000000) return scale;  // no power of two above it is finite
  return __uint_as_float((bits + 0x7fffff) & 0x7f800000);
}

// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
__device__ inline float FloatFromE2m1(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7;
  const float value = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                                    : __uint_as_float((magnitude << 22) + (126u << 23));
  return (bits & 0x8) != 0 ? -value : value;
}

// Element i of an array of floating-point `dtype`.
__device__ inline float LoadElement(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DType::kBfloat16:
      return FloatFromBfloat16(static_cast<const uint16_t*>(data)[i]);
    case DType::kFloat16:
      return FloatFromFloat16(static_cast<const uint16_t*>(data)[i]);
    case DType::kFloat8E4m3:
      return FloatFromE4m3(static_cast<const uint8_t*>(data)[i]);
    case DType::kFloat8E8m0:
      return FloatFromE8m0(static_cast<const uint8_t*>(data)[i]);
    case DType::kFloat4E2m1: {  // two a byte, the first in the low half
      const uint8_t byte = static_cast<const uint8_t*>(data)[i / 2];
      return FloatFromE2m1(i % 2 == 0 ? byte & 0xf : byte >> 4);
    }
    default:
      return 0;
  }
}

// silu(min(gate, limit)) * clamp(up, -limit, limit); limit 0: no clamp.  NaN stays NaN.
__device__ inline float SwiGlu(float gate, float up, float limit) {
  if (limit > 0) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate / (1.0f + expf(-gate)) * up;
}

// The same to some units of the last place, where it is rounded to bf16 anyway.
__device__ inline float RoughSwiGlu(float gate, float up, float limit) {
  if (limit > 0) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate * __fdividef(1.0f, 1.0f + __expf(-gate)) * up;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_NUMBERS_CUH_
