// WindowPlan: where the sliding windows of a plan's chunks lie (V4).
//
// A sequence's window is a ring in its state slot (model/deepseek_v4_layout.h).  A row that is
// alone in its sequence is written there and attends there.  Rows of a chunk would overwrite what
// earlier rows of it still attend: they use a buffer, where the ring's entries that the chunk needs
// come first and its own rows after them; the newest ones then go back to the ring.
// kernels/window_slots.h makes the rows' lists of it, on the device.
//
// Host data only; of decodes it depends on the plan's counts alone.  Thread-compatible.

#ifndef MODEL_WINDOW_PLAN_H_
#define MODEL_WINDOW_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "model/step_plan.h"

namespace model {

class WindowPlan final {
 public:
  // limits.sliding_window entries a ring.
  explicit WindowPlan(const StepLimits& limits);

  // REQUIRES: the plan has the limits given before, and every sequence of a chunk a state slot.
  void Make(const StepPlan& plan);

  // The first rows, one a sequence, that use the ring; the others use the buffer.
  int32_t num_ring_rows() const { return num_ring_rows_; }
  // Where position 0 of a sequence would lie in the buffer, [num_seqs]; of no meaning for the first
  // num_ring_rows() sequences.
  absl::Span<const int32_t> buffer_begin() const { return buffer_begin_; }

  // Entries to copy from the ring to the buffer before attention, and back after it.
  absl::Span<const int64_t> carry_in_ring() const { return carry_in_ring_; }
  absl::Span<const int64_t> carry_in_buffer() const { return carry_in_buffer_; }
  absl::Span<const int64_t> carry_out_buffer() const { return carry_out_buffer_; }
  absl::Span<const int64_t> carry_out_ring() const { return carry_out_ring_; }

  // What Make never exceeds.
  int32_t max_buffer_entries() const { return max_buffer_entries_; }
  int64_t max_carries() const { return max_carries_; }

 private:
  void AddChunk(const StepPlan& plan, int32_t seq);

  const int32_t window_;
  const int32_t max_buffer_entries_;
  const int64_t max_carries_;
  int32_t num_ring_rows_ = 0;
  int32_t num_buffer_entries_ = 0;
  std::vector<int32_t> buffer_begin_;
  std::vector<int64_t> carry_in_ring_;
  std::vector<int64_t> carry_in_buffer_;
  std::vector<int64_t> carry_out_buffer_;
  std::vector<int64_t> carry_out_ring_;
};

}  // namespace model

#endif  // MODEL_WINDOW_PLAN_H_
