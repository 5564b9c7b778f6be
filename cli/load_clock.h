// The clock of a load run.  Tests give one whose time is known.

#ifndef CLI_LOAD_CLOCK_H_
#define CLI_LOAD_CLOCK_H_

#include "absl/time/time.h"

namespace cli {

// Thread-safe.
class LoadClock {
 public:
  virtual ~LoadClock() = default;
  // Since some moment; never goes back.
  virtual absl::Duration Now() = 0;
  virtual void SleepUntil(absl::Duration moment) = 0;
};

// The machine's monotonic clock, which nobody sets.
LoadClock& SteadyClock();

}  // namespace cli

#endif  // CLI_LOAD_CLOCK_H_
