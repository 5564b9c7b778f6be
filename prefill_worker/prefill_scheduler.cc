// The scheduler's thread: turns, admission, steps.  How a request ends and what RPC threads ask is
// in request_lifecycle.cc.
#include "prefill_worker/prefill_scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "service/process.h"
#include "spdlog/spdlog.h"
#include "status/grpc_status.h"
#include "steady_time/steady_time.h"

namespace prefill_worker {
namespace {

constexpr double kStepMsSmoothing = 0.2;  // weight of the newest step

}  // namespace

PrefillScheduler::PrefillScheduler(const PrefillOptions& options, worker::WorkerRuntime* runtime,
                                   KvSender* sender, worker::KvEventLog* events,
                                   worker::WorkerMetrics* metrics,
                                   std::function<void()> on_engine_failure)
    : options_(options),
      runtime_(runtime),
      sender_(sender),
      events_(events),
      metrics_(metrics),
      on_engine_failure_(std::move(on_engine_failure)),
      pacing_(options.chunk_tokens, runtime->block_size(), runtime->speed.prefill_tokens_per_s,
              options.worker.transfer_total),
      penalty_slots_(runtime->engine->num_penalty_slots()),
      steps_{
          {runtime->engine->limits(), runtime->snapshots, runtime->pool.get(), &penalty_slots_},
          {runtime->engine->limits(), runtime->snapshots, runtime->pool.get(), &penalty_slots_}} {
  Publish();
}

PrefillScheduler::~PrefillScheduler() { Stop(); }

void PrefillScheduler::Start() {
  thread_ = std::thread([this] { Run(); });
}

void PrefillScheduler::EndAll() {
  draining_ = true;
  Post([this] {
    ending_all_ = true;
    std::vector<Request*> all;
    for (const auto& [id, request] : requests_) all.push_back(request.get());
    for (Request* request : all) {
      End(*request,
          status::WithReason(absl::UnavailableError("worker is shutting down"), status::kDraining));
    }
  });
  std::unique_lock<std::mutex> lock(mutex_);
  emptied_.wait_for(lock, absl::ToChronoMilliseconds(options_.worker.quarantine_max),
                    [this] { return num_requests_ == 0; });
}

void PrefillScheduler::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void PrefillScheduler::Post(std::function<void()> command) {
  const std::lock_guard<std::mutex> lock(mutex_);
  commands_.push_back(std::move(command));
  changed_.notify_all();
}

void PrefillScheduler::Run() {
  while (true) {
    RunCommands();
    // Clean-up runs every turn, whether there is work or not.
    const absl::Time next = CheckTimes(steady_time::Now());
    AdmitWaiting();
    const bool launched = in_flight_.size() < 2 && LaunchStep();
    const bool collected = !launched && !in_flight_.empty();
    if (collected) CollectStep();
    Publish();
    // A step that has ended may have made room for the next one, in slots or in blocks.
    if (launched || collected) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto wanted = [this] { return stopping_ || !commands_.empty(); };
    if (next == absl::InfiniteFuture()) {
      changed_.wait(lock, wanted);
    } else {
      changed_.wait_until(lock, steady_time::ToChrono(next), wanted);
    }
    if (stopping_ && commands_.empty()) return;
  }
}

void PrefillScheduler::RunCommands() {
  std::vector<std::function<void()>> commands;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) command();
}

absl::Time PrefillScheduler::CheckTimes(absl::Time now) {
  absl::Time next = absl::InfiniteFuture();
  std::vector<Request*> late;
  for (const auto& [id, request] : requests_) {
    if (request->verdict.has_value()) continue;
    absl::Time limit = request->deadline;
    // A lease does not run out while its blocks are being pushed.
    if (request->held && request->send == nullptr) limit = std::min(limit, request->lease_end);
    if (limit <= now) {
      late.push_back(request.get());
    } else {
      next = std::min(next, limit);
    }
  }
  for (Request* request : late) {
    if (request->deadline <= now) {
      End(*request, absl::DeadlineExceededError("the request's time has run out"));
    } else {
      metrics_->CountLeaseExpired();
      End(*request,
          absl::AbortedError(absl::StrCat("lease of held blocks was not renewed for ",
                                          absl::FormatDuration(options_.worker.kv_lease))));
    }
  }
  return next;
}

