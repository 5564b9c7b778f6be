// Executor: the engine on one device: an executor thread that runs launched plans in order.  On the
// CPU it is the device; on CUDA it is the thread that launches, and Collect waits for the device,
// so that a step's launches are made while the step before runs.  Decode steps that keep coming in
// one shape are recorded (decode_shape.h) and then cost one launch.
//
// Thread rule as Engine: the scheduler thread calls, the executor thread runs steps.

#ifndef ENGINE_EXECUTOR_H_
#define ENGINE_EXECUTOR_H_

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/decode_shape.h"
#include "engine/engine.h"

namespace engine {

class Executor final : public Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Executor>> Create(std::unique_ptr<kernels::Backend> backend,
                                                          std::unique_ptr<model::Network> network,
                                                          const model::StepLimits& limits,
                                                          int32_t num_penalty_slots);
  ~Executor() override;

  const model::Network& network() const override { return *network_; }
  const model::CacheLayout& cache_layout() const override { return network_->cache_layout(); }
  const model::StepLimits& limits() const override { return limits_; }
  int32_t num_penalty_slots() const override { return state_.penalties.num_slots; }
  void SetCache(absl::Span<std::byte> token_blocks, absl::Span<std::byte> state_slots) override;
  CacheSpans cache() const override { return cache_; }
  absl::StatusOr<std::unique_ptr<kernels::DeviceCopies>> MakeCopies() override;
  absl::StatusOr<StepHandle> Launch(const model::StepPlan& plan) override;
  absl::StatusOr<StepResult> Collect(StepHandle handle) override;

 private:
  static constexpr int kMaxInFlight = 2;
  static constexpr size_t kMaxRecordings = 256;  // of a lane

  // Where a step runs: its results, on the device and on the host, and what launches it.  Two
  // alternate.
  struct Lane {
    std::unique_ptr<kernels::Buffer> results;       // SampleResult [max_samples]
    std::unique_ptr<kernels::Buffer> sampled_ids;   // int32 [max_samples]
    std::unique_ptr<kernels::Buffer> logits;        // float [max_logit_rows, vocab]
    std::unique_ptr<kernels::Buffer> host_results;  // pinned
    std::unique_ptr<kernels::Buffer> host_logits;
    std::unique_ptr<kernels::Timer> timer;
    // Of a device with memory of its own: the plan in pinned memory, from where it is copied there,
    // and the launches over it.  A shape is recorded when it comes for the second time: the first
    // loads the kernels.
    std::unique_ptr<kernels::Buffer> plan_memory;
    std::unique_ptr<model::StepPlan> plan;
    std::map<DecodeShape, std::unique_ptr<kernels::Recording>> recordings;
  };
  struct Step {
    StepHandle handle = 0;
    const model::StepPlan* plan = nullptr;
    bool launched = false;
  };

  Executor(std::unique_ptr<kernels::Backend> backend, std::unique_ptr<model::Network> network,
           const model::StepLimits& limits);
  void Run();
  absl::Status PlaceCacheOnDevice();
  absl::Status MakeLane(Lane& lane);
  // Launches a step.
  absl::Status RunStep(const model::StepPlan& plan, Lane& lane, const int32_t* previous_sampled);
  absl::Status Forward(const model::StepPlan& plan, Lane& lane, const int32_t* previous_sampled);

  std::unique_ptr<kernels::Backend> backend_;  // outlives the network's weights
  std::unique_ptr<model::Network> network_;
  const model::StepLimits limits_;
  model::StepState state_;
  CacheSpans cache_;
  std::unique_ptr<kernels::Buffer> device_blocks_;  // null: the host's memory is the cache
  std::unique_ptr<kernels::Buffer> device_slots_;   // the same
  int32_t num_state_slots_ = 0;                     // slot 0 included
  std::unique_ptr<kernels::Buffer> output_counts_;
  std::unique_ptr<kernels::Buffer> in_prompt_;
  Lane lanes_[kMaxInFlight];    // of step h: [h % kMaxInFlight]
  StepHandle next_handle_ = 0;  // scheduler thread

  std::mutex mutex_;  // guards steps_, status_, stopping_
  std::condition_variable changed_;
  std::deque<Step> steps_;  // launched, not collected; oldest first
  absl::Status status_;     // first failure; the engine is then broken
  bool stopping_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace engine

#endif  // ENGINE_EXECUTOR_H_
