// One stored element to float32 and back, in plain C++.  Exact: every stored value has its own
// float.

#ifndef KERNELS_CPU_CONVERT_H_
#define KERNELS_CPU_CONVERT_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kernels::cpu {

inline float FloatFromBfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t Bfloat16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float FloatFromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

// e4m3fn: bias 7, no infinities, 0x7f and 0xff are NaN.
inline float FloatFromE4m3(uint8_t bits) {
  const uint32_t exponent = bits >> 3 & 0xf;
  const uint32_t mantissa = bits & 0x7;
  float magnitude;
  if ((bits & 0x7f) == 0x7f) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  } else {
    magnitude = std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
  }
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// 2^(bits - 127), which is a float's exponent; 0 is the one subnormal of them; 255 is NaN.
inline float FloatFromE8m0(uint8_t bits) {
  const uint32_t exponent = static_cast<uint32_t>(bits) << 23;
  const uint32_t special = bits == 0 ? 0x00400000u : bits == 0xff ? 0x7fc00000u : 0;
  return std::bit_cast<float>(exponent | special);
}

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_CONVERT_H_
