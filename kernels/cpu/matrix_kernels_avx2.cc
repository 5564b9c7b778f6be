// Compiled with AVX2, FMA and F16C.  Includes no header with inline functions of its own: the
// linker could pick a copy made here for code that runs on older machines.

#include "kernels/cpu/matrix_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace kernels::cpu {
namespace {

constexpr int kVector = 8;  // floats

// The loops over rows and vectors are unrolled by pragma: left to itself the compiler unrolls them
// after it has given up keeping the arrays of sums in registers, and stores each sum at every step
// (3 times slower).

// Weights of 32 columns and one inner step.
struct Step {
  __m256 v[kPanelColumns / kVector];
};

// How each stored format is read: kSteps inner steps lie in kBytes; Load gives one of them.
struct Float32Format {
  static constexpr int kSteps = 1, kBytes = 128;
  template <int kStep>
  static Step Load(const char* weights) {
    const float* w = reinterpret_cast<const float*>(weights);
    return {{_mm256_loadu_ps(w), _mm256_loadu_ps(w + 8), _mm256_loadu_ps(w + 16),
             _mm256_loadu_ps(w + 24)}};
  }
};

struct Float16Format {
  static constexpr int kSteps = 1, kBytes = 64;
  template <int kStep>
  static Step Load(const char* weights) {
    Step step;
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      step.v[i] = _mm256_cvtph_ps(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + i * kVector * 2)));
    }
    return step;
  }
};

struct Bfloat16Format {
  static constexpr int kSteps = 2, kBytes = 128;
  template <int kStep>
  static Step Load(const char* weights) {
    Step step;
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + i * 32));
      step.v[i] = _mm256_castsi256_ps(
          kStep == 0 ? _mm256_slli_epi32(pairs, 16)
                     : _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    return step;
  }
};

// s eeee mmm -> float16 s 0eeee mmm0000000, which means value * 2^-8, subnormals included.
struct E4m3Format {
  static constexpr int kSteps = 2, kBytes = 64;
  template <int kStep>
  static Step Load(const char* weights) {
    Step step;
#pragma GCC unroll 8
    for (int i = 0; i < 2; ++i) {
      __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + i * 32));
      if (kStep == 0) pairs = _mm256_slli_epi16(pairs, 8);
      const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(pairs, 1),
                                              _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
      step.v[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      step.v[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
    return step;
  }
};

// Four bits pick the upper byte of a float16; the lower byte of these values is always 0.
struct E2m1Format {
  static constexpr int kSteps = 2, kBytes = 32;
  template <int kStep>
  static Step Load(const char* weights) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, static_cast<char>(0x80),
                      static_cast<char>(0xb8), static_cast<char>(0xbc), static_cast<char>(0xbe),
                      static_cast<char>(0xc0), static_cast<char>(0xc2), static_cast<char>(0xc4),
                      static_cast<char>(0xc6)));
    __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
    if (kStep == 1) pairs = _mm256_srli_epi16(pairs, 4);
    const __m256i upper =
        _mm256_shuffle_epi8(table, _mm256_and_si256(pairs, _mm256_set1_epi8(0xf)));
    const __m128i columns[2] = {_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)};
    Step step;
#pragma GCC unroll 8
    for (int i = 0; i < 2; ++i) {
      const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(columns[i]), 8);
      step.v[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
      step.v[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
    return step;
  }
};

// kVectors * 8 sums of kRows rows, from column `c` points at.
template <int kRows, int kVectors>
struct Sums {
  __m256 v[kRows][kVectors];

  void Begin(const float* scales, const float* c) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        v[r][i] = scales != nullptr ? _mm256_setzero_ps()
                                    : _mm256_loadu_ps(c + r * kPanelColumns + i * kVector);
      }
    }
  }

  void End(const float* scales, float* c) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        float* to = c + r * kPanelColumns + i * kVector;
        _mm256_storeu_ps(to, scales != nullptr
                                 ? _mm256_fmadd_ps(v[r][i], _mm256_loadu_ps(scales + i * kVector),
                                                   _mm256_loadu_ps(to))
                                 : v[r][i]);
      }
    }
  }

  void Add(int row, const float* a, const __m256* weights) {
    const __m256 value = _mm256_broadcast_ss(a);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) v[row][i] = _mm256_fmadd_ps(value, weights[i], v[row][i]);
  }
};

template <typename Format, int kRows>
void MultiplyRowsOf(const float* const* rows, int64_t k_begin, int64_t count, const char* weights,
                    const float* scales, float* c) {
  const float* a[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) a[r] = rows[r] + k_begin;
  Sums<kRows, 4> sums;
  sums.Begin(scales, c);
  int64_t k = 0;
  for (; k + Format::kSteps <= count; k += Format::kSteps) {
    const Step first = Format::template Load<0>(weights);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums.Add(r, a[r] + k, first.v);
    if constexpr (Format::kSteps == 2) {
      const Step second = Format::template Load<1>(weights);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums.Add(r, a[r] + k + 1, second.v);
    }
    weights += Format::kBytes;
  }
  if (k < count) {
    const Step last = Format::template Load<0>(weights);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums.Add(r, a[r] + k, last.v);
  }
  sums.End(scales, c);
}

