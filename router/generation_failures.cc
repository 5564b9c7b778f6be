// The failures of a Generation: a try is repeated on other workers, an output that has begun goes
// on there, or the request ends with its status.

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "ferry/v1/worker.pb.h"
#include "router/generation.h"
#include "service/process.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router {

void Generation::OnWorkerLost(WorkerSlot slot, const std::string& epoch,
                              const absl::Status& cause) {
  if (decode_leg_ != nullptr && placement_.decode == slot && decode_epoch_ == epoch) {
    FailTry(Leg::kDecode, cause);
  }
  if (prefill_leg_ != nullptr && PrefillSlot() == slot && prefill_epoch_ == epoch) {
    FailTry(Leg::kPrefill, cause);
  }
}

void Generation::OnPrefillFailed(const absl::Status& status) { FailTry(Leg::kPrefill, status); }
void Generation::OnDecodeFailed(const absl::Status& status) { FailTry(Leg::kDecode, status); }

void Generation::OnPushHeldFailed(const absl::Status& status) {
  // Gone from P: start again.  Still there: only the decode worker was the wrong one.
  FailTry(absl::IsNotFound(status) ? Leg::kPrefill : Leg::kDecode, status);
}

void Generation::Avoid(Leg leg, absl::Duration back_off) {
  const absl::Time until = EventLoop::Now() + back_off;
  if (leg == Leg::kDecode) {
    avoid[std::pair(placement_.decode, decode_epoch_)] = until;
  } else if (placement_.prefill >= 0) {
    avoid[std::pair(placement_.prefill, prefill_epoch_)] = until;
  }
}

void Generation::Blame(Leg leg) {
  const WorkerSlot slot = leg == Leg::kDecode ? placement_.decode : PrefillSlot();
  const std::string& epoch = leg == Leg::kDecode ? decode_epoch_ : prefill_epoch_;
  const std::string& address = leg == Leg::kDecode ? decode_address_ : prefill_address_;
  if (!context_.breakers->Failed(slot, epoch, entry.arrival, placed_at_, EventLoop::Now())) return;
  spdlog::warn("worker={} breaker=open", address);
  context_.metrics->CountBreakerOpened(address);
}

void Generation::FailTry(Leg leg, const absl::Status& error) {
  if (phase_ == Phase::kEnded) return;
  if (phase_ == Phase::kFinishing) {
    // The answer is complete; only numbers of the summary are missing.
    if (leg == Leg::kDecode) CloseDecode("failed");
    if (leg == Leg::kPrefill) ClosePrefill("failed");
    FinishIfSettled();
    return;
  }
  // Neither side can tell whose fault a broken transfer or a missing peer is.
  const bool may_be_the_other = absl::IsAborted(error) || absl::IsNotFound(error) ||
                                (leg == Leg::kPrefill && absl::IsUnavailable(error));
  const Leg other = leg == Leg::kDecode ? Leg::kPrefill : Leg::kDecode;
  if (BlamesWorker(error)) {
    Blame(leg);
    if (absl::IsAborted(error)) Blame(other);
  }
  const bool is_decoding = phase_ == Phase::kDecoding;
  if (is_decoding && leg == Leg::kPrefill) {
    // The decode worker has all it needs.
    ClosePrefill("failed");
    return;
  }
  // Two workers that do not fit are not tried again, so this costs no try.
  const bool misfit =
      status::Reason(error) == status::kIncompatible && !placement_.local() &&
      context_.registry->MarkMisfit(placement_.prefill, prefill_epoch_, placement_.decode,
                                    decode_epoch_, std::string(error.message()));
  const bool accepted = leg == Leg::kDecode ? decode_accepted_ : prefill_accepted_;
  RetryVerdict verdict = misfit ? RetryVerdict{.retry = true}
                                : DecideRetry(error, accepted, context_.max_attempts, &failures_);
  if (is_decoding && !MayMigrate(error)) verdict.retry = false;
  spdlog::warn(
      "request_id={} trace_id={} attempt={} failed_at={} worker={} phase={} retry={} status={} "
      "cause={}",
      prepared_.request_id, prepared_.trace.trace_id, attempt_,
      leg == Leg::kDecode ? "decode" : "prefill",
      leg == Leg::kDecode ? decode_address_ : prefill_address_, PhaseName(phase_), verdict.retry,
      status::CodeName(error.code()), service::LogValue(std::string(error.message())));
  if (!verdict.retry) {
    EndFailed(error);
    return;
  }
  last_failure_ = std::string(error.message());
  context_.metrics->CountRetry(status::CodeName(error.code()));
  context_.loop->CancelTimer(std::exchange(accept_timer_, 0));
  if (!misfit) {
    Avoid(leg, verdict.same_worker_back_off);
    if (may_be_the_other) Avoid(other, verdict.same_worker_back_off);
  }
  prefill_done_.reset();
  decode_done_.reset();
  if (is_decoding) Migrate();
  const bool still_held =
      !is_decoding && held_at >= 0 && leg == Leg::kDecode && prefill_leg_ != nullptr;
  if (still_held) {
    prefill_leg_->DropPush();
  } else {
    held_at = -1;
    ClosePrefill("this try has failed");
  }
  const bool was_queued = phase_ == Phase::kQueued;  // the lease was lost while it waited
  CloseDecode("this try has failed");
  phase_ = Phase::kQueued;
  if (was_queued) context_.dispatcher->Leave(this);
  queued_at_ = EventLoop::Now();
  context_.dispatcher->Return(this);
}

bool Generation::MayMigrate(const absl::Status& error) const {
  // A reader that is too slow for its worker is too slow for the next one.
  return migrations_ < context_.max_migrations && !absl::IsResourceExhausted(error);
}

void Generation::Migrate() {
  ++migrations_;
  context_.metrics->CountMigration();
  context_.loop->CancelTimer(std::exchange(idle_timer_, 0));
  paused_ = false;  // that was the old stream
  for (Branch& branch : branches_) {
    branch.ended_by_worker = false;
    branch.position = 0;
  }
  if (branches_.size() > 1) return;  // they share one prompt: each is drawn again from its start
  Branch& only = branches_.front();
  for (size_t i = prepared_.tokens.size() - prepared_.num_prompt_tokens(); i < only.tokens.size();
       ++i) {
    prepared_.tokens.push_back(static_cast<int32_t>(only.tokens[i]));
    prepared_.spec->add_token_ids(only.tokens[i]);
  }
  only.position = only.tokens.size();
}

void Generation::EndFailed(const absl::Status& error) {
  absl::Status status = FinalStatus(error, static_cast<int32_t>(attempt_));
  if (migrations_ > 0 && absl::IsInvalidArgument(status)) {
    // What the next worker has against prompt and output is not the client's mistake.
    status = status::WithPublicMessage(
        absl::UnavailableError(
            absl::StrCat("the output could not go on elsewhere: ", std::string(error.message()),
                         "; before that: ", last_failure_)),
        "the output could not go on at another worker");
  }
  End(status);
}

}  // namespace router
