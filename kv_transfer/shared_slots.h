// Staging slots that processes of one host share, so that no core copies from one to the other: the
// sender's device copies into a slot of its own, the receiver's device out of it, and between them
// goes only a message that names the slot.
//
// The memory has no name that could be left behind: another process opens it through the owner's
// descriptor, and it lasts as long as either has it mapped.  It cannot shrink under its readers.

#ifndef KV_TRANSFER_SHARED_SLOTS_H_
#define KV_TRANSFER_SHARED_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device_copies.h"

namespace kv_transfer {

// A file that is memory: mapped, and pinned for the device.
class SharedMapping final {
 public:
  // Takes `descriptor`.  Errors: kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<SharedMapping>> Create(int descriptor, size_t bytes,
                                                               kernels::DeviceCopies* copies);
  ~SharedMapping();
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;

  absl::Span<std::byte> span() const { return span_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedMapping(int descriptor, absl::Span<std::byte> span)
      : descriptor_(descriptor), span_(span) {}

  const int descriptor_;
  const absl::Span<std::byte> span_;
  std::unique_ptr<kernels::HostPin> pin_;
};

// This process's own, lent out one by one.  Thread-safe.
class SharedSlots final {
 public:
  // Errors: kResourceExhausted, kUnimplemented where the system has no such memory.
  static absl::StatusOr<std::unique_ptr<SharedSlots>> Create(kernels::DeviceCopies* copies,
                                                             uint16_t count, int64_t slot_bytes);

  int64_t slot_bytes() const { return slot_bytes_; }
  // What another process needs to read them.
  std::string address() const;

  // A slot's number, from 1 on; 0: all are lent.
  uint16_t Take();
  void Return(uint16_t slot);
  std::byte* data(uint16_t slot) const { return memory_->span().data() + (slot - 1) * stride_; }

 private:
  SharedSlots(std::unique_ptr<SharedMapping> memory, std::string name, uint16_t count,
              int64_t slot_bytes, int64_t stride);

  const std::unique_ptr<SharedMapping> memory_;
  const std::string name_;
  const uint16_t count_;
  const int64_t slot_bytes_;
  const int64_t stride_;  // from one to the next
  std::mutex mutex_;      // guards free_
  std::vector<uint16_t> free_;
};

// Another process's.  Thread-safe.
class PeerSlots final {
 public:
  // Errors: kInvalidArgument for what is no address, kUnavailable when they cannot be opened here.
  static absl::StatusOr<std::shared_ptr<const PeerSlots>> Open(kernels::DeviceCopies* copies,
                                                               const std::string& address);

  // What lies in a slot.  Empty: there is no such slot, or it is smaller.
  absl::Span<const std::byte> Find(uint16_t slot, uint64_t length) const;

 private:
  PeerSlots(std::unique_ptr<SharedMapping> memory, uint16_t count, int64_t stride)
      : memory_(std::move(memory)), count_(count), stride_(stride) {}

  const std::unique_ptr<SharedMapping> memory_;
  const uint16_t count_;
  const int64_t stride_;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_SHARED_SLOTS_H_
