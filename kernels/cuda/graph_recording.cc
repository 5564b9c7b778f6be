#include "kernels/cuda/graph_recording.h"

#include "kernels/cuda/cuda_status.h"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

class GraphRecording final : public Recording {
 public:
  GraphRecording(cudaStream_t stream, cudaGraphExec_t graph) : stream_(stream), graph_(graph) {}
  GraphRecording(const GraphRecording&) = delete;
  GraphRecording& operator=(const GraphRecording&) = delete;
  ~GraphRecording() override { cudaGraphExecDestroy(graph_); }

  absl::Status Replay(const LaunchContext& context) override {
    const cudaStream_t stream =
        context.stream == nullptr ? stream_ : static_cast<cudaStream_t>(context.stream);
    return ToStatus(cudaGraphLaunch(graph_, stream), "replaying a step");
  }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t graph_;
};

}  // namespace

std::mutex& RecordingMutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

absl::StatusOr<std::unique_ptr<Recording>> RecordGraph(cudaStream_t stream,
                                                       absl::FunctionRef<absl::Status()> launch) {
  const std::lock_guard<std::mutex> lock(RecordingMutex());
  RETURN_IF_ERROR(ToStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                           "recording a step"));
  const absl::Status launched = launch();
  cudaGraph_t graph = nullptr;
  const absl::Status ended = ToStatus(cudaStreamEndCapture(stream, &graph), "recording a step");
  RETURN_IF_ERROR(launched);
  RETURN_IF_ERROR(ended);
  cudaGraphExec_t executable = nullptr;
  const absl::Status made =
      ToStatus(cudaGraphInstantiate(&executable, graph, 0), "recording a step");
  cudaGraphDestroy(graph);
  RETURN_IF_ERROR(made);
  return std::make_unique<GraphRecording>(stream, executable);
}

absl::StatusOr<std::unique_ptr<Timer>> EventTimer::Create(const Launcher& launcher) {
  std::unique_ptr<EventTimer> timer(new EventTimer(launcher));
  for (cudaEvent_t* event : {&timer->start_, &timer->stop_}) {
    RETURN_IF_ERROR(ToStatus(cudaEventCreate(event), "making an event"));
  }
  return timer;
}

EventTimer::~EventTimer() {
  for (const cudaEvent_t event : {start_, stop_}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

absl::Status EventTimer::Start(const LaunchContext&) {
  return ToStatus(cudaEventRecord(start_, launcher_.stream), "timing a step");
}

absl::Status EventTimer::Stop(const LaunchContext&) {
  return ToStatus(cudaEventRecord(stop_, launcher_.stream), "timing a step");
}

absl::StatusOr<double> EventTimer::Wait() {
  RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(stop_), "running a step"));
  RETURN_IF_ERROR(FaultStatus(*launcher_.device.fault));
  float ms = 0;
  RETURN_IF_ERROR(ToStatus(cudaEventElapsedTime(&ms, start_, stop_), "timing a step"));
  return ms;
}

}  // namespace kernels::cuda
