// AttendTile's steps with AVX2 and FMA.  Every (row, key) pair goes through the same operations in
// the same order wherever it lies in a block, so blocking changes no bit.

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/attention_tile_primitives.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace kernels::cpu {

#if defined(__x86_64__) && defined(__GNUC__)

// All headers come before: functions of theirs must not be compiled for these instructions.
#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Rows that stay in the first-level cache while keys pass by: 24 of 192 floats are 18 KiB.
constexpr int32_t kRowsInCache = 24;

// All ones in the first `count` (1..7) lanes.
inline __m256i LaneMask(int32_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
}

// The sums of the lanes of a, b, c and d, each as ((0+1)+(2+3)) + ((4+5)+(6+7)).
inline __m128 SumLanes(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// acc[i * kKeys + j] += q[i] . k[j] over dim, lane by lane.
template <int kRows, int kKeys>
inline void AddProducts(const float* const* q, const float* const* k, int32_t dim, __m256* acc) {
  int32_t d = 0;
  for (; d + 8 <= dim; d += 8) {
    __m256 keys[kKeys];
    for (int j = 0; j < kKeys; ++j) keys[j] = _mm256_loadu_ps(k[j] + d);
    for (int i = 0; i < kRows; ++i) {
      const __m256 row = _mm256_loadu_ps(q[i] + d);
      for (int j = 0; j < kKeys; ++j) {
        acc[i * kKeys + j] = _mm256_fmadd_ps(row, keys[j], acc[i * kKeys + j]);
      }
    }
  }
  if (d == dim) return;
  const __m256i mask = LaneMask(dim - d);
  __m256 keys[kKeys];
  for (int j = 0; j < kKeys; ++j) keys[j] = _mm256_maskload_ps(k[j] + d, mask);
  for (int i = 0; i < kRows; ++i) {
    const __m256 row = _mm256_maskload_ps(q[i] + d, mask);
    for (int j = 0; j < kKeys; ++j) {
      acc[i * kKeys + j] = _mm256_fmadd_ps(row, keys[j], acc[i * kKeys + j]);
    }
  }
}

// Four rows and three keys: 12 accumulators, 3 keys and a row fill the 16 registers.
inline void ScoreBlock4x3(const TileShape& shape, const float* const* q0, const float* const* q1,
                          const float* const* k0, const float* const* k1, int32_t num_keys,
                          float* scores) {
  __m256 acc[12];
  for (__m256& a : acc) a = _mm256_setzero_ps();
  AddProducts<4, 3>(q0, k0, shape.dim0, acc);
  AddProducts<4, 3>(q1, k1, shape.dim1, acc);
  for (int j = 0; j < 3; ++j) {
    alignas(16) float sums[4];
    _mm_store_ps(sums, SumLanes(acc[j], acc[3 + j], acc[6 + j], acc[9 + j]));
    if (j >= num_keys) continue;
    for (int i = 0; i < 4; ++i) scores[i * kMaxTileKeys + j] = sums[i];
  }
}

// One row and four keys.
inline void ScoreBlock1x4(const TileShape& shape, const float* const* q0, const float* const* q1,
                          const float* const* k0, const float* const* k1, float* scores) {
  __m256 acc[4];
  for (__m256& a : acc) a = _mm256_setzero_ps();
  AddProducts<1, 4>(q0, k0, shape.dim0, acc);
  AddProducts<1, 4>(q1, k1, shape.dim1, acc);
  _mm_storeu_ps(scores, SumLanes(acc[0], acc[1], acc[2], acc[3]));
}

// kCount pointers from `from`, the last of `available` repeated.
template <int kCount>
inline void Pick(const float* const* from, int32_t available, const float** to) {
  for (int i = 0; i < kCount; ++i) to[i] = from[i < available ? i : available - 1];
}

void Scores(const TileShape& shape, const TileRows& rows, int32_t first_row, const TileKeys& keys,
            int32_t num_keys, float* scores) {
  const int32_t num_rows = rows.count - first_row;
  const int32_t blocked_rows = num_rows / 4 * 4;
  for (int32_t begin = 0; begin < blocked_rows; begin += kRowsInCache) {
    const int32_t end = blocked_rows - begin < kRowsInCache ? blocked_rows : begin + kRowsInCache;
    for (int32_t j = 0; j < num_keys; j += 3) {
      const float* k0[3];
      const float* k1[3];
      Pick<3>(keys.k0 + j, num_keys - j, k0);
      Pick<3>(keys.k1 + j, num_keys - j, k1);
      for (int32_t i = first_row + begin; i < first_row + end; i += 4) {
        ScoreBlock4x3(shape, rows.q0 + i, rows.q1 + i, k0, k1, num_keys - j,
                      scores + i * kMaxTileKeys + j);
      }
    }
  }
  for (int32_t j = 0; j < num_keys && blocked_rows < num_rows; j += 4) {
    const float* k0[4];
    const float* k1[4];
    Pick<4>(keys.k0 + j, num_keys - j, k0);
    Pick<4>(keys.k1 + j, num_keys - j, k1);
    for (int32_t i = first_row + blocked_rows; i < rows.count; ++i) {
      ScoreBlock1x4(shape, rows.q0 + i, rows.q1 + i, k0, k1, scores + i * kMaxTileKeys + j);
    }
  }
}

// exp of x <= 0 to about 1 ulp; 0 below the smallest normal number, NaN of NaN.
inline __m256 Exp(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.33654f);
  const __m256 too_small = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
  const __m256 clamped = _mm256_max_ps(lowest, x);  // the second operand where one is NaN
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // r = x - n ln 2, ln 2 in two parts.
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clamped);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  // Taylor to r^7 / 7!: |r| <= ln 2 / 2, so the rest is below 6e-9.
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i exponent =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(too_small, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}

float Softmax(float* scores, int32_t num_visible, float softmax_scale, float* max, float* sum) {
  const __m256 scale = _mm256_set1_ps(softmax_scale);
  const __m256 nothing = _mm256_set1_ps(-kInfinity);
  __m256 maxima = nothing;
  for (int32_t j = 0; j < num_visible; j += 8) {
    __m256 x = _mm256_mul_ps(_mm256_loadu_ps(scores + j), scale);
    if (num_visible - j < 8) {
      x = _mm256_blendv_ps(nothing, x, _mm256_castsi256_ps(LaneMask(num_visible - j)));
    }
    _mm256_storeu_ps(scores + j, x);
    maxima = _mm256_max_ps(maxima, x);
  }
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, maxima);
  const float old_max = *max;
  float new_max = old_max;
  for (float lane : lanes) new_max = lane > new_max ? lane : new_max;

  const __m256 shift = _mm256_set1_ps(new_max);
  __m256 sums = _mm256_setzero_ps();
  for (int32_t j = 0; j < num_visible; j += 8) {
    const __m256 weights = Exp(_mm256_sub_ps(_mm256_loadu_ps(scores + j), shift));
    _mm256_storeu_ps(scores + j, weights);
    sums = _mm256_add_ps(sums, weights);
  }
  const float tile_sum = _mm_cvtss_f32(SumLanes(sums, sums, sums, sums));
  const float correction = old_max == new_max ? 1.0f : std::exp(old_max - new_max);
  *max = new_max;
  *sum = *sum * correction + tile_sum;
  return correction;
}

