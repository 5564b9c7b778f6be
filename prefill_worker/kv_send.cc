#include "prefill_worker/kv_send.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "status/grpc_status.h"
#include "steady_time/steady_time.h"

namespace prefill_worker {
namespace {

using ferry::v1::ReserveResponse;

// What a failed transfer means for the request: the router tries it again.  Refusals that name a
// reason (epoch, attempt, layout) and a peer that is gone are told as they are.
absl::Status AsTransferFailure(const char* what, const absl::Status& status) {
  const std::string message = absl::StrCat(what, ": ", std::string(status.message()));
  const std::string reason = status::Reason(status);
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kFailedPrecondition: {
      absl::Status kept(status.code(), message);
      return reason.empty() ? kept : status::WithReason(std::move(kept), reason);
    }
    default:
      return absl::AbortedError(message);
  }
}

}  // namespace

KvSendImpl::KvSendImpl(KvSendContext context, SendSpec spec, std::function<void(SendResult)> on_end)
    : context_(context), spec_(std::move(spec)), on_end_(std::move(on_end)) {}

void KvSendImpl::Start() {
  context_.links->Connect(spec_.destination,
                          [self = shared_from_this()](absl::StatusOr<std::shared_ptr<Stub>> stub) {
                            self->OnLinked(std::move(stub));
                          });
}

void KvSendImpl::OnLinked(absl::StatusOr<std::shared_ptr<Stub>> stub) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != State::kLinking) return;  // stopped meanwhile
    if (!stub.ok()) {
      // Already says what was tried and where.
      EndLocked(stub.status().code() == absl::StatusCode::kFailedPrecondition
                    ? stub.status()
                    : absl::UnavailableError(stub.status().message()),
                actions);
    } else {
      state_ = State::kReserving;
      stub_ = *std::move(stub);
      Reserve(actions);
    }
  }
  Run(actions);
}

void KvSendImpl::OnReserved(absl::StatusOr<ReserveResponse> response) {
  // Not under the lock: it waits for the transport's thread, which waits for the lock in
  // OnPeerLost.
  const std::string link =
      response.ok() ? context_.runtime->transport->LinkName(spec_.destination.epoch) : "";
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const absl::StatusCode code = response.status().code();
    // Without an answer the decode worker may have reserved all the same.
    const bool unsure = code == absl::StatusCode::kDeadlineExceeded ||
                        code == absl::StatusCode::kUnavailable ||
                        code == absl::StatusCode::kCancelled;
    if (state_ != State::kReserving) {  // stopped meanwhile
      if (response.ok()) ReleaseReservation(response->transfer_id(), actions);
      if (unsure) TellPeer("stopped while reserving", actions);
    } else if (response.ok()) {
      if (const absl::Status taken = TakeReservation(*response); taken.ok()) {
        result_.link = link;
        state_ = State::kSending;
        last_progress_ = last_sent_ = steady_time::Now();
        transfer_ = kv_transfer::StartOutgoingTransfer(context_.runtime->transport.get(),
                                                       spec_.destination.epoch, transfer_id_,
                                                       spec_.id.attempt);
        Pump(actions);
      } else {
        ReleaseReservation(response->transfer_id(), actions);
        EndLocked(taken, actions);
      }
    } else {
      if (unsure) TellPeer("no answer to the reservation", actions);
      result_.no_room = code == absl::StatusCode::kResourceExhausted ||
                        code == absl::StatusCode::kDeadlineExceeded;
      EndLocked(AsTransferFailure("reserving", response.status()), actions);
    }
  }
  Run(actions);
}

absl::Status KvSendImpl::TakeReservation(const ReserveResponse& response) {
  const int32_t block_size = context_.runtime->block_size();
  const int32_t num_blocks = static_cast<int32_t>(spec_.blocks.size());
  const int64_t cached_tokens = response.cached_tokens();
  const int64_t cached_blocks = cached_tokens / block_size;
  if (response.transfer_id().size() != transfer_id_.size() || cached_tokens % block_size != 0 ||
      cached_tokens > spec_.num_tokens || response.num_blocks() != num_blocks - cached_blocks ||
      response.state_slot() == spec_.state_slot.empty()) {
    return absl::AbortedError(
        absl::StrCat("reservation of ", response.num_blocks(), " blocks",
                     response.state_slot() ? " and a state slot" : "", " behind ", cached_tokens,
                     " cached tokens does not fit a prompt of ", spec_.num_tokens, " tokens in ",
                     num_blocks, " blocks", spec_.state_slot.empty() ? "" : " and a state slot"));
  }
  std::memcpy(transfer_id_.data(), response.transfer_id().data(), transfer_id_.size());
  reserved_ = true;
  cached_blocks_ = static_cast<int32_t>(cached_blocks);
  next_block_ = cached_blocks_;
  result_.cached_tokens = static_cast<int32_t>(cached_tokens);
  return absl::OkStatus();
}

