// Recordings as CUDA graphs, and times between CUDA events.

#ifndef KERNELS_CUDA_GRAPH_RECORDING_H_
#define KERNELS_CUDA_GRAPH_RECORDING_H_

#include <cuda_runtime.h>

#include <memory>
#include <mutex>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/device.h"
#include "kernels/recording.h"

namespace kernels::cuda {

// What `launch` launches on `stream`.  REQUIRES: every kernel of it has run before, since loading
// one may synchronize.  Other threads may launch and copy meanwhile, and wait for the whole device
// with RecordingMutex alone.
absl::StatusOr<std::unique_ptr<Recording>> RecordGraph(cudaStream_t stream,
                                                       absl::FunctionRef<absl::Status()> launch);

// Held while a step is recorded, which a wait for the whole device would break.
std::mutex& RecordingMutex();

// On the launcher's stream, whatever the context.
class EventTimer final : public Timer {
 public:
  static absl::StatusOr<std::unique_ptr<Timer>> Create(const Launcher& launcher);
  EventTimer(const EventTimer&) = delete;
  EventTimer& operator=(const EventTimer&) = delete;
  ~EventTimer() override;

  absl::Status Start(const LaunchContext& context) override;
  absl::Status Stop(const LaunchContext& context) override;
  absl::StatusOr<double> Wait() override;

 private:
  explicit EventTimer(const Launcher& launcher) : launcher_(launcher) {}

  const Launcher launcher_;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GRAPH_RECORDING_H_