template <typename Format>
void MultiplyRows(const float* const* rows, int32_t num_rows, int64_t k_begin, int64_t count,
                  const void* weights, const float* scales, float* c) {
  const char* bytes = static_cast<const char*>(weights);
  if (num_rows == 1) {
    MultiplyRowsOf<Format, 1>(rows, k_begin, count, bytes, scales, c);
  } else {
    MultiplyRowsOf<Format, 2>(rows, k_begin, count, bytes, scales, c);
  }
}

template <typename Format>
void Expand(const void* weights, int64_t count, float* expanded) {
  const char* bytes = static_cast<const char*>(weights);
  for (int64_t k = 0; k < count; k += Format::kSteps) {
    const Step first = Format::template Load<0>(bytes);
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) _mm256_storeu_ps(expanded + i * kVector, first.v[i]);
    expanded += kPanelColumns;
    if (Format::kSteps == 2 && k + 1 < count) {
      const Step second = Format::template Load<1>(bytes);
#pragma GCC unroll 8
      for (int i = 0; i < 4; ++i) _mm256_storeu_ps(expanded + i * kVector, second.v[i]);
      expanded += kPanelColumns;
    }
    bytes += Format::kBytes;
  }
}

// kRows * kVectors sums stay in registers (12 of 16).
template <int kRows, int kVectors>
void MultiplyTileOf(const float* const* rows, int64_t k_begin, int64_t count, const float* expanded,
                    const float* scales, float* c) {
  const float* a[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) a[r] = rows[r] + k_begin;
  Sums<kRows, kVectors> sums;
  sums.Begin(scales, c);
  for (int64_t k = 0; k < count; ++k) {
    __m256 weights[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      weights[i] = _mm256_loadu_ps(expanded + k * kPanelColumns + i * kVector);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums.Add(r, a[r] + k, weights);
  }
  sums.End(scales, c);
}

template <int kRows>
void MultiplyTileHalves(const float* const* rows, int64_t k_begin, int64_t count,
                        const float* expanded, const float* scales, float* c) {
  for (int half = 0; half < kPanelColumns; half += 16) {
    MultiplyTileOf<kRows, 2>(rows, k_begin, count, expanded + half,
                             scales != nullptr ? scales + half : nullptr, c + half);
  }
}

void MultiplyTile(const float* const* rows, int32_t num_rows, int64_t k_begin, int64_t count,
                  const float* expanded, const float* scales, float* c) {
  switch (num_rows) {
    case 1:
      return MultiplyTileOf<1, 4>(rows, k_begin, count, expanded, scales, c);
    case 2:
      return MultiplyTileOf<2, 4>(rows, k_begin, count, expanded, scales, c);
    case 3:
      return MultiplyTileOf<3, 4>(rows, k_begin, count, expanded, scales, c);
    case 4:
      return MultiplyTileHalves<4>(rows, k_begin, count, expanded, scales, c);
    case 5:
      return MultiplyTileHalves<5>(rows, k_begin, count, expanded, scales, c);
    default:
      return MultiplyTileHalves<6>(rows, k_begin, count, expanded, scales, c);
  }
}

// e^x to about 1 ulp for x in [-87, 88]; beyond that the value at the border; NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7, whose error is 1e-8.
__m256 Exp(__m256 x) {
  // min and max give their second operand when one is NaN.
  x = _mm256_min_ps(_mm256_set1_ps(88.0f), x);
  x = _mm256_max_ps(_mm256_set1_ps(-87.0f), x);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln 2 in two pieces; n * 0.693359375 is exact.
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
}

void SwiGlu(const float* gate, const float* up, int64_t n, float limit, float* out) {
  const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
  const __m256 high = _mm256_set1_ps(limit), low = _mm256_set1_ps(-limit);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t i = 0; i < n; i += kVector) {
    const int left = static_cast<int>(n - i < kVector ? n - i : kVector);
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), lanes);
    __m256 g = _mm256_maskload_ps(gate + i, mask);
    __m256 u = _mm256_maskload_ps(up + i, mask);
    if (limit > 0) {
      g = _mm256_min_ps(high, g);
      u = _mm256_max_ps(low, _mm256_min_ps(high, u));
    }
    // Below this silu is 0 to within 1e-36, and Exp ends.
    g = _mm256_max_ps(_mm256_set1_ps(-88.0f), g);
    const __m256 silu = _mm256_div_ps(g, _mm256_add_ps(one, Exp(_mm256_xor_ps(g, sign))));
    _mm256_maskstore_ps(out + i, mask, _mm256_mul_ps(silu, u));
  }
}

constexpr MatrixKernels kAvx2 = {
    .name = "avx2",
    .multiply_rows = {MultiplyRows<Float32Format>, MultiplyRows<Float16Format>,
                      MultiplyRows<Bfloat16Format>, MultiplyRows<E4m3Format>,
                      MultiplyRows<E2m1Format>},
    .expand = {Expand<Float32Format>, Expand<Float16Format>, Expand<Bfloat16Format>,
               Expand<E4m3Format>, Expand<E2m1Format>},
    .multiply_tile = MultiplyTile,
    .swiglu = SwiGlu,
    .keeps_e4m3_nan = false,
};

}  // namespace

const MatrixKernels* Avx2MatrixKernels() {
  static const bool kSupported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                 __builtin_cpu_supports("f16c");
  return kSupported ? &kAvx2 : nullptr;
}

}  // namespace kernels::cpu

#else

namespace kernels::cpu {
const MatrixKernels* Avx2MatrixKernels() { return nullptr; }
}  // namespace kernels::cpu

#endif