void KvSendImpl::SetReady(int32_t num_blocks) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ready_blocks_ = std::max(ready_blocks_, num_blocks);
    if (state_ == State::kSending) Pump(actions);
  }
  Run(actions);
}

void KvSendImpl::Complete(std::vector<FirstToken> first_tokens) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ready_blocks_ = static_cast<int32_t>(spec_.blocks.size());
    first_tokens_ = std::move(first_tokens);
    complete_ = true;
    if (state_ == State::kSending) Pump(actions);
  }
  Run(actions);
}

void KvSendImpl::Pump(Actions& actions) {
  if (next_block_ < ready_blocks_ && transfer_->num_in_flight() == 0)
    last_progress_ = steady_time::Now();
  for (; next_block_ < ready_blocks_; ++next_block_) {
    last_sent_ = steady_time::Now();
    if (first_sent_ == absl::InfinitePast()) first_sent_ = last_sent_;
    transfer_->SendBlock(static_cast<uint32_t>(next_block_ - cached_blocks_),
                         spec_.blocks[next_block_]);
  }
  if (!complete_) return;
  if (!spec_.state_slot.empty()) {
    if (first_sent_ == absl::InfinitePast()) first_sent_ = steady_time::Now();
    if (transfer_->num_in_flight() == 0) last_progress_ = steady_time::Now();
    transfer_->SendStateSlot(spec_.state_slot);
  }
  state_ = State::kDraining;
  actions.push_back([self = shared_from_this(), transfer = transfer_] {
    transfer->Finish([self](kv_transfer::OutgoingResult result) { self->OnDrained(result); });
  });
}

void KvSendImpl::OnDrained(const kv_transfer::OutgoingResult& result) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != State::kDraining) return;  // the second of Finish and Stop
    for (auto& call : on_drained_for_peer_) {
      actions.push_back(
          [call = std::move(call), any = first_sent_ != absl::InfinitePast()] { call(any); });
    }
    on_drained_for_peer_.clear();
    result_.num_blocks = result.blocks;
    result_.num_bytes = result.bytes;
    if (!cause_.ok()) {
      EndLocked(cause_, actions);
    } else if (!result.status.ok()) {
      // The transport knows the link; a message that was refused is no news about it.
      if (result.status.code() == absl::StatusCode::kUnavailable) {
        context_.links->Drop(spec_.destination.epoch);
      }
      TellPeer("a send failed", actions);
      EndLocked(absl::AbortedError(
                    absl::StrCat("sending blocks: ", std::string(result.status.message()))),
                actions);
    } else {
      state_ = State::kConfirming;
      Confirm(result, actions);
    }
  }
  Run(actions);
}

void KvSendImpl::OnConfirmed(const absl::Status& status) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != State::kConfirming) return;  // stopped meanwhile
    if (first_sent_ != absl::InfinitePast()) result_.duration = steady_time::Now() - first_sent_;
    EndLocked(status.ok() ? status : AsTransferFailure("confirming the transfer", status), actions);
  }
  Run(actions);
}

void KvSendImpl::Stop(absl::Status cause) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    StopLocked(std::move(cause), /*tell_peer=*/true, actions);
  }
  Run(actions);
}

void KvSendImpl::StopForPeer(const std::string& cause, std::function<void(bool)> drained) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (transfer_ != nullptr && (state_ == State::kSending || state_ == State::kDraining)) {
      on_drained_for_peer_.push_back(std::move(drained));
    } else {
      actions.push_back([drained = std::move(drained), any = first_sent_ != absl::InfinitePast()] {
        drained(any);
      });
    }
    StopLocked(absl::AbortedError(absl::StrCat("the decode worker stopped the transfer: ", cause)),
               /*tell_peer=*/false, actions);
  }
  Run(actions);
}

