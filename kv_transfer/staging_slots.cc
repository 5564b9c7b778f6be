#include "kv_transfer/staging_slots.h"

#include <utility>

#include "status/status_macros.h"

namespace kv_transfer {

absl::StatusOr<absl::Span<std::byte>> StagingSlots::Add(int64_t count) {
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Buffer> memory,
                   copies_->AllocateHost(count * slot_bytes_));
  const absl::Span<std::byte> all(memory->data(), static_cast<size_t>(memory->size_bytes()));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < count; ++i) free_.push_back(all.data() + i * slot_bytes_);
  count_ += count;
  memory_.push_back(std::move(memory));
  return all;
}

absl::Status StagingSlots::Provide(
    int64_t count, const std::function<absl::Status(absl::Span<std::byte>)>& registered) {
  int64_t missing = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    missing = count - count_;
  }
  if (missing <= 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const absl::Span<std::byte> added, Add(missing));
  return registered(added);
}

std::byte* StagingSlots::TryTake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return nullptr;
  std::byte* const slot = free_.back();
  free_.pop_back();
  return slot;
}

std::byte* StagingSlots::Take() {
  while (true) {
    if (std::byte* const slot = TryTake()) return slot;
    if (!Add(1).ok()) return nullptr;
  }
}

void StagingSlots::Return(std::byte* slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(slot);
}

}  // namespace kv_transfer
