// StateSlots: the fixed set of state slots of a model that keeps a state per sequence (V4), and
// which of them are snapshots: the state behind a block, kept so that another sequence can go on
// from there.
//
// It manages ids only; the bytes are CacheMemory's.  A slot is free, held (by a running sequence, a
// transfer, a step that copies it), or a snapshot that nobody holds.  Such a snapshot may be
// dropped at any time to make room, the one that was taken or used longest ago first.  A snapshot
// belongs to an indexed block and never outlives it: BlockPool sees to that.
// Slot 0 is reserved: it is always zero, every sequence starts as a copy of it, and holding it
// counts nothing.
//
// Invariant: num_free() + num_snapshots() + num_held() == num_slots() - 1.
// Thread-compatible: the scheduler thread owns it and makes every call.

#ifndef ENGINE_STATE_SLOTS_H_
#define ENGINE_STATE_SLOTS_H_

#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "block_hash/block_hash.h"

namespace engine {

using SlotId = int32_t;  // [1, num_slots), or kZeroSlot where a copy starts from nothing
inline constexpr SlotId kZeroSlot = 0;
inline constexpr SlotId kNoSlot = -1;

class StateSlots final {
 public:
  // `on_dropped` learns of every snapshot that is one no more.
  // REQUIRES: num_slots >= 2 (slot 0 included).
  StateSlots(int32_t num_slots, std::function<void(const block_hash::BlockHash&)> on_dropped);
  StateSlots(const StateSlots&) = delete;
  StateSlots& operator=(const StateSlots&) = delete;

  // A slot with one holder: a free one, else that of the oldest snapshot that nobody holds.
  // Errors: kResourceExhausted if there is neither.
  absl::StatusOr<SlotId> Allocate();
  // REQUIRES: the slot is held, or kZeroSlot.
  void Hold(SlotId slot);
  void Release(SlotId slot);
  void Release(absl::Span<const SlotId> slots);

  // The held slot, which nobody writes any more, becomes the snapshot of `block` and loses a
  // holder.  REQUIRES: `block` has none.
  void AddSnapshot(SlotId slot, const block_hash::BlockHash& block);
  bool HasSnapshot(const block_hash::BlockHash& block) const { return snapshots_.contains(block); }
  // The snapshot with one more holder.  REQUIRES: there is one.
  SlotId AcquireSnapshot(const block_hash::BlockHash& block);
  // Whoever holds it keeps the slot; others find it no more.  Nothing if there is none.
  void DropSnapshot(const block_hash::BlockHash& block);
  // The slot of a snapshot with one holder is that holder's own from now on, to be written.
  void Adopt(SlotId slot);

  int32_t num_holders(SlotId slot) const;
  int32_t num_slots() const { return static_cast<int32_t>(slots_.size()); }  // slot 0 included
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_snapshots() const { return num_idle_snapshots_; }  // that nobody holds
  int32_t num_held() const { return num_slots() - 1 - num_free() - num_snapshots(); }
  int32_t num_available() const { return num_free() + num_snapshots(); }
  int64_t snapshots_taken() const { return snapshots_taken_; }      // since start
  int64_t snapshots_dropped() const { return snapshots_dropped_; }  // for room, since start

 private:
  struct Slot {
    int32_t holders = 0;
    std::optional<block_hash::BlockHash> snapshot_of;
    std::list<SlotId>::iterator age;  // valid while it is a snapshot
  };
  void Forget(SlotId slot);

  const std::function<void(const block_hash::BlockHash&)> on_dropped_;
  std::vector<Slot> slots_;   // by slot id
  std::vector<SlotId> free_;  // a stack: last freed, first reused
  std::list<SlotId> by_age_;  // snapshots, held ones too; the one taken or used longest ago first
  absl::flat_hash_map<block_hash::BlockHash, SlotId> snapshots_;
  int32_t num_idle_snapshots_ = 0;
  int64_t snapshots_taken_ = 0;
  int64_t snapshots_dropped_ = 0;
};

}  // namespace engine

#endif  // ENGINE_STATE_SLOTS_H_
