#include "model/prefill_pieces.h"

#include <algorithm>

namespace model {
namespace {

int64_t MaxSlots(const StepLimits& limits, int32_t block_size) {
  return int64_t{limits.max_seqs} * limits.max_blocks_per_seq * block_size;
}

// Two entries for a piece (its own, and the end of a pass of its own) are enough.
int64_t MaxEntries(const StepLimits& limits, int32_t block_size, int32_t piece_tokens) {
  const int64_t keys = int64_t{limits.max_blocks_per_seq} * block_size;
  return 2 * limits.max_seqs * ((keys + piece_tokens - 1) / piece_tokens);
}

}  // namespace

PrefillPieces::PrefillPieces(const StepLimits& limits, int32_t block_size, int32_t piece_tokens,
                             int32_t ragged_positions)
    : block_size_(block_size),
      piece_tokens_(piece_tokens),
      ragged_positions_(ragged_positions),
      max_slots_(MaxSlots(limits, block_size)),
      max_entries_(MaxEntries(limits, block_size, piece_tokens)),
      slots_(new int64_t[max_slots_]) {  // not zeroed: mostly never touched
  passes_.reserve(max_entries_ / 2);
  for (auto* array : {&cu_seqlens_q_, &cu_seqlens_kv_, &causal_offset_, &q_row_begin_}) {
    array->reserve(max_entries_);
  }
}

void PrefillPieces::Make(const StepPlan& plan) {
  passes_.clear();
  for (auto* array : {&cu_seqlens_q_, &cu_seqlens_kv_, &causal_offset_, &q_row_begin_})
    array->clear();
  num_slots_ = 0;
  const int32_t first_seq = plan.counts().num_absorbed_seqs;
  bool more = true;
  for (int32_t begin = 0; more; begin += piece_tokens_) {
    more = false;
    bool open = false;  // a pass of this round that may take more
    for (int32_t seq = first_seq; seq < plan.counts().num_seqs; ++seq) {
      const int32_t num_keys = NumKeys(plan, seq);
      if (num_keys <= begin) continue;
      more = true;
      const int32_t end = std::min(num_keys, begin + piece_tokens_);
      if (!open || passes_.back().num_keys + end - begin > piece_tokens_) {
        BeginPass(/*accumulate=*/begin > 0);
        open = true;
      }
      AddPiece(plan, seq, begin, end);
    }
  }
}

int32_t PrefillPieces::NumKeys(const StepPlan& plan, int32_t seq) const {
  const int32_t kv_len = plan.kv_len[seq];
  const int32_t first_position = kv_len - (plan.cu_seqlens_q[seq + 1] - plan.cu_seqlens_q[seq]);
  return first_position >= ragged_positions_ ? 0 : std::min(kv_len, ragged_positions_);
}

void PrefillPieces::BeginPass(bool accumulate) {
  passes_.push_back({.first_entry = static_cast<int64_t>(cu_seqlens_q_.size()),
                     .first_slot = num_slots_,
                     .accumulate = accumulate});
  cu_seqlens_q_.push_back(0);
  cu_seqlens_kv_.push_back(0);
  // The last entry of these two has no meaning; it keeps all four arrays in step.
  causal_offset_.push_back(0);
  q_row_begin_.push_back(0);
}

void PrefillPieces::AddPiece(const StepPlan& plan, int32_t seq, int32_t begin, int32_t end) {
  const int32_t row_begin = plan.cu_seqlens_q[seq];
  const int32_t all_rows = plan.cu_seqlens_q[seq + 1] - row_begin;
  const int32_t first_position = plan.kv_len[seq] - all_rows;
  const int32_t num_rows = NumKeys(plan, seq) - first_position;
  const int32_t blind_rows = std::clamp(begin - first_position, 0, num_rows);
  const int32_t num_keys = end - begin;

  PiecePass& pass = passes_.back();
  causal_offset_.back() = first_position + blind_rows - begin;
  q_row_begin_.back() = row_begin + blind_rows;
  cu_seqlens_q_.push_back(cu_seqlens_q_.back() + num_rows - blind_rows);
  cu_seqlens_kv_.push_back(cu_seqlens_kv_.back() + num_keys);
  causal_offset_.push_back(0);
  q_row_begin_.push_back(0);
  ++pass.num_seqs;
  pass.num_rows += num_rows - blind_rows;
  pass.num_keys += num_keys;

  const int32_t* blocks = plan.block_table + seq * plan.block_table_stride();
  for (int32_t position = begin; position < end; ++position) {
    const int64_t block = blocks[position / block_size_];
    slots_[num_slots_++] = block < 0 ? -1 : block * block_size_ + position % block_size_;
  }
}

}  // namespace model
