// SlotPool: ids of fixed-size slots, one per sequence: state slots (V4) and penalty slots.
// Thread-compatible.

#ifndef ENGINE_SLOT_POOL_H_
#define ENGINE_SLOT_POOL_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace engine {

class SlotPool final {
 public:
  explicit SlotPool(int32_t num_slots);

  // Errors: kResourceExhausted if every slot is taken.
  absl::StatusOr<int32_t> Allocate();
  // REQUIRES: the slot is taken.
  void Release(int32_t slot);

  int32_t num_slots() const { return static_cast<int32_t>(taken_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }

 private:
  std::vector<bool> taken_;
  std::vector<int32_t> free_;
};

}  // namespace engine

#endif  // ENGINE_SLOT_POOL_H_
