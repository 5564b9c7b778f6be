// Random checkpoint tensors of every stored format, with their values in double for references.
// Decodes by definition (ldexp), on purpose not with the code under test.

#ifndef TESTS_KERNELS_TEST_WEIGHTS_H_
#define TESTS_KERNELS_TEST_WEIGHTS_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/tensor.h"

namespace kernels {

struct WeightKind {
  std::string name;
  DType dtype;
  int64_t scale_block_rows = 0;  // 0: unscaled
  int64_t scale_block_cols = 0;
  DType scale_dtype = DType::kFloat32;

  // `cols`, or one more where the format has no odd number of columns.
  int64_t Columns(int64_t cols) const {
    return dtype == DType::kFloat4E2m1 ? (cols + 1) / 2 * 2 : cols;
  }
};

inline std::vector<WeightKind> AllWeightKinds() {
  return {{"float32", DType::kFloat32},
          {"float16", DType::kFloat16},
          {"bfloat16", DType::kBfloat16},
          {"e4m3", DType::kFloat8E4m3},
          {"e4m3_128x128", DType::kFloat8E4m3, 128, 128},
          {"e4m3_24x40", DType::kFloat8E4m3, 24, 40},
          {"e4m3_odd_blocks", DType::kFloat8E4m3, 7, 13},
          {"e4m3_256x512", DType::kFloat8E4m3, 256, 512},
          {"e4m3_e8m0", DType::kFloat8E4m3, 32, 32, DType::kFloat8E8m0},
          {"bfloat16_scaled", DType::kBfloat16, 64, 32},
          {"e2m1", DType::kFloat4E2m1},
          {"e2m1_1x32_e8m0", DType::kFloat4E2m1, 1, 32, DType::kFloat8E8m0},
          {"e2m1_float32_scales", DType::kFloat4E2m1, 3, 10}};
}

// Value of `bits` with the given field widths; `fn`: no infinities, all-ones is NaN (e4m3fn).
inline double DecodeBits(uint32_t bits, int exponent_bits, int mantissa_bits, bool fn) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const bool negative = (bits >> (exponent_bits + mantissa_bits) & 1) != 0;
  const bool top = exponent == (1 << exponent_bits) - 1;
  double value;
  if (top && (fn ? mantissa == (1 << mantissa_bits) - 1 : mantissa != 0)) {
    return std::numeric_limits<double>::quiet_NaN();
  } else if (top && !fn) {
    value = std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return negative ? -value : value;
}

inline double DecodeElement(DType dtype, const uint8_t* bytes, int64_t i) {
  uint16_t half;
  float single;
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(&single, bytes + 4 * i, 4);
      return single;
    case DType::kFloat16:
      std::memcpy(&half, bytes + 2 * i, 2);
      return DecodeBits(half, 5, 10, false);
    case DType::kBfloat16:
      std::memcpy(&half, bytes + 2 * i, 2);
      return DecodeBits(half, 8, 7, false);
    case DType::kFloat8E4m3:
      return DecodeBits(bytes[i], 4, 3, true);
    case DType::kFloat4E2m1: {
      // models.md 2.5: the even column in the low four bits.
      constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      const int bits = i % 2 == 0 ? bytes[i / 2] & 0xf : bytes[i / 2] >> 4;
      return bits < 8 ? kValues[bits] : -kValues[bits - 8];
    }
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

// Owns what `tensor` points at; may be moved, not copied.
struct TestWeight {
  WeightTensor tensor;
  std::vector<uint8_t> bytes;
  std::vector<uint8_t> scale_bytes;
  std::vector<double> values;  // [rows, cols], scales applied

  TestWeight() = default;
  TestWeight(TestWeight&&) = default;
  TestWeight& operator=(TestWeight&&) = default;

  double at(int64_t row, int64_t col) const {
    return values[static_cast<size_t>(row * tensor.cols + col)];
  }
};

// Values of about unit size; every bit pattern of the smaller formats between 2^-4 and 2 comes up.
inline TestWeight MakeWeight(const WeightKind& kind, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  TestWeight weight;
  weight.tensor = {.dtype = kind.dtype, .rows = rows, .cols = cols};
  const int64_t count = rows * cols;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t sign = random() & 1;
    if (kind.dtype == DType::kFloat32) {
      const float value = std::normal_distribution<float>()(random);
      const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
      weight.bytes.insert(weight.bytes.end(), bytes, bytes + 4);
    } else if (kind.dtype == DType::kFloat8E4m3) {
      // Any exponent from subnormal to 2^0.
      weight.bytes.push_back(static_cast<uint8_t>(sign << 7 | random() % 0x40));
    } else if (kind.dtype == DType::kFloat4E2m1) {
      if (i % 2 == 0) weight.bytes.push_back(static_cast<uint8_t>(random()));
    } else {
      const int mantissa_bits = kind.dtype == DType::kFloat16 ? 10 : 7;
      const uint32_t bias = kind.dtype == DType::kFloat16 ? 15 : 127;
      const uint32_t exponent = bias - random() % 5;
      const uint32_t bits =
          sign << 15 | exponent << mantissa_bits | random() % (1u << mantissa_bits);
      weight.bytes.push_back(static_cast<uint8_t>(bits & 0xff));
      weight.bytes.push_back(static_cast<uint8_t>(bits >> 8));
    }
  }
  std::vector<double> scales;
  int64_t scale_cols = 0;
  if (kind.scale_block_rows > 0) {
    const int64_t scale_rows = (rows + kind.scale_block_rows - 1) / kind.scale_block_rows;
    scale_cols = (cols + kind.scale_block_cols - 1) / kind.scale_block_cols;
    for (int64_t i = 0; i < scale_rows * scale_cols; ++i) {
      if (kind.scale_dtype == DType::kFloat8E8m0) {
        weight.scale_bytes.push_back(static_cast<uint8_t>(124 + random() % 6));
        scales.push_back(std::ldexp(1.0, weight.scale_bytes.back() - 127));
      } else {
        const float scale = std::uniform_real_distribution<float>(0.25f, 2.0f)(random);
        const auto* bytes = reinterpret_cast<const uint8_t*>(&scale);
        weight.scale_bytes.insert(weight.scale_bytes.end(), bytes, bytes + 4);
        scales.push_back(scale);
      }
    }
    weight.tensor.scales = weight.scale_bytes.data();
    weight.tensor.scale_dtype = kind.scale_dtype;
    weight.tensor.scale_block_rows = kind.scale_block_rows;
    weight.tensor.scale_block_cols = kind.scale_block_cols;
  }
  weight.tensor.data = weight.bytes.data();
  for (int64_t i = 0; i < count; ++i) {
    double value = DecodeElement(kind.dtype, weight.bytes.data(), i);
    if (scale_cols > 0) {
      value *= scales[static_cast<size_t>(i / cols / kind.scale_block_rows * scale_cols +
                                          i % cols / kind.scale_block_cols)];
    }
    weight.values.push_back(value);
  }
  return weight;
}

inline std::vector<float> RandomFloats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

inline double Silu(double x) { return x / (1 + std::exp(-x)); }

inline std::vector<double> RmsNormReference(const std::vector<double>& x,
                                            const std::vector<float>& weight, double eps) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  std::vector<double> out;
  for (size_t i = 0; i < x.size(); ++i) {
    out.push_back(x[i] / std::sqrt(sum / static_cast<double>(x.size()) + eps) * weight[i]);
  }
  return out;
}

}  // namespace kernels

#endif  // TESTS_KERNELS_TEST_WEIGHTS_H_
