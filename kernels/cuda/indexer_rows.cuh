// What rows of the indexer see, on the device.

#ifndef KERNELS_CUDA_INDEXER_ROWS_CUH_
#define KERNELS_CUDA_INDEXER_ROWS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/indexer.h"

namespace kernels::cuda {

// A row and the keys that it sees.
struct VisibleKeys {
  const int32_t* blocks = nullptr;  // of its sequence
  int64_t num_blocks = 0;           // of the table's row, the missing ones too
  int32_t count = 0;
  int32_t seq = 0;

  // -1: the key has no block.
  __device__ int32_t BlockOf(int32_t key, int32_t block_entries) const {
    const int32_t index = key / block_entries;
    return index < num_blocks ? blocks[index] : -1;
  }
};

// A row of a sequence without a first block is a padded one, and sees nothing.
__device__ inline VisibleKeys KeysOfRow(const IndexerRows& rows, int32_t row) {
  VisibleKeys keys;
  const int32_t position = rows.positions[row], seq = rows.row_to_seq[row];
  if (position < 0) return keys;
  keys.seq = seq;
  keys.blocks = rows.block_table + keys.seq * rows.block_table_stride;
  keys.num_blocks = rows.block_table_stride;
  if (keys.BlockOf(0, 1) >= 0) keys.count = (position + 1) / rows.tokens_per_key;
  return keys;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_INDEXER_ROWS_CUH_
