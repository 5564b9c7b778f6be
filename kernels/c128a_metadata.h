// C128AMetadata: which compressed entries a query row attends in V4's heavily compressed layers:
// all that it sees, without scores.
//
//   lengths[t]    = (positions[t] + 1) / tokens_per_entry, 0 where slots[t] < 0 (a padded row)
//   indices[t, j] = for the first num_decode_rows rows the global slot of entry j of the row's
//                   sequence, by its block table; for the others j itself; -1 from lengths[t] on
//
// Exactly `width` indices of a row are written, whatever the stride.  The same lists serve every
// layer of a step. Source: models.md 7.4, 7.6; kernels.md 7.3.

#ifndef KERNELS_C128A_METADATA_H_
#define KERNELS_C128A_METADATA_H_

#include <cstdint>

#include "absl/status/status.h"

namespace kernels {

struct C128AMetadataParams {
  int32_t num_rows = 0;
  int32_t num_decode_rows = 0;           // the first ones
  int32_t tokens_per_entry = 128;        // the compression ratio
  int32_t block_entries = 0;             // entries of a block: block_size / tokens_per_entry
  const int32_t* positions = nullptr;    // [num_rows]
  const int64_t* slots = nullptr;        // [num_rows], cache slots of the rows' own tokens
  const int32_t* row_to_seq = nullptr;   // [num_rows]
  const int32_t* block_table = nullptr;  // [num_seqs, block_table_stride], -1 past the end
  int64_t block_table_stride = 0;        // elements
  int32_t* indices = nullptr;            // [num_rows, index_stride]
  int64_t index_stride = 0;              // elements, >= width
  int32_t width = 0;                     // C128AWidth of the longest sequence
  int32_t* lengths = nullptr;            // [num_rows]
};

// Entries of a sequence of max_model_len tokens, padded to a multiple of 128.
int32_t C128AWidth(int32_t max_model_len, int32_t tokens_per_entry);

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckC128AMetadata(const C128AMetadataParams& params);

}  // namespace kernels

#endif  // KERNELS_C128A_METADATA_H_
