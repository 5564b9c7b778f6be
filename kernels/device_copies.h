// DeviceCopies: copies between a device's memory and the host's, beside the steps that run there:
// neither waits for the other.
//
// Copies of one direction run in the order of the calls, and their `done` is called in that order,
// on a thread of this object, when the copy has ended; it must not block.
//
// Thread-safe.  Its destructor waits until every `done` has been called.

#ifndef KERNELS_DEVICE_COPIES_H_
#define KERNELS_DEVICE_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace kernels {

// Host memory that the device copies from and to by itself while this lives.
class HostPin {
 public:
  virtual ~HostPin() = default;
};

class DeviceCopies {
 public:
  // Errors: kInternal if the device has failed.
  using Done = std::function<void(absl::Status)>;

  virtual ~DeviceCopies() = default;

  // Memory of the host that the device copies from and to by itself; other processes may read it.
  // Errors: kResourceExhausted naming the size.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> AllocateHost(int64_t size_bytes) = 0;
  // The same of whole pages that the caller has mapped, shared with other processes or not, and
  // keeps longer than the result.
  virtual absl::StatusOr<std::unique_ptr<HostPin>> Pin(absl::Span<std::byte> host) = 0;

  // `host` lies in such memory.  Both sides stay untouched until `done`.
  virtual void ToHost(absl::Span<std::byte> host, const std::byte* device, Done done) = 0;
  virtual void ToDevice(std::byte* device, absl::Span<const std::byte> host, Done done) = 0;

  // Calls `done` when everything that this process has the device do by now has been done,
  // whichever library asked for it; in the order of ToDevice.
  virtual void Settle(Done done) = 0;
};

}  // namespace kernels

#endif  // KERNELS_DEVICE_COPIES_H_