void PrefillScheduler::AdmitWaiting() {
  const size_t max_seqs = runtime_->engine->limits().max_seqs;
  while (!waiting_.empty() && computing_.size() < max_seqs && GiveBlocks(*waiting_.front())) {
    Request* request = waiting_.front();
    waiting_.pop_front();
    --num_waiting_;
    request->admitted = true;
    computing_.push_back(request);
  }
}

bool PrefillScheduler::GiveBlocks(Request& request) {
  engine::Sequence& seq = request.seq;
  engine::BlockPool& pool = *runtime_->pool;
  const int32_t block_size = runtime_->block_size();
  constexpr auto kComputed = engine::Continuation::kComputed;
  const int32_t cached =
      engine::ReusableBlocks(seq, kComputed, block_size, *runtime_->hasher, pool);
  // A hit may be a cached block, which is then not available any more: look before, check after.
  if (engine::BlocksFor(request.num_tokens(), block_size) - cached > pool.num_available()) {
    return false;
  }
  if (!engine::TakePrefix(seq, {}, cached, kComputed, block_size, pool).ok()) return false;
  // All blocks at once: two half-computed prompts can never wait for each other.
  if (!engine::GrowBlocks(seq, request.num_tokens(), block_size, pool).ok()) {
    engine::ReleaseBlocks(seq, pool);
    return false;
  }
  request.num_collected = request.cached_tokens = seq.num_computed;
  return true;
}

bool PrefillScheduler::LaunchStep() {
  ChunkStep* step = &steps_[step_id_ % 2];
  if (!engine_failure_.ok() || !step->Build(step_id_ + 1, computing_, pacing_.StepTokens())) {
    return false;
  }
  ++step_id_;
  in_flight_.push_back(step);
  const absl::StatusOr<engine::StepHandle> handle = runtime_->engine->Launch(step->plan());
  if (!handle.ok()) {
    OnEngineFailure(handle.status());
    return true;
  }
  step->handle = *handle;
  for (Request* request : step->requests()) {
    if (request->started) continue;
    request->started = true;
    request->start_time = steady_time::Now();
    request->sink->Started(request->cached_tokens);
    // Late reservation: the decode worker's blocks are not taken while the prompt waits here.
    MaybeStartSend(*request);
  }
  std::erase_if(computing_, [](const Request* r) { return r->next_branch == r->num_branches; });
  return true;
}

void PrefillScheduler::CollectStep() {
  ChunkStep* step = in_flight_.front();
  const absl::StatusOr<engine::StepResult> result = runtime_->engine->Collect(step->handle);
  if (!result.ok()) return OnEngineFailure(result.status());
  in_flight_.pop_front();
  metrics_->ObserveStep(worker::StepPhase::kPrefill, result->step_ms / 1e3, step->num_tokens());
  pacing_.Observe(step->num_tokens(), result->step_ms / 1e3);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    step_ms_ = step_ms_ == 0
                   ? result->step_ms
                   : (1 - kStepMsSmoothing) * step_ms_ + kStepMsSmoothing * result->step_ms;
  }
  const std::vector<Request*> requests = step->requests();
  step->Collected(*result);
  // Also of a request that is ending: what is computed is worth keeping.
  for (Request* request : requests) {
    engine::IndexFullBlocks(request->seq, request->num_ready(), runtime_->block_size(),
                            *runtime_->hasher, *runtime_->pool);
  }
  step->KeepSnapshots();
  for (Request* request : requests) OnCollected(*request);
}

void PrefillScheduler::OnCollected(Request& request) {
  if (request.all_sampled() && request.computed_time == absl::InfiniteFuture()) {
    request.computed_time = steady_time::Now();
    metrics_->CountPromptTokens(request.num_tokens() - request.cached_tokens, request.cached_tokens,
                                0);
    metrics_->CountGeneratedTokens(request.num_branches);
  }
  if (request.verdict.has_value()) return MaybeFinish(request);
  for (const FirstToken& token : request.first_tokens) {
    if (token.sample.token_id != kernels::kNoToken) continue;
    // Of this request alone: the engine is well.
    return End(request,
               status::WithReason(engine::NoTokenError(request.num_tokens()), status::kBadLogits));
  }
  MaybeStartSend(request);
  if (request.send == nullptr) return;
  if (request.all_sampled()) {
    request.send->Complete(request.first_tokens);
  } else {
    request.send->SetReady(request.num_ready() / runtime_->block_size());
  }
}

