#include "engine/executor.h"

#include <algorithm>
#include <utility>

#include "kernels/cuda/device_copies.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace engine {

absl::StatusOr<std::unique_ptr<Executor>> Executor::Create(
    std::unique_ptr<kernels::Backend> backend, std::unique_ptr<model::Network> network,
    const model::StepLimits& limits, int32_t num_penalty_slots) {
  std::unique_ptr<Executor> executor(new Executor(std::move(backend), std::move(network), limits));
  kernels::Backend& device = *executor->backend_;
  const int64_t vocab = executor->network_->config().vocab_size;
  for (Lane& lane : executor->lanes_) RETURN_IF_ERROR(executor->MakeLane(lane));
  ASSIGN_OR_RETURN(executor->output_counts_,
                   device.Allocate(sizeof(int32_t) * num_penalty_slots * vocab));
  ASSIGN_OR_RETURN(executor->in_prompt_, device.Allocate(num_penalty_slots * vocab));
  executor->state_.penalties = {
      .output_counts = reinterpret_cast<int32_t*>(executor->output_counts_->data()),
      .in_prompt = reinterpret_cast<uint8_t*>(executor->in_prompt_->data()),
      .num_slots = num_penalty_slots};
  executor->thread_ = std::thread([raw = executor.get()] { raw->Run(); });
  return executor;
}

Executor::Executor(std::unique_ptr<kernels::Backend> backend,
                   std::unique_ptr<model::Network> network, const model::StepLimits& limits)
    : backend_(std::move(backend)), network_(std::move(network)), limits_(limits) {}

absl::Status Executor::MakeLane(Lane& lane) {
  const auto results_bytes =
      static_cast<int64_t>(sizeof(kernels::SampleResult)) * limits_.max_samples;
  ASSIGN_OR_RETURN(lane.results, backend_->Allocate(results_bytes));
  ASSIGN_OR_RETURN(lane.host_results, backend_->AllocateHost(results_bytes));
  ASSIGN_OR_RETURN(lane.sampled_ids, backend_->Allocate(sizeof(int32_t) * limits_.max_samples));
  if (limits_.max_logit_rows > 0) {
    const int64_t logits_bytes =
        int64_t{limits_.max_logit_rows} * network_->config().vocab_size * sizeof(float);
    ASSIGN_OR_RETURN(lane.logits, backend_->Allocate(logits_bytes));
    ASSIGN_OR_RETURN(lane.host_logits, backend_->AllocateHost(logits_bytes));
  }
  ASSIGN_OR_RETURN(lane.timer, backend_->MakeTimer());
  if (backend_->uses_host_memory()) return absl::OkStatus();
  ASSIGN_OR_RETURN(lane.plan_memory, backend_->AllocateHost(model::StepPlan::SizeBytes(limits_)));
  lane.plan = std::make_unique<model::StepPlan>(limits_, lane.plan_memory->data());
  return absl::OkStatus();
}

Executor::~Executor() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  // Steps that nobody collects may still use what is freed now; whether they fail is no matter.
  backend_->Synchronize({}).IgnoreError();
}

void Executor::SetCache(absl::Span<std::byte> token_blocks, absl::Span<std::byte> state_slots) {
  FERRY_CHECK(next_handle_ == 0) << "the cache is set before the first step";
  const auto slot_bytes = static_cast<size_t>(cache_layout().spec().state_slot_bytes);
  FERRY_CHECK(slot_bytes == 0 ? state_slots.empty() : state_slots.size() % slot_bytes == 0)
      << state_slots.size() << " bytes for state slots of " << slot_bytes;
  num_state_slots_ = slot_bytes == 0 ? 0 : static_cast<int32_t>(state_slots.size() / slot_bytes);
  cache_ = {.token_blocks = token_blocks, .state_slots = state_slots};
  if (!backend_->uses_host_memory()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    status_ = PlaceCacheOnDevice();
  }
  state_.cache = cache_.token_blocks.data();
  state_.state_slots = state_slots.empty() ? nullptr : cache_.state_slots.data();
}

