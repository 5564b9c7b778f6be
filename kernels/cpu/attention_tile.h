// The inner loop of attention, shared by RaggedMha, AbsorbedDecode and SparseDecode: some query
// rows against one tile of keys, with a running softmax.
//
//   score[i, j] = softmax_scale * (q0[i] . k0[j] + q1[i] . k1[j])        j < num_visible[i]
//   acc[i]      = sum_j exp(score - max[i]) * v[j],   sum[i] = sum_j exp(score - max[i])
//
// A row's bits depend on the tiles it was given and its own num_visible alone: not on the other
// rows of the call, and not on keys that it does not see, not even if they are NaN.
//
// Thread-compatible: a call touches only what it is given.

#ifndef KERNELS_CPU_ATTENTION_TILE_H_
#define KERNELS_CPU_ATTENTION_TILE_H_

#include <cstdint>

namespace kernels::cpu {

inline constexpr int32_t kMaxTileRows = 64;
inline constexpr int32_t kMaxTileKeys = 64;

struct TileShape {
  int32_t dim0 = 0;  // of q0 and k0
  int32_t dim1 = 0;  // of q1 and k1; may be 0
  int32_t value_dim = 0;
  float softmax_scale = 0;
};

// Query rows and what they have gathered so far.
struct TileRows {
  int32_t count = 0;                  // <= kMaxTileRows
  const float* q0[kMaxTileRows];      // [dim0] each
  const float* q1[kMaxTileRows];      // [dim1]
  int32_t num_visible[kMaxTileRows];  // keys of the tile that the row sees; ascending over rows
  float max[kMaxTileRows];
  float sum[kMaxTileRows];
  float* acc[kMaxTileRows];  // [value_dim]

  // Row i has seen nothing: max -inf, sum 0, acc 0.
  void Reset(int32_t i, int32_t value_dim);
};

struct TileKeys {
  const float* k0[kMaxTileKeys];  // [dim0] each
  const float* k1[kMaxTileKeys];  // [dim1]
  const float* v[kMaxTileKeys];   // [value_dim]
};

// Adds the tile's keys to the rows.  Keys at and past the last row's num_visible are not read.
void AttendTile(const TileShape& shape, const TileKeys& keys, TileRows& rows);

// The end of row i: acc becomes the attention's output (0 if nothing was seen); returns its lse.
float FinishRow(const TileShape& shape, TileRows& rows, int32_t i);

// Merges attention over two sets of keys by log-sum-exp: (out [dim], lse) <- itself and (part
// [dim], part_lse).  An lse of -inf means that the other side is taken as it is.
void MergeByLse(const float* part, float part_lse, int32_t dim, float* out, float* lse);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_ATTENTION_TILE_H_
