#include "engine/slot_pool.h"

#include "absl/strings/str_cat.h"
#include "status/check.h"

namespace engine {

SlotPool::SlotPool(int32_t num_slots) : taken_(num_slots, false) {
  for (int32_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

absl::StatusOr<int32_t> SlotPool::Allocate() {
  if (free_.empty()) {
    return absl::ResourceExhaustedError(absl::StrCat("all ", num_slots(), " slots are taken"));
  }
  const int32_t slot = free_.back();
  free_.pop_back();
  taken_[slot] = true;
  return slot;
}

void SlotPool::Release(int32_t slot) {
  FERRY_CHECK(slot >= 0 && slot < num_slots() && taken_[slot])
      << "slot " << slot << " is not taken";
  taken_[slot] = false;
  free_.push_back(slot);
}

}  // namespace engine
