#include "model/step_plan.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "kernels/scratch_carver.h"
#include "status/check.h"

namespace model {
namespace {

using kernels::ScratchCarver;

std::byte* AllocateAligned(size_t size) {
  return new (std::align_val_t(ScratchCarver::kAlignment)) std::byte[size]();
}

}  // namespace

int32_t SplitTokens(int32_t kv_len) {
  constexpr int32_t kLeast = 256;
  const int32_t even = (kv_len + StepLimits::kMaxSplitsPerSeq - 1) / StepLimits::kMaxSplitsPerSeq;
  return std::max(kLeast, (even + 63) / 64 * 64);
}

void StepPlan::AlignedDelete::operator()(std::byte* memory) const {
  ::operator delete[](memory, std::align_val_t(ScratchCarver::kAlignment));
}

StepPlan::StepPlan(const StepLimits& limits)
    : limits_(limits),
      size_(Carve(nullptr)),
      owned_(AllocateAligned(size_)),
      storage_(owned_.get()) {
  Carve(storage_);
  new (counts_) StepCounts();
  Clear();
}

StepPlan::StepPlan(const StepLimits& limits, std::byte* storage)
    : limits_(limits), size_(Carve(nullptr)), storage_(storage) {
  Carve(storage_);
  new (counts_) StepCounts();
  Clear();
}

int64_t StepPlan::SizeBytes(const StepLimits& limits) {
  return static_cast<int64_t>(StepPlan(limits).size_);
}

size_t StepPlan::Carve(std::byte* base) {
  ScratchCarver carver(base);
  const StepLimits& limits = limits_;
  carver.Take(counts_, 1);
  carver.Take(token_ids, limits.max_tokens);
  carver.Take(token_source, limits.max_tokens);
  carver.Take(positions, limits.max_tokens);
  carver.Take(slots, limits.max_tokens);
  carver.Take(row_to_seq, limits.max_tokens);
  carver.Take(window_start, limits.max_tokens);
  carver.Take(cu_seqlens_q, limits.max_seqs + 1);
  carver.Take(cu_seqlens_kv, limits.max_seqs + 1);
  carver.Take(kv_len, limits.max_seqs);
  carver.Take(state_slots, limits.max_seqs);
  carver.Take(splits, limits.max_splits());
  carver.Take(samples, limits.max_samples);
  carver.Take(penalty_resets, limits.max_samples);
  carver.Take(logit_rows, limits.max_logit_rows);
  carver.Take(copy_src, limits.max_copies);
  carver.Take(copy_dst, limits.max_copies);
  carver.Take(state_copy_src, limits.max_seqs);
  carver.Take(state_copy_dst, limits.max_seqs);
  carver.Take(snapshot_src, limits.max_seqs);
  carver.Take(snapshot_dst, limits.max_seqs);
  carver.Take(block_table, int64_t{limits.max_seqs} * limits.max_blocks_per_seq);
  carver.Take(history_tokens, limits.max_history_tokens);
  return static_cast<size_t>(carver.size());
}

void StepPlan::Clear() {
  *counts_ = StepCounts();
  cu_seqlens_q[0] = 0;
  cu_seqlens_kv[0] = 0;
}

absl::Span<const std::byte> StepPlan::used_bytes() const {
  const int32_t* end = counts_->num_history_tokens > 0
                           ? history_tokens + counts_->num_history_tokens
                           : block_table + counts_->num_seqs * block_table_stride();
  return bytes().first(static_cast<size_t>(reinterpret_cast<const std::byte*>(end) - storage_));
}

void StepPlan::CopyFrom(const StepPlan& other) {
  FERRY_CHECK(limits_ == other.limits_) << "a plan of other limits";
  const absl::Span<const std::byte> used = other.used_bytes();
  std::memcpy(storage_, used.data(), used.size());
}

}  // namespace model
