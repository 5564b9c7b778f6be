// How the CPU cuts a product of many rows: blocks of rows, and pieces of a block for a task.

#ifndef KERNELS_CPU_ROW_BLOCKS_H_
#define KERNELS_CPU_ROW_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/matrix_kernels.h"

namespace kernels::cpu {

// Rows that go through a weight matrix together.  Bounds scratch (and the 64 KiB of sums that a
// task keeps on its stack), while 512 rows for each read of a weight are far more than memory
// needs.
inline constexpr int32_t kRowBlock = 512;

// Rows per task so that `num_panels` times the pieces give every thread about four tasks.  A
// multiple of the tile's rows; where rows are cut changes no result.
inline int32_t RowsPerTask(int32_t num_rows, int64_t num_panels, int32_t num_threads) {
  const int64_t pieces =
      std::max<int64_t>(1, (4 * int64_t{num_threads} + num_panels - 1) / num_panels);
  // A short piece expands weights for too few rows to be worth it.
  constexpr int64_t kFewestRows = 8 * kTileRows;
  const int64_t rows = std::max(kFewestRows, (num_rows + pieces - 1) / pieces);
  return static_cast<int32_t>((rows + kTileRows - 1) / kTileRows * kTileRows);
}

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_ROW_BLOCKS_H_
