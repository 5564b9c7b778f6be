// StagingSlots: pinned pieces of host memory of one size, lent out one by one.
//
// Thread-safe.

#ifndef KV_TRANSFER_STAGING_SLOTS_H_
#define KV_TRANSFER_STAGING_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/device_copies.h"

namespace kv_transfer {

class StagingSlots final {
 public:
  // `copies` must outlive it.
  StagingSlots(kernels::DeviceCopies* copies, int64_t slot_bytes)
      : copies_(copies), slot_bytes_(slot_bytes) {}

  int64_t slot_bytes() const { return slot_bytes_; }

  // Makes more until there are `count`, lent ones included; slots stay.  `registered` is given the
  // new memory.  Errors: kResourceExhausted.
  absl::Status Provide(int64_t count,
                       const std::function<absl::Status(absl::Span<std::byte>)>& registered);

  // Makes one if all are lent.  Null: there is no memory for it.
  std::byte* Take();
  void Return(std::byte* slot);

 private:
  std::byte* TryTake();                                      // null if all are lent
  absl::StatusOr<absl::Span<std::byte>> Add(int64_t count);  // mutex_ is not held

  kernels::DeviceCopies* const copies_;
  const int64_t slot_bytes_;
  std::mutex mutex_;  // guards the rest
  std::vector<std::unique_ptr<kernels::Buffer>> memory_;
  std::vector<std::byte*> free_;
  int64_t count_ = 0;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_STAGING_SLOTS_H_