void PrefillScheduler::MaybeStartSend(Request& request) {
  if (request.send_started) return;
  const int32_t remaining =
      request.all_sampled() ? 0 : request.num_tokens() - request.num_collected;
  if (pacing_.MayReserve(remaining)) StartSend(request, request.id, request.destination);
}

void PrefillScheduler::OnEngineFailure(const absl::Status& status) {
  spdlog::error("engine failed cause={}", service::LogValue(std::string(status.message())));
  engine_failure_ =
      absl::InternalError(absl::StrCat("engine failed: ", std::string(status.message())));
  for (ChunkStep* step : in_flight_) {
    for (Request* request : step->requests()) request->steps_in_flight = 0;
  }
  in_flight_.clear();
  std::vector<Request*> all;
  for (const auto& [id, request] : requests_) all.push_back(request.get());
  for (Request* request : all) End(*request, engine_failure_);
  draining_ = true;
  if (on_engine_failure_) on_engine_failure_();
}

PrefillScheduler::CacheCounts PrefillScheduler::CountCache() {
  enum Use : uint8_t { kNone, kHeld, kQuarantined, kActive };
  const engine::BlockPool& pool = *runtime_->pool;
  block_use_.assign(pool.num_blocks(), kNone);
  CacheCounts counts;
  worker::BlockCounts& slots = counts.state_slots;
  for (const auto& [id, request] : requests_) {
    Use use = kActive;
    if (request->steps_in_flight == 0 && (request->all_sampled() || request->verdict)) {
      use = request->send != nullptr && request->send->draining() ? kQuarantined : kHeld;
    }
    if (request->seq.state_slot != engine::kNoSlot) {
      slots.held += use == kHeld;
      slots.quarantined += use == kQuarantined;
    }
    // A block of several requests counts for the busiest.
    for (const engine::BlockId block : request->seq.blocks) {
      block_use_[block] = std::max<uint8_t>(block_use_[block], use);
    }
  }
  worker::BlockCounts& blocks = counts.blocks;
  blocks.free = pool.num_free();
  blocks.cached = pool.num_cached();
  for (const uint8_t use : block_use_) {
    blocks.held += use == kHeld;
    blocks.quarantined += use == kQuarantined;
  }
  blocks.active = pool.num_held() - blocks.held - blocks.quarantined;
  if (const engine::StateSlots* const all = pool.state_slots(); all != nullptr) {
    slots.free = all->num_free();
    slots.cached = all->num_snapshots();
    slots.active = all->num_held() - slots.held - slots.quarantined;
  }
  return counts;
}
void PrefillScheduler::Publish() {
  events_->Append(runtime_->pool->TakeEvents());
  const CacheCounts cache = CountCache();
  int32_t leases = 0;
  int32_t held = 0;
  uint64_t waiting_tokens = 0;
  for (const auto& [id, request] : requests_) {
    const bool leased = request->held && request->send == nullptr && !request->verdict;
    leases += leased;
    // A prompt that is still being computed is work, whatever becomes of its blocks.
    held += leased && request->all_sampled() && request->steps_in_flight == 0;
    waiting_tokens += request->num_tokens() - request->num_collected;
  }
  const int32_t waiting = static_cast<int32_t>(waiting_.size());
  const int32_t running = static_cast<int32_t>(requests_.size()) - waiting - held;
  metrics_->SetBlocks(cache.blocks);
  if (const engine::StateSlots* const slots = runtime_->pool->state_slots(); slots != nullptr) {
    metrics_->SetStateSlots(cache.state_slots, *slots);
  }
  metrics_->SetRequests(running, waiting, waiting_tokens);
  metrics_->SetLeases(leases);
  const std::lock_guard<std::mutex> lock(mutex_);
  cache_ = cache;
  running_ = running;
  num_held_ = held;
  waiting_tokens_ = waiting_tokens;
}

}  // namespace prefill_worker
