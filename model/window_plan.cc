#include "model/window_plan.h"

#include <algorithm>

#include "status/check.h"

namespace model {

WindowPlan::WindowPlan(const StepLimits& limits)
    : window_(limits.sliding_window),
      max_buffer_entries_(limits.max_tokens + limits.max_seqs * (limits.sliding_window - 1)),
      max_carries_(std::max<int64_t>(int64_t{limits.max_seqs} * (limits.sliding_window - 1),
                                     limits.max_tokens)) {
  FERRY_CHECK(window_ > 0) << "sliding_window=" << window_;
  buffer_begin_.reserve(limits.max_seqs);
  for (auto* carry : {&carry_in_ring_, &carry_in_buffer_, &carry_out_buffer_, &carry_out_ring_}) {
    carry->reserve(max_carries_);
  }
}

void WindowPlan::Make(const StepPlan& plan) {
  for (auto* carry : {&carry_in_ring_, &carry_in_buffer_, &carry_out_buffer_, &carry_out_ring_}) {
    carry->clear();
  }
  num_buffer_entries_ = 0;
  const int32_t num_seqs = plan.counts().num_seqs;
  int32_t seq = 0;
  while (seq < num_seqs && plan.cu_seqlens_q[seq + 1] == seq + 1) ++seq;
  num_ring_rows_ = seq;
  buffer_begin_.assign(seq, 0);
  for (; seq < num_seqs; ++seq) AddChunk(plan, seq);
}

void WindowPlan::AddChunk(const StepPlan& plan, int32_t seq) {
  const int32_t state_slot = plan.state_slots[seq];
  FERRY_CHECK(state_slot >= 0) << "sequence " << seq << " has no state slot";
  const int64_t ring = int64_t{state_slot} * window_;
  const int32_t row_begin = plan.cu_seqlens_q[seq];
  const int32_t num_rows = plan.cu_seqlens_q[seq + 1] - row_begin;
  const int32_t end = plan.kv_len[seq];
  const int32_t begin = end - num_rows;  // positions of the chunk
  const int32_t kept = num_rows > 0 ? plan.window_start[row_begin] : begin;
  const int32_t buffer = num_buffer_entries_ - kept;
  buffer_begin_.push_back(buffer);
  num_buffer_entries_ += end - kept;
  for (int32_t position = kept; position < begin; ++position) {
    carry_in_ring_.push_back(ring + position % window_);
    carry_in_buffer_.push_back(buffer + position);
  }
  for (int32_t position = std::max(begin, end - window_); position < end; ++position) {
    carry_out_buffer_.push_back(buffer + position);
    carry_out_ring_.push_back(ring + position % window_);
  }
}

}  // namespace model
