// The three steps of AttendTile in each instruction set; scores are the indexer's too.

#ifndef KERNELS_CPU_ATTENTION_TILE_PRIMITIVES_H_
#define KERNELS_CPU_ATTENTION_TILE_PRIMITIVES_H_

#include <cstdint>

#include "kernels/cpu/attention_tile.h"

namespace kernels::cpu {

struct TilePrimitives {
  // scores[i * kMaxTileKeys + j] <- q0[i] . k0[j] + q1[i] . k1[j], rows [first_row, count), keys
  // [0, num_keys) rounded up to 4 (what lies past num_keys is undefined).
  void (*scores)(const TileShape& shape, const TileRows& rows, int32_t first_row,
                 const TileKeys& keys, int32_t num_keys, float* scores);
  // One row of scores, num_visible > 0 of them, to weights in place; updates the row's max and sum.
  // Returns what its acc is to be multiplied with.
  float (*softmax)(float* scores, int32_t num_visible, float softmax_scale, float* max, float* sum);
  // acc[i] <- acc[i] * correction[i] + sum over keys j in [begin, end) of weights[i][j] * v[j], for
  // num_rows <= 4 rows; weights [num_rows, kMaxTileKeys].
  void (*add_values)(int32_t num_rows, const float* weights, const float* const* v, int32_t begin,
                     int32_t end, const float* correction, int32_t value_dim, float* const* acc);
};

// The fastest this machine has.
const TilePrimitives& BestTilePrimitives();

const TilePrimitives& PortableTilePrimitives();
// Null where the processor (or the build) lacks AVX2 or FMA.
const TilePrimitives* Avx2TilePrimitives();

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_ATTENTION_TILE_PRIMITIVES_H_
