// WindowSlots: where the sliding windows of query rows lie (V4): the slot of each row's own entry
// and those of the entries that it attends.
//
//   own[t]        = slot(positions[t])
//   indices[t, j] = slot(window_start[t] + j) for j < lengths[t], then -1
//   lengths[t]    = positions[t] + 1 - window_start[t]
//
// A sequence's window is a ring in its state slot, and the first num_ring_rows rows use it:
//   slot(p) = state_slots[seq] * window + p mod window
// The others use a buffer, where the positions of a sequence follow each other:
//   slot(p) = buffer_begin[seq] + p
// A ring row of a sequence whose state slot is < 0 (a padded row) has no entries: own -1, length 0.
//
// Exactly `width` indices of a row are written.  The same lists serve every layer of a step.
// Source: models.md 7.3.

#ifndef KERNELS_WINDOW_SLOTS_H_
#define KERNELS_WINDOW_SLOTS_H_

#include <cstdint>

#include "absl/status/status.h"

namespace kernels {

struct WindowSlotsParams {
  int32_t num_rows = 0;
  int32_t num_ring_rows = 0;              // the first ones
  int32_t window = 0;                     // entries of a ring
  const int32_t* positions = nullptr;     // [num_rows]
  const int32_t* window_start = nullptr;  // [num_rows], the first position that a row attends
  const int32_t* row_to_seq = nullptr;    // [num_rows]
  const int32_t* state_slots = nullptr;   // [num_seqs]
  const int32_t* buffer_begin = nullptr;  // [num_seqs], of position 0, were it there: may be
                                          // negative; null: every row is a ring row
  int64_t* own = nullptr;                 // [num_rows]
  int32_t* indices = nullptr;             // [num_rows, width]
  int32_t width = 0;                      // WindowWidth(window)
  int32_t* lengths = nullptr;             // [num_rows], 0, or 1 to `window`
};

// The entries of a window, padded to the multiple of sparse attention.
int32_t WindowWidth(int32_t window);

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckWindowSlots(const WindowSlotsParams& params);

}  // namespace kernels

#endif  // KERNELS_WINDOW_SLOTS_H_