absl::Status Executor::PlaceCacheOnDevice() {
  const auto place = [this](absl::Span<std::byte>& span,
                            std::unique_ptr<kernels::Buffer>& memory) -> absl::Status {
    ASSIGN_OR_RETURN(memory, backend_->Allocate(static_cast<int64_t>(span.size())));
    span = {memory->data(), span.size()};
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(place(cache_.token_blocks, device_blocks_));
  if (!cache_.state_slots.empty()) RETURN_IF_ERROR(place(cache_.state_slots, device_slots_));
  return backend_->Synchronize({});
}

absl::StatusOr<std::unique_ptr<kernels::DeviceCopies>> Executor::MakeCopies() {
  if (backend_->uses_host_memory()) return nullptr;
  return kernels::cuda::CreateDeviceCopies();
}

absl::StatusOr<StepHandle> Executor::Launch(const model::StepPlan& plan) {
  FERRY_CHECK(state_.cache != nullptr) << "Launch before SetCache";
  FERRY_CHECK(plan.limits() == limits_) << "the plan was made for other limits";
  for (int32_t s = 0; num_state_slots_ > 0 && s < plan.counts().num_seqs; ++s) {
    FERRY_CHECK(plan.state_slots[s] > 0 && plan.state_slots[s] < num_state_slots_)
        << "sequence " << s << " has state slot " << plan.state_slots[s];
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  RETURN_IF_ERROR(status_);
  FERRY_CHECK(static_cast<int>(steps_.size()) < kMaxInFlight) << "in flight: " << steps_.size();
  const StepHandle handle = next_handle_++;
  steps_.push_back({.handle = handle, .plan = &plan});
  changed_.notify_all();
  return handle;
}

absl::StatusOr<StepResult> Executor::Collect(StepHandle handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  FERRY_CHECK(!steps_.empty() && steps_.front().handle == handle)
      << "step " << handle << " is not the oldest in flight";
  changed_.wait(lock, [&] { return steps_.front().launched; });
  const model::StepCounts& counts = steps_.front().plan->counts();
  const Lane& lane = lanes_[handle % kMaxInFlight];
  StepResult result;
  if (status_.ok()) {
    lock.unlock();
    const absl::StatusOr<double> step_ms = lane.timer->Wait();
    lock.lock();
    if (step_ms.ok()) {
      result.step_ms = *step_ms;
    } else if (status_.ok()) {
      status_ = step_ms.status();
    }
  }
  steps_.pop_front();
  RETURN_IF_ERROR(status_);
  result.samples =
      absl::MakeConstSpan(reinterpret_cast<const kernels::SampleResult*>(lane.host_results->data()),
                          counts.num_samples);
  if (counts.num_logit_rows > 0) {
    result.logits = absl::MakeConstSpan(
        lane.host_logits->floats(), int64_t{counts.num_logit_rows} * network_->config().vocab_size);
  }
  return result;
}

void Executor::Run() {
  StepHandle next = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const auto launched = [&] {
      return std::find_if(steps_.begin(), steps_.end(),
                          [&](const Step& s) { return s.handle == next; });
    };
    changed_.wait(lock, [&] { return stopping_ || launched() != steps_.end(); });
    if (stopping_) return;
    const Step step = *launched();
    absl::Status status = status_;
    lock.unlock();

    if (status.ok()) {
      const Lane& previous = lanes_[(next + kMaxInFlight - 1) % kMaxInFlight];
      status = RunStep(*step.plan, lanes_[next % kMaxInFlight],
                       reinterpret_cast<const int32_t*>(previous.sampled_ids->data()));
    }

    lock.lock();
    if (status_.ok()) status_ = status;
    // Collect takes only steps that are launched, so it is still there.
    launched()->launched = true;
    ++next;
    changed_.notify_all();
  }
}

absl::Status Executor::RunStep(const model::StepPlan& plan, Lane& lane,
                               const int32_t* previous_sampled) {
  const kernels::LaunchContext context;
  const model::StepCounts& counts = plan.counts();
  const auto copy_slots = [&](const int32_t* src, const int32_t* dst, int32_t count) {
    const auto n = static_cast<size_t>(count);
    return count == 0
               ? absl::OkStatus()
               : backend_->CopyBlocks(context, state_.state_slots,
                                      cache_layout().spec().state_slot_bytes, {src, n}, {dst, n});
  };
  RETURN_IF_ERROR(lane.timer->Start(context));
  RETURN_IF_ERROR(copy_slots(plan.state_copy_src, plan.state_copy_dst, counts.num_state_copies));
  if (counts.num_tokens > 0) RETURN_IF_ERROR(Forward(plan, lane, previous_sampled));
  RETURN_IF_ERROR(copy_slots(plan.snapshot_src, plan.snapshot_dst, counts.num_snapshots));
  RETURN_IF_ERROR(backend_->CopyToHost(
      context, {lane.host_results->data(), sizeof(kernels::SampleResult) * counts.num_samples},
      lane.results->data()));
  if (counts.num_logit_rows > 0) {
    const size_t row_bytes = sizeof(float) * static_cast<size_t>(network_->config().vocab_size);
    RETURN_IF_ERROR(
        backend_->CopyToHost(context, {lane.host_logits->data(), row_bytes * counts.num_logit_rows},
                             lane.logits->data()));
  }
  return lane.timer->Stop(context);
}

absl::Status Executor::Forward(const model::StepPlan& plan, Lane& lane,
                               const int32_t* previous_sampled) {
  const kernels::LaunchContext context;
  model::StepState state = state_;
  state.previous_sampled = previous_sampled;
  const model::StepOutput output = {
      .results = reinterpret_cast<kernels::SampleResult*>(lane.results->data()),
      .sampled_ids = reinterpret_cast<int32_t*>(lane.sampled_ids->data()),
      .logits = lane.logits == nullptr ? nullptr : lane.logits->floats()};
  if (lane.plan == nullptr) return network_->Forward(context, plan, state, output);
  lane.plan->CopyFrom(plan);
  const auto forward = [&] { return network_->Forward(context, *lane.plan, state, output); };
  const std::optional<DecodeShape> shape = ShapeOfDecode(plan);
  if (!shape.has_value()) return forward();
  PadDecode(*shape, *lane.plan);
  if (lane.recordings.size() == kMaxRecordings) lane.recordings.clear();
  const auto [found, is_new] = lane.recordings.try_emplace(*shape);
  if (is_new) return forward();
  if (found->second == nullptr) {
    ASSIGN_OR_RETURN(found->second, backend_->Record(forward));
    if (found->second == nullptr) return forward();
  }
  return found->second->Replay(context);
}

}  // namespace engine
