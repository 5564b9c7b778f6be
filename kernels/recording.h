// What an engine runs steps ahead with: launches recorded once and replayed, and the time between
// two points of a context.

#ifndef KERNELS_RECORDING_H_
#define KERNELS_RECORDING_H_

#include <chrono>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tensor.h"

namespace kernels {

// Launches with everything they were given: replaying them costs the host one launch.  Memory that
// they read from the host must be where it was.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual absl::Status Replay(const LaunchContext& context) = 0;
};

// Two points in the launches of a context.  Start and Stop are launches; another thread may Wait.
class Timer {
 public:
  virtual ~Timer() = default;
  virtual absl::Status Start(const LaunchContext& context) = 0;
  virtual absl::Status Stop(const LaunchContext& context) = 0;
  // Blocks until the context has come to Stop; milliseconds since it came to Start.
  // Errors: as Backend::Synchronize.
  virtual absl::StatusOr<double> Wait() = 0;
};

// Of a device whose launches run to their end: the host's clock.
class HostTimer final : public Timer {
 public:
  absl::Status Start(const LaunchContext&) override {
    start_ = Clock::now();
    return absl::OkStatus();
  }
  absl::Status Stop(const LaunchContext&) override {
    stop_ = Clock::now();
    return absl::OkStatus();
  }
  absl::StatusOr<double> Wait() override {
    return std::chrono::duration<double, std::milli>(stop_ - start_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  Clock::time_point stop_;
};

}  // namespace kernels

#endif  // KERNELS_RECORDING_H_
