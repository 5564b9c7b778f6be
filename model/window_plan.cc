#include "model/window_plan.h"

#include <algorithm>

#include "kernels/sparse_decode.h"
#include "status/check.h"

namespace model {
namespace {

int32_t PaddedWidth(int32_t window) {
  return (window + kernels::kSparseIndexMultiple - 1) / kernels::kSparseIndexMultiple *
         kernels::kSparseIndexMultiple;
}

}  // namespace

WindowPlan::WindowPlan(const StepLimits& limits)
    : window_(limits.sliding_window),
      width_(PaddedWidth(limits.sliding_window)),
      max_buffer_entries_(limits.max_tokens + limits.max_seqs * (limits.sliding_window - 1)),
      max_carries_(std::max<int64_t>(int64_t{limits.max_seqs} * (limits.sliding_window - 1),
                                     limits.max_tokens)) {
  FERRY_CHECK(window_ > 0) << "sliding_window=" << window_;
  slots_.reserve(limits.max_tokens);
  lengths_.reserve(limits.max_tokens);
  indices_.reserve(int64_t{limits.max_tokens} * width_);
  for (auto* carry : {&carry_in_ring_, &carry_in_buffer_, &carry_out_buffer_, &carry_out_ring_}) {
    carry->reserve(max_carries_);
  }
}

void WindowPlan::Make(const StepPlan& plan) {
  slots_.clear();
  lengths_.clear();
  indices_.clear();
  for (auto* carry : {&carry_in_ring_, &carry_in_buffer_, &carry_out_buffer_, &carry_out_ring_}) {
    carry->clear();
  }
  num_buffer_entries_ = 0;
  const int32_t num_seqs = plan.counts().num_seqs;
  int32_t seq = 0;
  for (; seq < num_seqs && plan.cu_seqlens_q[seq + 1] == seq + 1; ++seq) {
    AddRingRow(plan, /*row=*/seq, plan.state_slots[seq]);
  }
  num_ring_rows_ = seq;
  for (; seq < num_seqs; ++seq) AddChunk(plan, seq);
}

void WindowPlan::AddRingRow(const StepPlan& plan, int32_t row, int32_t state_slot) {
  FERRY_CHECK(state_slot >= 0) << "sequence " << row << " has no state slot";
  const int32_t position = plan.positions[row];
  const int64_t ring = int64_t{state_slot} * window_;
  slots_.push_back(ring + position % window_);
  const int32_t first = plan.window_start[row];
  const int32_t count = position + 1 - first;
  // In two runs, split where the ring begins again.
  const int32_t before_end = std::min(count, window_ - first % window_);
  AddIndices(ring + first % window_, before_end);
  AddIndices(ring, count - before_end);
  indices_.resize(int64_t{row + 1} * width_, -1);
  lengths_.push_back(count);
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
  const int64_t buffer = num_buffer_entries_ - kept;  // of position 0, were it there
  num_buffer_entries_ += end - kept;
  for (int32_t position = kept; position < begin; ++position) {
    carry_in_ring_.push_back(ring + position % window_);
    carry_in_buffer_.push_back(buffer + position);
  }
  for (int32_t position = begin; position < end; ++position) {
    const int32_t row = row_begin + position - begin;
    const int32_t first = plan.window_start[row];
    slots_.push_back(buffer + position);
    AddIndices(buffer + first, position + 1 - first);
    indices_.resize(int64_t{row + 1} * width_, -1);
    lengths_.push_back(position + 1 - first);
  }
  for (int32_t position = std::max(begin, end - window_); position < end; ++position) {
    carry_out_buffer_.push_back(buffer + position);
    carry_out_ring_.push_back(ring + position % window_);
  }
}

void WindowPlan::AddIndices(int64_t first_slot, int32_t count) {
  for (int32_t i = 0; i < count; ++i) indices_.push_back(static_cast<int32_t>(first_slot + i));
}

}  // namespace model