template <int kRows>
inline void AddValues(const float* weights, const float* const* v, int32_t begin, int32_t end,
                      const float* correction, int32_t value_dim, float* const* acc) {
  int32_t d = 0;
  for (; d + 16 <= value_dim; d += 16) {
    __m256 sums[kRows][2];
    for (int i = 0; i < kRows; ++i) {
      const __m256 factor = _mm256_set1_ps(correction[i]);
      sums[i][0] = _mm256_mul_ps(_mm256_loadu_ps(acc[i] + d), factor);
      sums[i][1] = _mm256_mul_ps(_mm256_loadu_ps(acc[i] + d + 8), factor);
    }
    for (int32_t j = begin; j < end; ++j) {
      const __m256 value0 = _mm256_loadu_ps(v[j] + d);
      const __m256 value1 = _mm256_loadu_ps(v[j] + d + 8);
      for (int i = 0; i < kRows; ++i) {
        const __m256 weight = _mm256_broadcast_ss(weights + i * kMaxTileKeys + j);
        sums[i][0] = _mm256_fmadd_ps(weight, value0, sums[i][0]);
        sums[i][1] = _mm256_fmadd_ps(weight, value1, sums[i][1]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      _mm256_storeu_ps(acc[i] + d, sums[i][0]);
      _mm256_storeu_ps(acc[i] + d + 8, sums[i][1]);
    }
  }
  for (; d < value_dim; d += 8) {
    const __m256i mask = LaneMask(value_dim - d);
    __m256 sums[kRows];
    for (int i = 0; i < kRows; ++i) {
      sums[i] = _mm256_mul_ps(_mm256_maskload_ps(acc[i] + d, mask), _mm256_set1_ps(correction[i]));
    }
    for (int32_t j = begin; j < end; ++j) {
      const __m256 value = _mm256_maskload_ps(v[j] + d, mask);
      for (int i = 0; i < kRows; ++i) {
        const __m256 weight = _mm256_broadcast_ss(weights + i * kMaxTileKeys + j);
        sums[i] = _mm256_fmadd_ps(weight, value, sums[i]);
      }
    }
    for (int i = 0; i < kRows; ++i) _mm256_maskstore_ps(acc[i] + d, mask, sums[i]);
  }
}

void AddValuesOfRows(int32_t num_rows, const float* weights, const float* const* v, int32_t begin,
                     int32_t end, const float* correction, int32_t value_dim, float* const* acc) {
  switch (num_rows) {
    case 1:
      return AddValues<1>(weights, v, begin, end, correction, value_dim, acc);
    case 2:
      return AddValues<2>(weights, v, begin, end, correction, value_dim, acc);
    case 3:
      return AddValues<3>(weights, v, begin, end, correction, value_dim, acc);
    default:
      return AddValues<4>(weights, v, begin, end, correction, value_dim, acc);
  }
}

}  // namespace

#pragma GCC pop_options

const TilePrimitives* Avx2TilePrimitives() {
  static constexpr TilePrimitives kPrimitives = {Scores, Softmax, AddValuesOfRows};
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return supported ? &kPrimitives : nullptr;
}

#else

const TilePrimitives* Avx2TilePrimitives() { return nullptr; }

#endif

}  // namespace kernels::cpu
