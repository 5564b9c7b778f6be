// The general matrix product: a block's tile of A W^T in float32 for any sizes, strides and stored
// formats.  Every output is one accumulator over the inner index in ascending order, so a row's
// bits do not depend on the other rows.  Where it is not fast enough, a faster sibling takes over
// for the shapes it is made for.

#ifndef KERNELS_CUDA_TILE_PRODUCT_CUH_
#define KERNELS_CUDA_TILE_PRODUCT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/matrix_stack.h"
#include "kernels/cuda/numbers.cuh"

namespace kernels::cuda {

inline constexpr int32_t kTileRows = 32;
inline constexpr int32_t kTileColumns = 64;
inline constexpr int32_t kTileDepth = 32;
inline constexpr int32_t kTileThreads = 256;

__device__ inline float LoadWeight(const StoredMatrix& matrix, int64_t row, int64_t col) {
  const float value = LoadElement(matrix.data, matrix.dtype, row * matrix.cols + col);
  if (matrix.scales == nullptr) return value;
  const int64_t scale =
      row / matrix.scale_block_rows * matrix.scale_cols + col / matrix.scale_block_cols;
  return value * LoadElement(matrix.scales, matrix.scale_dtype, scale);
}

__device__ inline float LoadWeight(const MatrixStack& stack, int64_t row, int64_t col) {
  int32_t part = 0;
  while (part + 1 < stack.num_parts && row >= stack.row_end[part]) ++part;
  return LoadWeight(stack.parts[part], part == 0 ? row : row - stack.row_end[part - 1], col);
}

struct TileShared {
  float a[kTileRows][kTileDepth + 1];
  float w[kTileColumns][kTileDepth + 1];
};

// What a thread holds of the tile: value[i][j] is of TileRow(i) and TileColumn(j).
struct TileSums {
  float value[2][4] = {};
};
__device__ inline int32_t TileRow(int32_t i) {
  return static_cast<int32_t>(threadIdx.x) / 16 + 16 * i;
}
__device__ inline int32_t TileColumn(int32_t j) {
  return static_cast<int32_t>(threadIdx.x) % 16 + 16 * j;
}

// load_a(row of the tile, k) and load_w(column of the tile, k) give 0 beyond the operands' ends.
// REQUIRES: kTileThreads threads.  `shared` is free to reuse when the call returns.
template <typename LoadA, typename LoadW>
__device__ TileSums MultiplyTile(TileShared& shared, int64_t depth, LoadA load_a, LoadW load_w) {
  TileSums sums;
  for (int64_t begin = 0; begin < depth; begin += kTileDepth) {
    const int32_t count =
        depth - begin < kTileDepth ? static_cast<int32_t>(depth - begin) : kTileDepth;
    for (int32_t e = threadIdx.x; e < kTileRows * kTileDepth; e += kTileThreads) {
      const int32_t r = e / kTileDepth, k = e % kTileDepth;
      shared.a[r][k] = k < count ? load_a(r, begin + k) : 0.0f;
    }
    for (int32_t e = threadIdx.x; e < kTileColumns * kTileDepth; e += kTileThreads) {
      const int32_t c = e / kTileDepth, k = e % kTileDepth;
      shared.w[c][k] = k < count ? load_w(c, begin + k) : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int32_t k = 0; k < count; ++k) {
      float a[2], w[4];
      for (int32_t i = 0; i < 2; ++i) a[i] = shared.a[TileRow(i)][k];
      for (int32_t j = 0; j < 4; ++j) w[j] = shared.w[TileColumn(j)][k];
      for (int32_t i = 0; i < 2; ++i) {
        for (int32_t j = 0; j < 4; ++j) sums.value[i][j] = fmaf(a[i], w[j], sums.value[i][j]);
      }
    }
    __syncthreads();
  }
  return sums;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TILE_PRODUCT_CUH_
