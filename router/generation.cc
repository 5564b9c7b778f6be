#include "router/generation.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ferry/v1/inference.pb.h"
#include "ferry/v1/worker.pb.h"
#include "service/process.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router {
namespace {

// gRPC's clock of a deadline and ours may differ by this.
constexpr absl::Duration kDeadlineTolerance = absl::Milliseconds(10);

// Destroys `object` after the callback that is running now, which may be the object's own.
template <typename T>
void DestroySoon(EventLoop* loop, std::unique_ptr<T> object) {
  if (object != nullptr) loop->Post([object = std::move(object)] {});
}

}  // namespace

const char* Generation::PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kQueued:
      return "queued";
    case Phase::kDispatched:
      return "dispatched";
    case Phase::kPrefilling:
      return "prefilling";
    case Phase::kDecoding:
      return "decoding";
    case Phase::kFinishing:
      return "finishing";
    case Phase::kEnded:
      return "ended";
  }
  return "unknown";
}

Generation::Generation(const GenerationContext& context, PreparedRequest request,
                       int64_t arrival_number, std::shared_ptr<ClientStream> client,
                       std::function<void(Generation*)> on_ended)
    : context_(context),
      prepared_(std::move(request)),
      client_(std::move(client)),
      on_ended_(std::move(on_ended)) {
  Waiting::request = &prepared_;
  const uint32_t n = prepared_.spec->sampling().n();
  entry.model = prepared_.model->name;
  entry.tenant = prepared_.tenant;
  entry.priority = prepared_.priority;
  entry.arrival = arrival_number;
  entry.since = prepared_.arrival;
  entry.tokens = ExpectedTokens(prepared_.view());
  entry.bytes = prepared_.bytes;
  entry.call = prepared_.call;
  for (uint32_t branch = 0; branch < n; ++branch) {
    branches_.push_back({.text = TextStream(prepared_.model->tokenizer.get(),
                                            {.stops = prepared_.stops,
                                             .include_stop = prepared_.include_stop,
                                             .min_tokens = static_cast<int32_t>(
                                                 prepared_.spec->sampling().min_tokens()),
                                             .stop_ids = prepared_.stop_ids,
                                             .shown_special_ids = prepared_.shown_special_ids})});
  }
  open_branches_ = static_cast<int32_t>(n);
}

Generation::~Generation() {
  if (phase_ != Phase::kEnded) End(absl::UnavailableError("the router is going away"));
}

void Generation::Start() {
  queued_at_ = EventLoop::Now();
  const absl::Duration budget = prepared_.deadline - queued_at_;
  if (budget <= absl::ZeroDuration()) {
    End(absl::DeadlineExceededError("the deadline had passed when the request came"));
    return;
  }
  deadline_timer_ = context_.loop->After(budget, [this] {
    deadline_timer_ = 0;
    const std::string message = absl::StrCat(
        "deadline passed after ",
        absl::FormatDuration(absl::Trunc(Since(prepared_.arrival), absl::Milliseconds(1))), ", ",
        PhaseName(phase_), ", ", output_tokens_, " tokens generated");
    const std::string failure =
        last_failure_.empty() ? "" : absl::StrCat("; the last failure: ", last_failure_);
    End(status::WithPublicMessage(absl::DeadlineExceededError(message + failure), message));
  });
  if (absl::Status status = context_.dispatcher->Enter(this); !status.ok()) {
    context_.metrics->CountRejected(absl::AsciiStrToLower(status::Reason(status)));
    End(status);
    return;
  }
  const absl::Duration max_ttft = context_.dispatcher->MaxTtft(*this);
  if (max_ttft == absl::InfiniteDuration()) return;
  ttft_timer_ = context_.loop->After(prepared_.arrival + max_ttft - queued_at_, [this] {
    ttft_timer_ = 0;
    OnUnplaceable(context_.dispatcher->TooLate(*this));
  });
}

void Generation::OnClientGone() {
  if (phase_ == Phase::kEnded) return;
  // gRPC cancels a call at its deadline as well: that is not the client's doing.
  if (EventLoop::Now() + kDeadlineTolerance >= prepared_.deadline) {
    End(absl::DeadlineExceededError(absl::StrCat("deadline passed, ", PhaseName(phase_))));
    return;
  }
  context_.metrics->CountCancelled(PhaseName(phase_));
  End(absl::CancelledError(absl::StrCat("the client has gone, ", PhaseName(phase_))));
}

bool Generation::Needs(WorkerSlot slot) const {
  if (held_at == slot) return true;
  if (phase_ == Phase::kQueued || phase_ == Phase::kEnded) return false;
  return placement_.decode == slot || placement_.prefill == slot;
}

void Generation::OnUnplaceable(const absl::Status& status) {
  if (held_at >= 0) {
    // No decode worker for the blocks where they are; computed elsewhere there may be one.
    held_at = -1;
    ClosePrefill("no decode worker takes the held blocks");
    context_.dispatcher->Return(this);
    return;
  }
  const std::string reason = status::Reason(status);
  context_.metrics->CountRejected(reason.empty() ? "no_worker" : absl::AsciiStrToLower(reason));
  End(status);
}

