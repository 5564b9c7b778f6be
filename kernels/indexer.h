// IndexerLogits and TopKSlots: which cached entries a query row attends (the lightning indexer).
//
//   logits[t, j] = scale * sum_h weights[t, h] * relu(q[t, h] . key[j])        j < visible(t)
//   visible(t)   = (positions[t] + 1) / tokens_per_key, 0 where positions[t] < 0
//   slots[t]     = the global slots of the min(top_k, visible) keys with the largest logits, in
//                  position order, then -1
//
// Ties go to the lower position; a NaN is below every number.  Dots are summed in a fixed order and
// heads in ascending order, so a logit's bits depend on its row and key alone.
//
// A row that sees at most top_k keys selects them all: its logits are neither written nor read.
//
// Key j of a sequence is entry j % n of its block table's block j / n, n entries a block.
// Sources: DeepSeek-V3.2 paper 2.1; models.md 6.1, 7.6.

#ifndef KERNELS_INDEXER_H_
#define KERNELS_INDEXER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/tensor.h"

namespace kernels {

// Query rows, and the keys that each of them sees.
struct IndexerRows {
  int32_t num_rows = 0;
  const int32_t* positions = nullptr;    // [num_rows]; < 0: a padded row
  int32_t tokens_per_key = 1;            // V4: 4
  const int32_t* row_to_seq = nullptr;   // [num_rows]
  const int32_t* block_table = nullptr;  // [num_seqs, block_table_stride], -1 past the end
  int64_t block_table_stride = 0;        // elements
  int32_t top_k = 0;

  // Keys that row t sees (host arrays).
  int32_t Visible(int32_t t) const {
    return positions[t] < 0 ? 0 : (positions[t] + 1) / tokens_per_key;
  }
};

struct IndexerLogitsParams {
  IndexerRows rows;
  int32_t num_heads = 0;     // index_n_heads
  int32_t head_dim = 0;      // index_head_dim
  float scale = 0;           // (head_dim * num_heads)^-1/2 in every released model
  const float* q = nullptr;  // [num_rows, num_heads, head_dim], rotated
  int64_t q_row_stride = 0;  // elements
  int64_t q_head_stride = 0;
  const float* weights = nullptr;  // [num_rows, num_heads], signed
  int64_t weights_row_stride = 0;
  KvPages pages;              // index keys
  float* logits = nullptr;    // [num_rows, logits_stride]
  int64_t logits_stride = 0;  // >= every row's visible keys
};

struct TopKSlotsParams {
  IndexerRows rows;
  int32_t block_entries = 0;      // entries of a block
  const float* logits = nullptr;  // [num_rows, logits_stride]
  int64_t logits_stride = 0;
  int32_t* slots = nullptr;  // [num_rows, slots_stride]
  int64_t slots_stride = 0;
  int32_t slots_width = 0;     // >= top_k; the rest of a row becomes -1
  int32_t* lengths = nullptr;  // [num_rows], slots that are not -1; may be null
};

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckIndexerLogits(const IndexerLogitsParams& params);
absl::Status CheckTopKSlots(const TopKSlotsParams& params);

}  // namespace kernels

#endif  // KERNELS_INDEXER_H_
