#include "decode_worker/decode_scheduler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "service/process.h"
#include "spdlog/spdlog.h"
#include "status/check.h"
#include "status/grpc_status.h"
#include "tracing/trace_context.h"

namespace decode_worker {
namespace {

double MillisBetween(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

}  // namespace

DecodeScheduler::DecodeScheduler(const DecodeOptions& options, worker::WorkerRuntime* runtime,
                                 kv_transfer::IncomingTransfers* incoming,
                                 worker::KvEventLog* events, worker::WorkerMetrics* metrics,
                                 std::function<void(AbortNotice)> notify_sender)
    : options_(options),
      runtime_(runtime),
      events_(events),
      metrics_(metrics),
      notify_sender_(std::move(notify_sender)),
      inbox_(static_cast<size_t>(options.worker.max_waiting)),
      admission_({.block_size = runtime->block_size(),
                  .max_seqs = runtime->engine->limits().max_seqs,
                  .num_penalty_slots = runtime->engine->num_penalty_slots(),
                  .growth_tokens = options.growth_tokens},
                 runtime->pool.get(), runtime->hasher.get()),
      runner_(runtime->engine.get(), runtime->pool.get(), runtime->hasher.get(), runtime->snapshots,
              options.chunk_tokens, this),
      receiver_(
          runtime, incoming,
          {.stall_timeout = options.worker.chunk_stall,
           .abandon_grace = std::min(options.worker.chunk_stall, options.worker.quarantine_max)},
          [this](std::function<void()> task) { inbox_.Post(std::move(task)); },
          [this](KvReceiver::End end) { OnTransferEnd(std::move(end)); }) {
  Publish();
}

DecodeScheduler::~DecodeScheduler() { Stop(); }

void DecodeScheduler::Start() {
  thread_ = std::thread([this] { Run(); });
}

void DecodeScheduler::StartDrain() { draining_ = true; }

void DecodeScheduler::EndAll(absl::Status status) {
  draining_ = true;
  inbox_.Post([this, status] { EndRequests(status); });
}

void DecodeScheduler::Stop() {
  if (!thread_.joinable()) return;
  EndAll(absl::UnavailableError("the worker stops"));
  inbox_.Post([this] { stopping_ = true; });
  thread_.join();
  inbox_.Close();
  inbox_.RunAll();  // answers what came meanwhile: no request is taken any more
  receiver_.AnswerWaiters();
}

absl::StatusOr<uint64_t> DecodeScheduler::Submit(RequestSpec spec,
                                                 std::shared_ptr<TokenSink> sink) {
  if (draining_) {
    return status::WithReason(absl::UnavailableError("the worker is draining"), status::kDraining);
  }
  const uint64_t serial = next_serial_++;
  const worker::RequestId id = spec.id;
  {
    std::lock_guard lock(shared_mutex_);
    ++live_[id];
  }
  auto shared = std::make_shared<RequestSpec>(std::move(spec));
  const bool posted = inbox_.TryPost(
      [this, shared, serial, sink = std::move(sink)] { Accept(std::move(*shared), serial, sink); });
  if (!posted) {
    ForgetLive(id);
    return status::WithReason(absl::ResourceExhaustedError("too many requests arrive at once"),
                              status::kQueueFull);
  }
  return serial;
}

void DecodeScheduler::CancelSubmission(uint64_t submission, absl::Status cause) {
  inbox_.Post([this, submission, cause] {
    const auto it = requests_.find(submission);
    if (it != requests_.end()) EndRequest(*it->second, cause);
  });
}

bool DecodeScheduler::Cancel(const worker::RequestId& id, const std::string& reason) {
  {
    std::lock_guard lock(shared_mutex_);
    if (!live_.contains(id)) return false;
  }
  inbox_.Post([this, id, reason] {
    const auto it = by_id_.find(id.request_id);
    if (it == by_id_.end() || it->second->spec.id != id) return;
    EndRequest(*it->second, absl::CancelledError(reason.empty() ? "cancelled" : reason));
  });
  return true;
}

void DecodeScheduler::Run() {
  while (true) {
    inbox_.RunAll();
    if (stopping_) break;
    EndOverdue(Clock::now());
    bool worked = false;
    if (health().ok()) {
      AdmitQueued();
      const absl::StatusOr<bool> step = runner_.Step();
      if (step.ok()) {
        worked = *step;
      } else {
        OnEngineFailure(step.status());
      }
    }
    Publish();
    if (!worked) inbox_.WaitUntil(NextDeadline());
  }
  EndRequests(absl::UnavailableError("the worker stops"));
  while (health().ok()) {  // collect what is in flight
    const absl::StatusOr<bool> step = runner_.Step();
    if (!step.ok() || !*step) break;
  }
  Publish();
}

void DecodeScheduler::OnEngineFailure(const absl::Status& status) {
  const std::string cause(status.message());
  spdlog::error("engine failed cause={}", service::LogValue(cause));
  {
    std::lock_guard lock(shared_mutex_);
    health_ = status;
  }
  draining_ = true;
  EndRequests(absl::InternalError(absl::StrCat("engine: ", cause)));
}

absl::Status DecodeScheduler::CheckAccept(const RequestSpec& spec) {
  const auto known = by_id_.find(spec.id.request_id);
  if (known != by_id_.end()) {
    const uint32_t other = known->second->spec.id.attempt;
    if (other == spec.id.attempt) {
      return absl::AlreadyExistsError(absl::StrCat("request ", spec.id.request_id, " attempt ",
                                                   spec.id.attempt, " is already here"));
    }
    if (other > spec.id.attempt) {
      return status::WithReason(absl::FailedPreconditionError(absl::StrCat(
                                    "attempt ", spec.id.attempt, " is older than attempt ", other,
                                    " of request ", spec.id.request_id)),
                                status::kStaleAttempt);
    }
    EndRequest(
        *known->second,
        status::WithReason(absl::FailedPreconditionError(absl::StrCat(
                               "attempt ", other, " is replaced by attempt ", spec.id.attempt)),
                           status::kStaleAttempt));
  } else if (const auto ended = ended_.newest(spec.id.request_id); ended >= spec.id.attempt) {
    metrics_->CountLateEvent("late_decode");
    const std::string message =
        absl::StrCat("attempt ", *ended, " of request ", spec.id.request_id, " has ended here");
    if (ended == spec.id.attempt) return absl::AlreadyExistsError(message);
    return status::WithReason(absl::FailedPreconditionError(message), status::kStaleAttempt);
  }
  if (draining_) {
    return status::WithReason(absl::UnavailableError("the worker is draining"), status::kDraining);
  }
  int32_t waiting = 0;
  for (const auto& [serial, request] : requests_) waiting += request->phase != Phase::kRunning;
  if (waiting >= options_.worker.max_waiting) {
    return status::WithReason(
        absl::ResourceExhaustedError(absl::StrCat(waiting, " requests are waiting, the limit is ",
                                                  options_.worker.max_waiting)),
        status::kQueueFull);
  }
  return absl::OkStatus();
}

void DecodeScheduler::Accept(RequestSpec spec, uint64_t serial, std::shared_ptr<TokenSink> sink) {
  if (const absl::Status status = CheckAccept(spec); !status.ok()) {
    ForgetLive(spec.id);
    sink->OnEnd(status, {});
    return;
  }
  auto owned = std::make_unique<Request>();
  Request& request = *owned;
  request.spec = std::move(spec);
  request.serial = serial;
  request.sink = std::move(sink);
  request.accepted_at = Clock::now();
  request.num_unfinished = request.spec.num_branches;
  const block_hash::BlockHash root = runtime_->hasher->Root(request.spec.cache_namespace);
  for (int32_t i = 0; i < request.spec.num_branches; ++i) {
    auto branch = std::make_unique<Branch>();
    branch->priority = request.spec.priority;
    branch->serial = serial;
    branch->index = i;
    branch->seq.sampling = request.spec.sampling;
    branch->seq.sampling.branch = static_cast<uint32_t>(i);
    branch->seq.tokens = request.spec.tokens;
    branch->seq.num_prompt_tokens = request.spec.num_prompt_tokens;
    branch->seq.root = root;
    if (i > 0) request.branches[0]->forks.push_back(branch.get());
    request.branches.push_back(std::move(branch));
  }
  by_id_[request.spec.id.request_id] = &request;
  requests_[serial] = std::move(owned);
  const int32_t position = static_cast<int32_t>(queue_.size());
  if (request.spec.local_prefill) {
    request.phase = Phase::kQueued;
    Enqueue(*request.branches[0]);
  }
  request.sink->OnAccepted(position);
}

void DecodeScheduler::AdmitQueued() {
  while (!queue_.empty()) {
    Branch& branch = *queue_.begin()->second;
    Request& request = *requests_.at(branch.serial);
    const bool receives = request.phase == Phase::kReserving;
    std::optional<std::vector<engine::BlockId>> fresh = admission_.TryAdmit(
        branch, receives ? engine::Continuation::kReceived : engine::Continuation::kComputed);
    if (!fresh.has_value()) return;
    queue_.erase(queue_.begin());
    if (receives) {
      GrantReservation(request, branch, std::move(*fresh));
    } else {
      StartLocal(request, branch, std::move(*fresh));
    }
  }
}

void DecodeScheduler::StartLocal(Request& request, Branch& branch,
                                 std::vector<engine::BlockId> fresh) {
  engine::Sequence& seq = branch.seq;
  seq.blocks.insert(seq.blocks.end(), fresh.begin(), fresh.end());
  if (request.phase == Phase::kQueued) {  // not a preempted branch that comes back
    request.phase = Phase::kRunning;
    request.usage.cached_tokens = seq.num_computed;
    request.usage.computed_tokens = static_cast<int32_t>(seq.tokens.size()) - seq.num_computed;
    request.usage.wait_ms = MillisBetween(request.accepted_at, Clock::now());
    metrics_->CountPromptTokens(request.usage.computed_tokens, request.usage.cached_tokens, 0);
  }
  runner_.Start(branch, BranchState::kPrefilling);
}

void DecodeScheduler::OnSample(Branch& branch, const kernels::SampleResult& sample) {
  Request& request = *requests_.at(branch.serial);
  const FinishReason finish = FinishOf(branch.seq);
  if (request.usage.output_tokens++ == 0) {
    request.first_token_at = Clock::now();
    request.usage.prefill_ms = branch.prefill_ms;  // the trunk's: its sample comes first
  }
  const bool taken = request.sink->OnToken({.branch = branch.index,
                                            .sample = sample,
                                            .num_logprobs = branch.seq.sampling.num_logprobs,
                                            .finish_reason = finish});
  if (!taken) {
    EndRequest(request, absl::ResourceExhaustedError("the reader of the stream is too slow"));
  } else if (finish != FinishReason::kNone) {
    FinishBranch(request, branch.index);
  }
}

void DecodeScheduler::OnNoToken(Branch& branch) {
  // Of this request alone: its prompt, or what was computed of it.  The engine is well.
  EndRequest(
      *requests_.at(branch.serial),
      status::WithReason(engine::NoTokenError(static_cast<int32_t>(branch.seq.tokens.size())),
                         status::kBadLogits));
}

void DecodeScheduler::OnPreempted(Branch& branch) {
  Request& request = *requests_.at(branch.serial);
  ++request.usage.preemptions;
  spdlog::debug("request_id={} trace_id={} branch={} preempted tokens={}",
                request.spec.id.request_id, tracing::TraceIdOf(request.spec.traceparent),
                branch.index, branch.seq.tokens.size());
  admission_.Leave(branch);
  for (Branch* fork : branch.forks) admission_.Leave(*fork);
  Enqueue(branch);
}

void DecodeScheduler::FinishBranch(Request& request, int32_t index) {
  std::unique_ptr<Branch> branch = std::move(request.branches[index]);
  admission_.Leave(*branch);
  runner_.Retire(std::move(branch));
  if (--request.num_unfinished == 0) EndRequest(request, absl::OkStatus());
}

void DecodeScheduler::EndOverdue(Clock::time_point now) {
  std::vector<Request*> overdue;
  for (const auto& [serial, request] : requests_) {
    if (request->spec.deadline <= now) overdue.push_back(request.get());
  }
  for (Request* request : overdue) {
    EndRequest(*request, absl::DeadlineExceededError(absl::StrCat(
                             "request ", request->spec.id.request_id, ": its time is over")));
  }
  for (const auto& [serial, request] : requests_) {
    if (request->phase != Phase::kReserving || request->reserve_until > now) continue;
    const auto done = std::exchange(request->reserve_done, nullptr);
    ReturnToWaitReserve(*request);
    done(absl::ResourceExhaustedError(absl::StrCat(
        "no room for ",
        engine::BlocksFor(static_cast<int64_t>(request->spec.tokens.size()),
                          runtime_->block_size()),
        " blocks in time: ", runtime_->pool->num_available(), " available, ",
        runtime_->pool->state_slots() == nullptr
            ? ""
            : absl::StrCat(runtime_->pool->state_slots()->num_available(), " state slots, "),
        admission_.num_seated(), " sequences running or expected")));
  }
}

Clock::time_point DecodeScheduler::NextDeadline() const {
  Clock::time_point next = Clock::time_point::max();
  for (const auto& [serial, request] : requests_) {
    next = std::min(next, request->spec.deadline);
    if (request->phase == Phase::kReserving) next = std::min(next, request->reserve_until);
  }
  return next;
}

void DecodeScheduler::EndRequests(const absl::Status& status) {
  while (!requests_.empty()) EndRequest(*requests_.begin()->second, status);
}

void DecodeScheduler::EndRequest(Request& request, const absl::Status& status) {
  const auto it = requests_.find(request.serial);
  const std::unique_ptr<Request> owned = std::move(it->second);
  requests_.erase(it);
  by_id_.erase(request.spec.id.request_id);
  ended_.Add(request.spec.id.request_id, request.spec.id.attempt);
  const std::string why(status.message());
  if (request.reserve_done != nullptr) {
    request.reserve_done(absl::AbortedError(absl::StrCat("the request has ended: ", why)));
  }
  if (request.phase == Phase::kReceiving) {
    receiver_.Abandon(request.transfer_id,
                      absl::AbortedError(absl::StrCat("the request has ended: ", why)));
    notify_sender_({.request = request.spec.id,
                    .traceparent = request.spec.traceparent,
                    .transfer_id = request.transfer_id,
                    .sender = request.sender,
                    .cause = why});
  }
  if (request.confirm_done != nullptr) {
    request.confirm_done(absl::AbortedError(absl::StrCat("the request has ended: ", why)));
  }
  for (std::unique_ptr<Branch>& branch : request.branches) {
    if (branch == nullptr) continue;
    queue_.erase({branch->serial, branch->index});
    admission_.Leave(*branch);
    runner_.Retire(std::move(branch));
  }
  const Clock::time_point now = Clock::now();
  const double total_ms = MillisBetween(request.accepted_at, now);
  const double ttft_ms = request.usage.output_tokens == 0
                             ? 0
                             : MillisBetween(request.accepted_at, request.first_token_at);
  metrics_->CountRequest(status);
  metrics_->CountGeneratedTokens(static_cast<int32_t>(request.usage.output_tokens));
  spdlog::info(
      "request_id={} trace_id={} attempt={} status={} prompt_tokens={} output_tokens={} "
      "cached_tokens={} "
      "computed_tokens={} kv_bytes={} preemptions={} wait_ms={:.1f} ttft_ms={:.1f} "
      "total_ms={:.1f}{}",
      service::LogValue(request.spec.id.request_id), tracing::TraceIdOf(request.spec.traceparent),
      request.spec.id.attempt, status::CodeName(status.code()), request.spec.tokens.size(),
      request.usage.output_tokens, request.usage.cached_tokens, request.usage.computed_tokens,
      request.usage.kv_bytes_received, request.usage.preemptions, request.usage.wait_ms, ttft_ms,
      total_ms, status.ok() ? "" : absl::StrCat(" cause=", service::LogValue(why)));
  ForgetLive(request.spec.id);
  Publish();
  request.sink->OnEnd(status, request.usage);
}

void DecodeScheduler::ForgetLive(const worker::RequestId& id) {
  std::lock_guard lock(shared_mutex_);
  const auto it = live_.find(id);
  if (--it->second == 0) live_.erase(it);
}

}  // namespace decode_worker
