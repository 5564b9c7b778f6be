#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/matrix_kernels.h"

namespace kernels::cpu {
namespace {

std::array<float, 256> MakeE4m3Table() {
  std::array<float, 256> table;
  for (int bits = 0; bits < 256; ++bits) {
    table[static_cast<size_t>(bits)] = FloatFromE4m3(static_cast<uint8_t>(bits)) * kE4m3Unit;
  }
  return table;
}

float ScaledE4m3(uint8_t bits) {
  static const std::array<float, 256> kTable = MakeE4m3Table();
  return kTable[bits];
}

// e2m1: sign, two bits of exponent, one of mantissa.
constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

float ToFloat(float value) { return value; }
struct Float16Bits {
  uint16_t bits;
};
struct Bfloat16Bits {
  uint16_t bits;
};
struct E4m3Bits {
  uint8_t bits;
};
struct E2m1Pair {  // two inner steps
  uint8_t bits;
};
float ToFloat(Float16Bits value) { return FloatFromFloat16(value.bits); }
float ToFloat(Bfloat16Bits value) { return FloatFromBfloat16(value.bits); }
float ToFloat(E4m3Bits value) { return ScaledE4m3(value.bits); }

// weights[k][0:32] of a chunk, whatever the layout.
template <typename Element, int64_t kStep>
void ExpandStep(const Element* weights, int64_t k, float* expanded) {
  const Element* step = weights + k / kStep * kStep * kPanelColumns + k % kStep;
  for (int32_t j = 0; j < kPanelColumns; ++j) expanded[j] = ToFloat(step[j * kStep]);
}

template <>
void ExpandStep<E2m1Pair, 2>(const E2m1Pair* weights, int64_t k, float* expanded) {
  const E2m1Pair* pairs = weights + k / 2 * kPanelColumns;
  for (int32_t j = 0; j < kPanelColumns; ++j) {
    expanded[j] = kE2m1Values[pairs[j].bits >> 4 * (k % 2) & 0xf];
  }
}

template <typename Element, int64_t kStep>
void Expand(const void* weights, int64_t count, float* expanded) {
  for (int64_t k = 0; k < count; ++k) {
    ExpandStep<Element, kStep>(static_cast<const Element*>(weights), k,
                               expanded + k * kPanelColumns);
  }
}

void Begin(const float* scales, const float* c, float* sums) {
  for (int32_t j = 0; j < kPanelColumns; ++j) sums[j] = scales != nullptr ? 0.0f : c[j];
}

void End(const float* sums, const float* scales, float* c) {
  for (int32_t j = 0; j < kPanelColumns; ++j) {
    c[j] = scales != nullptr ? c[j] + sums[j] * scales[j] : sums[j];
  }
}

void AddStep(float a, const float* weights, float* sums) {
  for (int32_t j = 0; j < kPanelColumns; ++j) sums[j] += a * weights[j];
}

template <typename Element, int64_t kStep>
void MultiplyRows(const float* const* rows, int32_t num_rows, int64_t k_begin, int64_t count,
                  const void* weights, const float* scales, float* c) {
  float sums[kMaxDirectRows][kPanelColumns];
  for (int32_t r = 0; r < num_rows; ++r) Begin(scales, c + r * kPanelColumns, sums[r]);
  for (int64_t k = 0; k < count; ++k) {
    float step[kPanelColumns];
    ExpandStep<Element, kStep>(static_cast<const Element*>(weights), k, step);
    for (int32_t r = 0; r < num_rows; ++r) AddStep(rows[r][k_begin + k], step, sums[r]);
  }
  for (int32_t r = 0; r < num_rows; ++r) End(sums[r], scales, c + r * kPanelColumns);
}

void MultiplyTile(const float* const* rows, int32_t num_rows, int64_t k_begin, int64_t count,
                  const float* expanded, const float* scales, float* c) {
  for (int32_t r = 0; r < num_rows; ++r) {
    float sums[kPanelColumns];
    Begin(scales, c + r * kPanelColumns, sums);
    for (int64_t k = 0; k < count; ++k) {
      AddStep(rows[r][k_begin + k], expanded + k * kPanelColumns, sums);
    }
    End(sums, scales, c + r * kPanelColumns);
  }
}

void SwiGlu(const float* gate, const float* up, int64_t n, float limit, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    // Written so that NaN passes through: std::min and std::max would keep the limit.
    float g = gate[i], u = up[i];
    if (limit > 0) {
      g = g > limit ? limit : g;
      u = u > limit ? limit : u < -limit ? -limit : u;
    }
    out[i] = g / (1.0f + std::exp(-g)) * u;
  }
}

constexpr MatrixKernels kGeneric = {
    .name = "generic",
    .multiply_rows = {MultiplyRows<float, 1>, MultiplyRows<Float16Bits, 1>,
                      MultiplyRows<Bfloat16Bits, 2>, MultiplyRows<E4m3Bits, 2>,
                      MultiplyRows<E2m1Pair, 2>},
    .expand = {Expand<float, 1>, Expand<Float16Bits, 1>, Expand<Bfloat16Bits, 2>,
               Expand<E4m3Bits, 2>, Expand<E2m1Pair, 2>},
    .multiply_tile = MultiplyTile,
    .swiglu = SwiGlu,
    .keeps_e4m3_nan = true,
};

}  // namespace

const MatrixKernels& GenericMatrixKernels() { return kGeneric; }

const MatrixKernels& BestMatrixKernels() {
  const MatrixKernels* avx2 = Avx2MatrixKernels();
  return avx2 != nullptr ? *avx2 : kGeneric;
}

}  // namespace kernels::cpu
