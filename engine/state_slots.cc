#include "engine/state_slots.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "status/check.h"

namespace engine {

StateSlots::StateSlots(int32_t num_slots,
                       std::function<void(const block_hash::BlockHash&)> on_dropped)
    : on_dropped_(std::move(on_dropped)), slots_(num_slots) {
  FERRY_CHECK(num_slots >= 2) << "num_slots=" << num_slots;
  free_.reserve(num_slots - 1);
  for (SlotId slot = num_slots - 1; slot >= 1; --slot) free_.push_back(slot);
}

absl::StatusOr<SlotId> StateSlots::Allocate() {
  if (free_.empty()) {
    const auto oldest = std::find_if(by_age_.begin(), by_age_.end(),
                                     [this](SlotId slot) { return slots_[slot].holders == 0; });
    if (oldest == by_age_.end()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("all ", num_slots() - 1, " state slots are taken"));
    }
    ++snapshots_dropped_;
    DropSnapshot(*slots_[*oldest].snapshot_of);
  }
  const SlotId slot = free_.back();
  free_.pop_back();
  slots_[slot].holders = 1;
  return slot;
}

void StateSlots::Hold(SlotId slot) {
  if (slot == kZeroSlot) return;
  FERRY_CHECK(num_holders(slot) > 0) << "slot " << slot << " is not held";
  ++slots_[slot].holders;
}

void StateSlots::Release(SlotId slot) {
  if (slot == kZeroSlot) return;
  FERRY_CHECK(num_holders(slot) > 0) << "slot " << slot << " is not held";
  if (--slots_[slot].holders > 0) return;
  if (slots_[slot].snapshot_of.has_value()) {
    ++num_idle_snapshots_;
  } else {
    free_.push_back(slot);
  }
}

void StateSlots::Release(absl::Span<const SlotId> slots) {
  for (const SlotId slot : slots) Release(slot);
}

void StateSlots::AddSnapshot(SlotId slot, const block_hash::BlockHash& block) {
  FERRY_CHECK(num_holders(slot) > 0 && !slots_[slot].snapshot_of.has_value())
      << "slot " << slot << " cannot become a snapshot";
  FERRY_CHECK(snapshots_.emplace(block, slot).second) << block_hash::ToHex(block) << " has one";
  slots_[slot].snapshot_of = block;
  slots_[slot].age = by_age_.insert(by_age_.end(), slot);
  ++snapshots_taken_;
  Release(slot);
}

SlotId StateSlots::AcquireSnapshot(const block_hash::BlockHash& block) {
  const auto found = snapshots_.find(block);
  FERRY_CHECK(found != snapshots_.end()) << "no snapshot of " << block_hash::ToHex(block);
  Slot& slot = slots_[found->second];
  if (slot.holders++ == 0) --num_idle_snapshots_;
  by_age_.splice(by_age_.end(), by_age_, slot.age);
  return found->second;
}

void StateSlots::DropSnapshot(const block_hash::BlockHash& block) {
  const auto found = snapshots_.find(block);
  if (found == snapshots_.end()) return;
  const SlotId slot = found->second;
  Forget(slot);
  if (slots_[slot].holders > 0) return;
  --num_idle_snapshots_;
  free_.push_back(slot);
}

void StateSlots::Adopt(SlotId slot) {
  FERRY_CHECK(num_holders(slot) == 1 && slots_[slot].snapshot_of.has_value())
      << "slot " << slot << " cannot be adopted, holders " << slots_[slot].holders;
  Forget(slot);
}

void StateSlots::Forget(SlotId slot) {
  const block_hash::BlockHash block = *slots_[slot].snapshot_of;
  snapshots_.erase(block);
  by_age_.erase(slots_[slot].age);
  slots_[slot].snapshot_of.reset();
  on_dropped_(block);
}

int32_t StateSlots::num_holders(SlotId slot) const {
  FERRY_CHECK(slot >= 1 && slot < num_slots()) << "slot " << slot << " of " << num_slots();
  return slots_[slot].holders;
}

}  // namespace engine
