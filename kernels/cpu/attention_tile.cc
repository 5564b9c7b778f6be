#include "kernels/cpu/attention_tile.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attention_tile_primitives.h"

namespace kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kRowsTogether = 4;

void PortableScores(const TileShape& shape, const TileRows& rows, int32_t first_row,
                    const TileKeys& keys, int32_t num_keys, float* scores) {
  for (int32_t i = first_row; i < rows.count; ++i) {
    for (int32_t j = 0; j < num_keys; ++j) {
      float lanes[4] = {};
      const auto add = [&lanes](const float* q, const float* k, int32_t dim) {
        int32_t d = 0;
        for (; d + 4 <= dim; d += 4) {
          for (int32_t lane = 0; lane < 4; ++lane) lanes[lane] += q[d + lane] * k[d + lane];
        }
        for (; d < dim; ++d) lanes[d % 4] += q[d] * k[d];
      };
      add(rows.q0[i], keys.k0[j], shape.dim0);
      add(rows.q1[i], keys.k1[j], shape.dim1);
      scores[i * kMaxTileKeys + j] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    }
  }
}

float PortableSoftmax(float* scores, int32_t num_visible, float softmax_scale, float* max,
                      float* sum) {
  const float old_max = *max;
  float new_max = old_max;
  for (int32_t j = 0; j < num_visible; ++j) {
    scores[j] *= softmax_scale;
    new_max = std::max(new_max, scores[j]);
  }
  float tile_sum = 0;
  for (int32_t j = 0; j < num_visible; ++j) {
    scores[j] = std::exp(scores[j] - new_max);
    tile_sum += scores[j];
  }
  const float correction = old_max == new_max ? 1.0f : std::exp(old_max - new_max);
  *max = new_max;
  *sum = *sum * correction + tile_sum;
  return correction;
}

void PortableAddValues(int32_t num_rows, const float* weights, const float* const* v, int32_t begin,
                       int32_t end, const float* correction, int32_t value_dim, float* const* acc) {
  for (int32_t i = 0; i < num_rows; ++i) {
    float* out = acc[i];
    for (int32_t d = 0; d < value_dim; ++d) out[d] *= correction[i];
    for (int32_t j = begin; j < end; ++j) {
      const float weight = weights[i * kMaxTileKeys + j];
      for (int32_t d = 0; d < value_dim; ++d) out[d] += weight * v[j][d];
    }
  }
}

}  // namespace

const TilePrimitives& BestTilePrimitives() {
  static const TilePrimitives& primitives =
      Avx2TilePrimitives() != nullptr ? *Avx2TilePrimitives() : PortableTilePrimitives();
  return primitives;
}

const TilePrimitives& PortableTilePrimitives() {
  static constexpr TilePrimitives kPrimitives = {PortableScores, PortableSoftmax,
                                                 PortableAddValues};
  return kPrimitives;
}

void TileRows::Reset(int32_t i, int32_t value_dim) {
  max[i] = -kInfinity;
  sum[i] = 0;
  std::fill_n(acc[i], value_dim, 0.0f);
}

void AttendTile(const TileShape& shape, const TileKeys& keys, TileRows& rows) {
  int32_t first_row = 0;
  while (first_row < rows.count && rows.num_visible[first_row] <= 0) ++first_row;
  if (first_row == rows.count) return;
  const TilePrimitives& primitives = BestTilePrimitives();
  alignas(64) float scores[kMaxTileRows * kMaxTileKeys];
  primitives.scores(shape, rows, first_row, keys, rows.num_visible[rows.count - 1], scores);

  static constexpr float kOnes[kRowsTogether] = {1, 1, 1, 1};
  for (int32_t begin = first_row; begin < rows.count; begin += kRowsTogether) {
    const int32_t num_rows = std::min(kRowsTogether, rows.count - begin);
    float correction[kRowsTogether];
    for (int32_t i = 0; i < num_rows; ++i) {
      const int32_t row = begin + i;
      correction[i] = primitives.softmax(scores + row * kMaxTileKeys, rows.num_visible[row],
                                         shape.softmax_scale, &rows.max[row], &rows.sum[row]);
    }
    // Keys that all of them see together, then what the later rows see on their own: each row adds
    // its keys in ascending order either way.
    const float* weights = scores + begin * kMaxTileKeys;
    const int32_t common = rows.num_visible[begin];
    primitives.add_values(num_rows, weights, keys.v, 0, common, correction, shape.value_dim,
                          rows.acc + begin);
    for (int32_t i = 1; i < num_rows; ++i) {
      if (rows.num_visible[begin + i] == common) continue;
      primitives.add_values(1, weights + i * kMaxTileKeys, keys.v, common,
                            rows.num_visible[begin + i], kOnes, shape.value_dim,
                            rows.acc + begin + i);
    }
  }
}

float FinishRow(const TileShape& shape, TileRows& rows, int32_t i) {
  if (rows.max[i] == -kInfinity && rows.sum[i] == 0) return -kInfinity;
  const float inverse = 1.0f / rows.sum[i];
  for (int32_t d = 0; d < shape.value_dim; ++d) rows.acc[i][d] *= inverse;
  return rows.max[i] + std::log(rows.sum[i]);
}

void MergeByLse(const float* part, float part_lse, int32_t dim, float* out, float* lse) {
  if (part_lse == -kInfinity) return;
  if (*lse == -kInfinity) {
    std::copy_n(part, dim, out);
    *lse = part_lse;
    return;
  }
  const float max = std::max(*lse, part_lse);
  const float weight = std::exp(*lse - max);
  const float part_weight = std::exp(part_lse - max);
  const float sum = weight + part_weight;
  const float a = weight / sum;
  const float b = part_weight / sum;
  for (int32_t d = 0; d < dim; ++d) out[d] = a * out[d] + b * part[d];
  *lse = max + std::log(sum);
}

}  // namespace kernels::cpu
