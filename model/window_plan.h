// WindowPlan: where the sliding windows of a plan's rows lie (V4).
//
// A sequence's window is a ring in its state slot (model/deepseek_v4_layout.h).  A row that is
// alone in its sequence is written there and attends there.  Rows of a chunk would overwrite what
// earlier rows of it still attend: they use a buffer, where the ring's entries that the chunk needs
// come first and its own rows after them; the newest ones then go back to the ring.  Keys of a row
// stand in ascending position in its list in both cases.
//
// Host data only; the arrays have the form StoreKv, CopyKvEntries and SparseDecode take.
// Thread-compatible.

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

  // REQUIRES: the plan has the limits given before, and every sequence a state slot.
  void Make(const StepPlan& plan);

  // The first rows, one a sequence, that use the ring; the others use the buffer.
  int32_t num_ring_rows() const { return num_ring_rows_; }
  int32_t num_rows() const { return static_cast<int32_t>(slots_.size()); }
  // Where a row's own entry goes: in the ring for the first ones, in the buffer for the others.
  absl::Span<const int64_t> slots() const { return slots_; }
  // The entries that a row attends: [num_rows, width()], -1 after the first lengths()[row].
  absl::Span<const int32_t> indices() const { return indices_; }
  absl::Span<const int32_t> lengths() const { return lengths_; }
  int32_t width() const { return width_; }

  // Entries to copy from the ring to the buffer before attention, and back after it.
  absl::Span<const int64_t> carry_in_ring() const { return carry_in_ring_; }
  absl::Span<const int64_t> carry_in_buffer() const { return carry_in_buffer_; }
  absl::Span<const int64_t> carry_out_buffer() const { return carry_out_buffer_; }
  absl::Span<const int64_t> carry_out_ring() const { return carry_out_ring_; }

  // What Make never exceeds.
  int32_t max_buffer_entries() const { return max_buffer_entries_; }
  int64_t max_carries() const { return max_carries_; }

 private:
  void AddRingRow(const StepPlan& plan, int32_t row, int32_t state_slot);
  void AddChunk(const StepPlan& plan, int32_t seq);
  void AddIndices(int64_t first_slot, int32_t count);

  const int32_t window_;
  const int32_t width_;
  const int32_t max_buffer_entries_;
  const int64_t max_carries_;
  int32_t num_ring_rows_ = 0;
  int32_t num_buffer_entries_ = 0;
  std::vector<int64_t> slots_;
  std::vector<int32_t> indices_;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> carry_in_ring_;
  std::vector<int64_t> carry_in_buffer_;
  std::vector<int64_t> carry_out_buffer_;
  std::vector<int64_t> carry_out_ring_;
};

}  // namespace model

#endif  // MODEL_WINDOW_PLAN_H_