void Generation::FillSpec(ferry::v1::RequestSpec* spec) const {
  *spec = *prepared_.spec;
  spec->mutable_key()->set_attempt(attempt_);
  spec->set_deadline_ms(
      std::max<int64_t>(1, absl::ToInt64Milliseconds(prepared_.deadline - EventLoop::Now())));
  const int32_t max_model_len = context_.registry->link(placement_.decode).facts().max_model_len;
  if (!prepared_.max_tokens_stated && max_model_len > 0) {
    // "What fits the context" is the context of the worker that decodes.
    const uint32_t fits = max_model_len - prepared_.num_prompt_tokens();
    spec->mutable_sampling()->set_max_tokens(std::min(spec->sampling().max_tokens(), fits));
  }
}

void Generation::OnPlaced(const Placement& placement) {
  placement_ = placement;
  context_.loop->CancelTimer(std::exchange(ttft_timer_, 0));
  ++attempt_;
  decode_accepted_ = false;
  prefill_accepted_ = held_at >= 0;
  phase_ = Phase::kDispatched;
  placed_at_ = EventLoop::Now();
  queue_time_ += placed_at_ - queued_at_;
  context_.metrics->ObserveStage("queue", placed_at_ - queued_at_);
  const WorkerLink& decode = context_.registry->link(placement.decode);
  decode_epoch_ = decode.facts().epoch;
  decode_address_ = decode.address();
  ferry::v1::DecodeRequest request;
  FillSpec(request.mutable_spec());
  request.set_worker_epoch(decode_epoch_);
  request.set_local_prefill(placement.local());
  if (!placement.local()) {
    const WorkerLink& prefill = context_.registry->link(placement.prefill);
    if (held_at < 0) {
      prefill_epoch_ = prefill.facts().epoch;
      prefill_address_ = prefill.address();
    }
    request.mutable_prefill()->set_address(prefill_address_);
    request.mutable_prefill()->set_epoch(prefill_epoch_);
  }
  if (held_at < 0) {
    context_.metrics->CountDecision(placement.local() ? "local" : "remote",
                                    RouteReasonName(placement.reason));
  }
  decode_leg_ = std::make_unique<DecodeLeg>(decode.client(), Traceparent(),
                                            static_cast<DecodeLeg::Owner*>(this));
  decode_leg_->Open(request);
  ArmAcceptTimer(Leg::kDecode);
}

// A worker that is there accepts a new request at once, however long its queue is.
void Generation::ArmAcceptTimer(Leg leg) {
  context_.loop->CancelTimer(accept_timer_);
  accept_timer_ = context_.loop->After(context_.accept_limit, [this, leg] {
    accept_timer_ = 0;
    FailTry(leg, absl::UnavailableError(absl::StrCat(
                     "worker ", leg == Leg::kDecode ? decode_address_ : prefill_address_,
                     " did not accept the request within ",
                     absl::FormatDuration(context_.accept_limit))));
  });
}

void Generation::OnDecodeAccepted() {
  context_.loop->CancelTimer(std::exchange(accept_timer_, 0));
  decode_accepted_ = true;
  context_.metrics->ObserveStage("dispatch", Since(placed_at_));
  context_.ledger->Commit(placement_.decode_charge);
  if (placement_.local()) {
    context_.ledger->Commit(placement_.decode_cache_charge);
    phase_ = Phase::kPrefilling;
  } else if (held_at >= 0) {
    PushHeldBlocks();
  } else {
    OpenPrefill();
  }
}

void Generation::OpenPrefill() {
  const WorkerLink& link = context_.registry->link(placement_.prefill);
  if (link.facts().epoch != prefill_epoch_) {
    FailTry(Leg::kPrefill,
            absl::UnavailableError(absl::StrCat("worker ", prefill_address_, " has restarted")));
    return;
  }
  phase_ = Phase::kPrefilling;
  ferry::v1::PrefillRequest request;
  FillSpec(request.mutable_spec());
  request.set_worker_epoch(prefill_epoch_);
  request.mutable_decode()->set_address(decode_address_);
  request.mutable_decode()->set_epoch(decode_epoch_);
  prefill_leg_ = std::make_unique<PrefillLeg>(link.client(), Traceparent(), context_.loop,
                                              static_cast<PrefillLeg::Owner*>(this));
  prefill_leg_->Open(request);
  ArmAcceptTimer(Leg::kPrefill);
}

void Generation::PushHeldBlocks() {
  phase_ = Phase::kPrefilling;
  ferry::v1::PushHeldRequest request;
  request.set_request_id(prepared_.spec->key().request_id());
  request.set_attempt_held(attempt_held_);
  request.set_attempt(attempt_);
  request.mutable_decode()->set_address(decode_address_);
  request.mutable_decode()->set_epoch(decode_epoch_);
  request.set_worker_epoch(prefill_epoch_);
  prefill_leg_->PushHeld(request, prepared_.deadline - EventLoop::Now());
}

