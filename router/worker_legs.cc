#include "router/worker_legs.h"

#include <algorithm>
#include <utility>

#include "ferry/v1/worker.pb.h"
#include "status/check.h"

namespace router {
namespace {

constexpr absl::Duration kRenewTimeout = absl::Seconds(2);
constexpr absl::Duration kMinRenewInterval = absl::Milliseconds(20);
// A lease is renewed when this part of it has passed (30 s: every 5 s).
constexpr int kRenewalsPerLease = 6;

}  // namespace

DecodeLeg::DecodeLeg(std::shared_ptr<WorkerClient> client, std::string traceparent, Owner* owner)
    : client_(std::move(client)), traceparent_(std::move(traceparent)), owner_(owner) {}

DecodeLeg::~DecodeLeg() { Close("request ended"); }

void DecodeLeg::Open(const ferry::v1::DecodeRequest& request) {
  key_ = std::make_unique<ferry::v1::RequestKey>(request.spec().key());
  stream_ = client_->Decode(
      request, traceparent_,
      {.on_message = [this](const ferry::v1::DecodeEvent& event) { OnEvent(event); },
       .on_end = [this](const absl::Status& status) { OnEnd(status); }});
}

void DecodeLeg::ReadNext() {
  if (stream_ != nullptr) stream_->ReadNext();
}

void DecodeLeg::OnEvent(const ferry::v1::DecodeEvent& event) {
  switch (event.event_case()) {
    case ferry::v1::DecodeEvent::kAccepted:
      stream_->ReadNext();
      owner_->OnDecodeAccepted();
      return;
    case ferry::v1::DecodeEvent::kTokens:
      owner_->OnDecodeTokens(event.tokens());
      return;
    case ferry::v1::DecodeEvent::kDone:
      done_ = true;
      stream_->ReadNext();
      owner_->OnDecodeDone(event.done());
      return;
    case ferry::v1::DecodeEvent::EVENT_NOT_SET:
      stream_->ReadNext();  // of a newer worker
      return;
  }
}

void DecodeLeg::OnEnd(const absl::Status& status) {
  if (closed_ || done_) return;
  done_ = true;  // nothing is left to cancel
  owner_->OnDecodeFailed(
      status.ok() ? absl::InternalError("the decode worker ended its stream without Done")
                  : status);
}

void DecodeLeg::Close(const std::string& reason) {
  if (std::exchange(closed_, true)) return;
  if (done_ && stream_ != nullptr) stream_->LetEnd();
  if (!done_ && key_ != nullptr) client_->Cancel(*key_, traceparent_, reason);
  stream_.reset();
}

PrefillLeg::PrefillLeg(std::shared_ptr<WorkerClient> client, std::string traceparent,
                       EventLoop* loop, Owner* owner)
    : client_(std::move(client)),
      traceparent_(std::move(traceparent)),
      loop_(loop),
      owner_(owner) {}

PrefillLeg::~PrefillLeg() { Close("request ended"); }

void PrefillLeg::Open(const ferry::v1::PrefillRequest& request) {
  key_ = std::make_unique<ferry::v1::RequestKey>(request.spec().key());
  worker_epoch_ = request.worker_epoch();
  stream_ = client_->Prefill(
      request, traceparent_,
      {.on_message = [this](const ferry::v1::PrefillEvent& event) { OnEvent(event); },
       .on_end = [this](const absl::Status& status) { OnEnd(status); }});
}

void PrefillLeg::OnEvent(const ferry::v1::PrefillEvent& event) {
  stream_->ReadNext();
  switch (event.event_case()) {
    case ferry::v1::PrefillEvent::kAccepted:
      owner_->OnPrefillAccepted();
      return;
    case ferry::v1::PrefillEvent::kStarted:
      owner_->OnPrefillStarted();
      return;
    case ferry::v1::PrefillEvent::kHeld: {
      const absl::Duration lease =
          absl::Milliseconds(static_cast<int64_t>(event.held().lease_ms()));
      held_ = true;
      RenewAfter(lease);
      owner_->OnPrefillHeld(event.held().cause());
      return;
    }
    case ferry::v1::PrefillEvent::kDone:
      stream_done_ = true;
      OnDone(event.done());
      return;
    case ferry::v1::PrefillEvent::EVENT_NOT_SET:
      return;
  }
}

void PrefillLeg::OnDone(const ferry::v1::PrefillDone& done) {
  if (std::exchange(done_, true)) return;  // both PushHeld and the stream may say so
  loop_->CancelTimer(std::exchange(renew_timer_, 0));
  renew_call_.reset();
  owner_->OnPrefillDone(done);
}

void PrefillLeg::OnEnd(const absl::Status& status) {
  if (closed_ || done_) return;
  // A stream that ends well after a hand-over leaves the rest to PushHeld's answer.
  if (status.ok() && push_call_ != nullptr) return;
  done_ = true;
  owner_->OnPrefillFailed(
      status.ok() ? absl::InternalError("the prefill worker ended its stream without Done")
                  : status);
}

void PrefillLeg::RenewAfter(absl::Duration lease) {
  loop_->CancelTimer(renew_timer_);
  renew_timer_ =
      loop_->After(std::max(lease / kRenewalsPerLease, kMinRenewInterval), [this] { Renew(); });
}

void PrefillLeg::Renew() {
  renew_timer_ = 0;
  if (closed_ || done_) return;
  ferry::v1::RenewLeaseRequest request;
  *request.mutable_key() = *key_;
  request.set_worker_epoch(worker_epoch_);
  renew_call_ = client_->RenewLease(
      request, traceparent_, kRenewTimeout,
      [this](absl::StatusOr<ferry::v1::RenewLeaseResponse> response) {
        if (closed_ || done_) return;
        if (response.ok()) {
          RenewAfter(absl::Milliseconds(static_cast<int64_t>(response->lease_ms())));
          return;
        }
        if (absl::IsNotFound(response.status()) && push_call_ == nullptr) {
          done_ = true;
          owner_->OnPrefillFailed(absl::AbortedError("the lease of the held blocks has expired: " +
                                                     std::string(response.status().message())));
          return;
        }
        RenewAfter(absl::ZeroDuration());  // the lease may still be there: try again soon
      });
}

void PrefillLeg::PushHeld(const ferry::v1::PushHeldRequest& request, absl::Duration timeout) {
  FERRY_CHECK(held_);
  push_call_ = client_->PushHeld(request, traceparent_, timeout,
                                 [this](absl::StatusOr<ferry::v1::PushHeldResponse> response) {
                                   if (closed_ || done_) return;
                                   push_call_.reset();
                                   if (response.ok()) {
                                     OnDone(response->done());
                                   } else {
                                     owner_->OnPushHeldFailed(response.status());
                                   }
                                 });
}

void PrefillLeg::DropPush() { push_call_.reset(); }

void PrefillLeg::Close(const std::string& reason) {
  if (std::exchange(closed_, true)) return;
  loop_->CancelTimer(renew_timer_);
  if (stream_done_ && stream_ != nullptr) stream_->LetEnd();
  if (!done_ && key_ != nullptr) client_->Cancel(*key_, traceparent_, reason);
  push_call_.reset();
  renew_call_.reset();
  stream_.reset();
}

}  // namespace router
