#include "kernels/cuda/bfloat16_weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace kernels::cuda {
namespace {

float FromE4m3(uint32_t code) {
  const uint32_t exponent = code >> 3 & 0xf, mantissa = code & 0x7;
  float value = exponent == 0
                    ? std::ldexp(static_cast<float>(mantissa), -9)
                    : std::ldexp(static_cast<float>(mantissa | 8), static_cast<int>(exponent) - 10);
  if (exponent == 0xf && mantissa == 7) value = std::numeric_limits<float>::quiet_NaN();
  return (code & 0x80) != 0 ? -value : value;
}

float ScaleAt(const WeightTensor& tensor, int64_t i) {
  if (tensor.scale_dtype == DType::kFloat32) return static_cast<const float*>(tensor.scales)[i];
  const uint8_t code = static_cast<const uint8_t*>(tensor.scales)[i];
  return code == 0xff ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, code - 127);
}

uint16_t Rounded(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

Bfloat16Weight ToBfloat16(const WeightTensor& tensor) {
  float values[256];
  for (uint32_t code = 0; code < 256; ++code) values[code] = FromE4m3(code);
  const auto* codes = static_cast<const uint8_t*>(tensor.data);
  Bfloat16Weight wide;
  wide.numbers.resize(static_cast<size_t>(tensor.rows * tensor.cols));
  const int64_t block_rows = tensor.scales == nullptr ? tensor.rows : tensor.scale_block_rows;
  const int64_t block_cols = tensor.scales == nullptr ? tensor.cols : tensor.scale_block_cols;
  const int64_t scale_cols = (tensor.cols + block_cols - 1) / block_cols;
  for (int64_t row = 0; row < tensor.rows; ++row) {
    for (int64_t block = 0; block < scale_cols; ++block) {
      const float scale =
          tensor.scales == nullptr ? 1 : ScaleAt(tensor, row / block_rows * scale_cols + block);
      const int64_t end = std::min((block + 1) * block_cols, tensor.cols);
      for (int64_t col = block * block_cols; col < end; ++col) {
        const int64_t i = row * tensor.cols + col;
        wide.numbers[static_cast<size_t>(i)] = Rounded(values[codes[i]] * scale);
      }
    }
  }
  wide.tensor = {.data = wide.numbers.data(),
                 .dtype = DType::kBfloat16,
                 .rows = tensor.rows,
                 .cols = tensor.cols};
  return wide;
}

}  // namespace kernels::cuda