void KvSendImpl::StopLocked(absl::Status cause, bool tell_peer, Actions& actions) {
  switch (state_) {
    case State::kEnded:
      return;
    case State::kLinking:
    case State::kReserving:  // OnReserved gives the reservation back
      return EndLocked(std::move(cause), actions);
    case State::kConfirming:  // nothing is in flight
      if (tell_peer) TellPeer(std::string(cause.message()), actions);
      return EndLocked(std::move(cause), actions);
    case State::kSending:
    case State::kDraining:
      if (!cause_.ok()) return;
      if (tell_peer) TellPeer(std::string(cause.message()), actions);
      cause_ = std::move(cause);
      state_ = State::kDraining;
      last_progress_ = steady_time::Now();
      actions.push_back([self = shared_from_this(), transfer = transfer_, cause = cause_] {
        transfer->Stop(cause,
                       [self](kv_transfer::OutgoingResult result) { self->OnDrained(result); });
      });
      return;
  }
}

void KvSendImpl::EndLocked(absl::Status status, Actions& actions) {
  state_ = State::kEnded;
  if (status.ok()) {
    result_.groups = context_.runtime->engine->cache_layout().BytesOf(
        result_.cached_tokens, spec_.num_tokens, !spec_.state_slot.empty());
    context_.metrics->ObserveTransfer(result_.duration, result_.num_bytes, result_.groups);
    context_.metrics->CountLinkBytes(result_.link, result_.num_bytes);
  } else if (!result_.no_room) {
    context_.metrics->CountTransferFailure(status);
  }
  result_.status = std::move(status);
  if (on_end_) {
    actions.push_back([on_end = std::move(on_end_), result = result_] { on_end(result); });
  }
  on_end_ = nullptr;
}

std::string KvSendImpl::TransferIdBytes() const {
  return std::string(transfer_id_.begin(), transfer_id_.end());
}

std::string KvSendImpl::transfer_id() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reserved_ ? TransferIdBytes() : "";
}

bool KvSendImpl::draining() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_ == State::kDraining && !cause_.ok();
}

bool KvSendImpl::ended() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_ == State::kEnded;
}

void KvSendImpl::Silence() {
  const std::lock_guard<std::mutex> lock(mutex_);
  on_end_ = nullptr;
}

void KvSendImpl::OnPeerLost(const kv_transfer::Epoch& peer, const absl::Status& cause) {
  if (peer != spec_.destination.epoch) return;
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    // While it links, reserves or confirms, the RPC will tell.
    if (state_ == State::kSending || state_ == State::kDraining) {
      StopLocked(
          absl::AbortedError(absl::StrCat("decode worker lost: ", std::string(cause.message()))),
          /*tell_peer=*/false, actions);
    }
  }
  Run(actions);
}

void KvSendImpl::Tick(absl::Time now) {
  Actions actions;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ != State::kSending && state_ != State::kDraining) return;
    const int32_t in_flight = transfer_->num_in_flight();
    const int32_t completed = next_block_ - cached_blocks_ - in_flight;
    if (completed != completed_sends_ || in_flight == 0) {
      completed_sends_ = completed;
      last_progress_ = now;
    }
    // The decode worker's patience is assumed to be our own.
    const absl::Duration patience = context_.runtime->options.chunk_stall;
    if (state_ == State::kSending && in_flight == 0 && now - last_sent_ > patience / 4) {
      last_sent_ = now;
      actions.push_back([transfer = transfer_] { transfer->SendHeartbeat(); });
    }
    const bool stalled = now - last_progress_ > patience;
    if (state_ == State::kSending && !transfer_->status().ok()) {
      StopLocked(absl::AbortedError(
                     absl::StrCat("sending blocks: ", std::string(transfer_->status().message()))),
                 /*tell_peer=*/true, actions);
    } else if (stalled && cause_.ok()) {
      StopLocked(absl::AbortedError(
                     absl::StrCat("no send has completed for ", absl::FormatDuration(patience))),
                 /*tell_peer=*/true, actions);
    } else if (stalled && !fenced_) {
      fenced_ = true;
      actions.push_back([self = shared_from_this()] {
        self->context_.links->Fence(self->spec_.destination.epoch,
                                    [self] { return self->draining(); });
      });
    }
  }
  Run(actions);
}

void KvSendImpl::Run(Actions& actions) {
  for (const auto& action : actions) action();
}

}  // namespace prefill_worker
