#include "model/step_plan.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"

namespace model {
namespace {

constexpr size_t kAlignment = 256;

// Walks the structure: once with a null base to measure it, once to set the pointers.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <typename T>
  T* Take(int64_t count) {
    offset_ = (offset_ + kAlignment - 1) / kAlignment * kAlignment;
    T* result = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset_);
    offset_ += sizeof(T) * count;
    return result;
  }
  size_t size() const { return (offset_ + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  std::byte* base_;
  size_t offset_ = 0;
};

std::byte* AllocateAligned(size_t size) {
  return new (std::align_val_t(kAlignment)) std::byte[size]();
}

}  // namespace

int32_t SplitTokens(int32_t kv_len) {
  constexpr int32_t kLeast = 256;
  const int32_t even = (kv_len + StepLimits::kMaxSplitsPerSeq - 1) / StepLimits::kMaxSplitsPerSeq;
  return std::max(kLeast, (even + 63) / 64 * 64);
}

void StepPlan::AlignedDelete::operator()(std::byte* memory) const {
  ::operator delete[](memory, std::align_val_t(kAlignment));
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
  Carver carver(base);
  const StepLimits& limits = limits_;
  counts_ = carver.Take<StepCounts>(1);
  token_ids = carver.Take<int32_t>(limits.max_tokens);
  token_source = carver.Take<int32_t>(limits.max_tokens);
  positions = carver.Take<int32_t>(limits.max_tokens);
  slots = carver.Take<int64_t>(limits.max_tokens);
  row_to_seq = carver.Take<int32_t>(limits.max_tokens);
  window_start = carver.Take<int32_t>(limits.max_tokens);
  cu_seqlens_q = carver.Take<int32_t>(limits.max_seqs + 1);
  cu_seqlens_kv = carver.Take<int32_t>(limits.max_seqs + 1);
  kv_len = carver.Take<int32_t>(limits.max_seqs);
  block_table = carver.Take<int32_t>(int64_t{limits.max_seqs} * limits.max_blocks_per_seq);
  state_slots = carver.Take<int32_t>(limits.max_seqs);
  splits = carver.Take<kernels::DecodeSplit>(limits.max_splits());
  samples = carver.Take<kernels::SampleRow>(limits.max_samples);
  penalty_resets = carver.Take<kernels::PenaltyReset>(limits.max_samples);
  history_tokens = carver.Take<int32_t>(limits.max_history_tokens);
  logit_rows = carver.Take<int32_t>(limits.max_logit_rows);
  copy_src = carver.Take<int32_t>(limits.max_copies);
  copy_dst = carver.Take<int32_t>(limits.max_copies);
  state_copy_src = carver.Take<int32_t>(limits.max_seqs);
  state_copy_dst = carver.Take<int32_t>(limits.max_seqs);
  snapshot_src = carver.Take<int32_t>(limits.max_seqs);
  snapshot_dst = carver.Take<int32_t>(limits.max_seqs);
  return carver.size();
}

void StepPlan::Clear() {
  *counts_ = StepCounts();
  cu_seqlens_q[0] = 0;
  cu_seqlens_kv[0] = 0;
}

absl::Status StepPlan::CopyFrom(absl::Span<const std::byte> bytes) {
  if (bytes.size() != size_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a step plan of ", size_, " bytes cannot take ", bytes.size(), " bytes"));
  }
  std::memcpy(storage_, bytes.data(), size_);
  return absl::OkStatus();
}

}  // namespace model