void Generation::OnPrefillAccepted() {
  context_.loop->CancelTimer(std::exchange(accept_timer_, 0));
  prefill_accepted_ = true;
  context_.ledger->Commit(placement_.prefill_charge);
}

void Generation::OnPrefillStarted() {
  prefill_started_at_ = EventLoop::Now();
  // Now the decode worker reserves: its reports will show the blocks.
  context_.ledger->Commit(placement_.decode_cache_charge);
}

void Generation::OnPrefillHeld(const std::string& cause) {
  if (phase_ != Phase::kPrefilling || held_at >= 0) return;
  spdlog::debug("request_id={} trace_id={} held_at={} cause={}", prepared_.request_id,
                prepared_.trace.trace_id, prefill_address_, service::LogValue(cause));
  context_.metrics->CountRetry("held");
  held_at = placement_.prefill;
  attempt_held_ = attempt_;
  // Its own decode worker had no room; another one, or this one a little later.
  Avoid(Leg::kDecode,
        DecideRetry(absl::ResourceExhaustedError(""), true, context_.max_attempts, &failures_)
            .same_worker_back_off);
  context_.dispatcher->Release(std::exchange(placement_.prefill_charge, 0));
  CloseDecode("blocks are held: going to another decode worker");
  phase_ = Phase::kQueued;
  queued_at_ = EventLoop::Now();
  context_.dispatcher->Return(this);
}

void Generation::OnPrefillDone(const ferry::v1::PrefillDone& done) {
  prefill_done_ = std::make_unique<ferry::v1::PrefillDone>(done);
  prefill_done_at_ = EventLoop::Now();
  context_.loop->CancelTimer(std::exchange(accept_timer_, 0));
  context_.dispatcher->Release(std::exchange(placement_.prefill_charge, 0));
  context_.ledger->Commit(placement_.decode_cache_charge);
  context_.breakers->Completed(PrefillSlot(), prefill_epoch_, entry.arrival);
  context_.metrics->ObserveStage("prefill", Since(placed_at_));
  context_.registry->OnPrefilled(PrefillSlot(), prefill_epoch_, done.computed_tokens(),
                                 done.cached_tokens(), absl::Milliseconds(done.prefill_ms()),
                                 prefill_done_at_);
  FinishIfSettled();
}

void Generation::CloseDecode(const std::string& reason) {
  if (decode_leg_ != nullptr) decode_leg_->Close(reason);
  DestroySoon(context_.loop, std::move(decode_leg_));
  context_.breakers->Left(placement_.decode, decode_epoch_, entry.arrival);
  context_.dispatcher->Release(std::exchange(placement_.decode_charge, 0));
  context_.dispatcher->Release(std::exchange(placement_.decode_cache_charge, 0));
}

void Generation::ClosePrefill(const std::string& reason) {
  if (prefill_leg_ != nullptr) prefill_leg_->Close(reason);
  DestroySoon(context_.loop, std::move(prefill_leg_));
  context_.breakers->Left(PrefillSlot(), prefill_epoch_, entry.arrival);
  context_.dispatcher->Release(std::exchange(placement_.prefill_charge, 0));
}

void Generation::End(const absl::Status& status) {
  if (phase_ == Phase::kEnded) return;
  LogEnd(status);
  if (context_.spans != nullptr && prepared_.trace.sampled) ExportSpans(status);
  phase_ = Phase::kEnded;
  for (EventLoop::TimerId* timer :
       {&deadline_timer_, &ttft_timer_, &accept_timer_, &idle_timer_, &finish_timer_}) {
    context_.loop->CancelTimer(std::exchange(*timer, 0));
  }
  context_.dispatcher->Ended(this);
  const std::string reason = status.ok() ? "done" : status::CodeName(status.code());
  CloseDecode(reason);
  ClosePrefill(reason);
  client_->Finish(status);

  const absl::Time now = EventLoop::Now();
  RouterMetrics::Ended ended = {.model = prepared_.model->name,
                                .route = attempt_ == 0        ? "none"
                                         : placement_.local() ? "local"
                                                              : "remote",
                                .outcome = status::CodeName(status.code()),
                                .prompt_tokens = prepared_.num_prompt_tokens(),
                                .completion_tokens = output_tokens_,
                                .total = now - prepared_.arrival};
  if (prefill_done_ != nullptr) {
    ended.cached_tokens = prefill_done_->cached_tokens();
  } else if (placement_.local() && decode_done_ != nullptr) {
    ended.cached_tokens = decode_done_->cached_tokens();
  }
  if (first_token_at_ != absl::InfinitePast()) {
    ended.ttft = first_token_at_ - prepared_.arrival;
    if (further_tokens_ > 0) {
      ended.tpot = DecodeTime() * static_cast<int64_t>(branches_.size()) / further_tokens_;
    }
    context_.metrics->ObserveStage("decode", DecodeTime());
  }
  context_.metrics->RequestEnded(ended);
  on_ended_(this);
}

}  // namespace router
