// HostCopies: copies of a device whose memory is the host's, each direction on a thread of its own.
// A test can hold them up, as a device that is slow.
//
// Thread-safe.

#ifndef TESTS_FAKES_HOST_COPIES_H_
#define TESTS_FAKES_HOST_COPIES_H_

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "kernels/device_copies.h"

namespace fakes {

class HostCopies : public kernels::DeviceCopies {
 public:
  // Copies that have not begun wait for Release.  Released by the destructor.
  virtual void Hold() = 0;
  virtual void Release() = 0;
  // True if `count` copies are waiting, within the time.
  virtual bool WaitForHeld(int count, absl::Duration timeout = absl::Seconds(20)) = 0;
  // The next copies end with `status`, and copy nothing.
  virtual void Fail(absl::Status status) = 0;
};

std::unique_ptr<HostCopies> CreateHostCopies();

// Zeroed, and not touched before it is used, however much it is.
std::unique_ptr<kernels::Buffer> MakeHostBuffer(int64_t size_bytes);

}  // namespace fakes

#endif  // TESTS_FAKES_HOST_COPIES_H_
