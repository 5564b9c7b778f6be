// Moments for leases, deadlines and time limits: no change of the machine's clock moves them, as
// one of absl::Now() would.
//
// Thread-safe.

#ifndef STEADY_TIME_STEADY_TIME_H_
#define STEADY_TIME_STEADY_TIME_H_

#include <chrono>

#include "absl/time/time.h"

namespace steady_time {

// Of this machine since it started; only differences of its values have a meaning.
inline absl::Time Now() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// For a condition variable's wait_until.  REQUIRES: `moment` is not infinite.
inline std::chrono::steady_clock::time_point ToChrono(absl::Time moment) {
  return std::chrono::steady_clock::time_point(
      absl::ToChronoNanoseconds(moment - absl::UnixEpoch()));
}

}  // namespace steady_time

#endif  // STEADY_TIME_STEADY_TIME_H_
