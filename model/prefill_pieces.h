// PrefillPieces: how the ragged sequences of a plan read their keys back from the cache.
//
// The keys of a sequence are cut at absolute multiples of `piece_tokens`, so that a row meets the
// same pieces whatever chunk it came in.  A pass takes one piece of each of several sequences, at
// most `piece_tokens` keys in all; a sequence's pieces come in ascending order, in different
// passes.
//
// With `ragged_positions`, rows from that position on are not here, nor keys that only they see.
//
// Host data only; the arrays have the form RaggedMha and GatherKv take.  Thread-compatible.

#ifndef MODEL_PREFILL_PIECES_H_
#define MODEL_PREFILL_PIECES_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "model/step_plan.h"

namespace model {

// One gather, decompression and attention.
struct PiecePass {
  int32_t num_seqs = 0;
  int32_t num_rows = 0;
  int32_t num_keys = 0;
  int64_t first_entry = 0;  // of this pass in the arrays per sequence; it has num_seqs + 1
  int64_t first_slot = 0;
  bool accumulate = false;  // false: every sequence's first piece
};

class PrefillPieces final {
 public:
  PrefillPieces(const StepLimits& limits, int32_t block_size, int32_t piece_tokens,
                int32_t ragged_positions = std::numeric_limits<int32_t>::max());

  // REQUIRES: the plan has the limits given before.
  void Make(const StepPlan& plan);

  absl::Span<const PiecePass> passes() const { return passes_; }
  // Per sequence of a pass, see kernels/ragged_mha.h.  A sequence that has rows before its piece
  // leaves them out: they see none of its keys.
  absl::Span<const int32_t> cu_seqlens_q() const { return cu_seqlens_q_; }
  absl::Span<const int32_t> cu_seqlens_kv() const { return cu_seqlens_kv_; }
  absl::Span<const int32_t> causal_offset() const { return causal_offset_; }
  absl::Span<const int32_t> q_row_begin() const { return q_row_begin_; }
  // Cache slot of every key, pass by pass.
  absl::Span<const int64_t> slots() const {
    return {slots_.get(), static_cast<size_t>(num_slots_)};
  }

  // What Make never exceeds.
  int64_t max_entries() const { return max_entries_; }
  int64_t max_slots() const { return max_slots_; }

 private:
  // Keys that the rows of a sequence need; 0 if none of them is here.
  int32_t NumKeys(const StepPlan& plan, int32_t seq) const;
  void BeginPass(bool accumulate);
  void AddPiece(const StepPlan& plan, int32_t seq, int32_t begin, int32_t end);

  const int32_t block_size_;
  const int32_t piece_tokens_;
  const int32_t ragged_positions_;
  const int64_t max_slots_;
  const int64_t max_entries_;
  std::vector<PiecePass> passes_;
  std::vector<int32_t> cu_seqlens_q_;
  std::vector<int32_t> cu_seqlens_kv_;
  std::vector<int32_t> causal_offset_;
  std::vector<int32_t> q_row_begin_;
  std::unique_ptr<int64_t[]> slots_;
  int64_t num_slots_ = 0;
};

}  // namespace model

#endif  // MODEL_PREFILL_PIECES_H_
