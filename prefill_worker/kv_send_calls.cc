// The calls of a transfer to the decode worker; their answers come back to the state machine
// (kv_send.cc).

#include <utility>

#include "prefill_worker/kv_send.h"

namespace prefill_worker {
namespace {

// An answer may come this much after the callee's own limit.
constexpr absl::Duration kAnswerSlack = absl::Seconds(1);
constexpr absl::Duration kBestEffortTimeout = absl::Seconds(2);

void FillKey(const worker::RequestId& id, ferry::v1::RequestKey* key) {
  key->set_request_id(id.request_id);
  key->set_attempt(id.attempt);
}

void FillFirstToken(const FirstToken& from, ferry::v1::FirstToken* to) {
  to->set_branch(from.branch);
  to->set_token_id(from.sample.token_id);
  if (from.num_logprobs < 0) return;
  auto* chosen = to->mutable_logprobs()->mutable_chosen();
  chosen->set_token_id(from.sample.token_id);
  chosen->set_logprob(from.sample.logprob);
  for (int32_t i = 0; i < from.num_logprobs; ++i) {
    auto* top = to->mutable_logprobs()->add_top();
    top->set_token_id(from.sample.top_ids[i]);
    top->set_logprob(from.sample.top_logprobs[i]);
  }
}

}  // namespace

void KvSendImpl::Reserve(Actions& actions) {
  const worker::WorkerOptions& options = context_.runtime->options;
  ferry::v1::ReserveRequest request;
  FillKey(spec_.id, request.mutable_key());
  request.set_sender_epoch(context_.runtime->epoch.ToBytes());
  request.set_receiver_epoch(spec_.destination.epoch.ToBytes());
  request.set_num_tokens(spec_.num_tokens);
  request.set_wait_ms(absl::ToInt64Milliseconds(options.reserve_wait));
  actions.push_back([self = shared_from_this(), stub = stub_, request, &options] {
    self->context_.calls->Start<AsyncStub, ferry::v1::ReserveRequest, ferry::v1::ReserveResponse>(
        stub->async(), &AsyncStub::Reserve, request, options.reserve_wait + kAnswerSlack,
        [self, stub](absl::StatusOr<ferry::v1::ReserveResponse> response) {
          self->OnReserved(std::move(response));
        },
        self->spec_.traceparent);
  });
}

void KvSendImpl::Confirm(const kv_transfer::OutgoingResult& result, Actions& actions) {
  ferry::v1::TransferDoneRequest request;
  FillKey(spec_.id, request.mutable_key());
  request.set_transfer_id(TransferIdBytes());
  request.set_sender_epoch(context_.runtime->epoch.ToBytes());
  request.set_receiver_epoch(spec_.destination.epoch.ToBytes());
  request.set_num_blocks(result.blocks);
  request.set_num_bytes(result.bytes);
  for (const FirstToken& token : first_tokens_) {
    FillFirstToken(token, request.add_first_tokens());
  }
  actions.push_back([self = shared_from_this(), stub = stub_, request = std::move(request)] {
    self->context_.calls
        ->Start<AsyncStub, ferry::v1::TransferDoneRequest, ferry::v1::TransferDoneResponse>(
            stub->async(), &AsyncStub::TransferDone, request,
            self->context_.runtime->options.transfer_total,
            [self, stub](absl::StatusOr<ferry::v1::TransferDoneResponse> response) {
              self->OnConfirmed(response.status());
            },
            self->spec_.traceparent);
  });
}

void KvSendImpl::TellPeer(const std::string& cause, Actions& actions) {
  if (stub_ == nullptr) return;
  ferry::v1::AbortTransferRequest request;
  FillKey(spec_.id, request.mutable_key());
  if (reserved_) request.set_transfer_id(TransferIdBytes());
  request.set_caller_epoch(context_.runtime->epoch.ToBytes());
  request.set_cause(cause);
  actions.push_back([self = shared_from_this(), stub = stub_, request = std::move(request)] {
    self->context_.calls
        ->Start<AsyncStub, ferry::v1::AbortTransferRequest, ferry::v1::AbortTransferResponse>(
            stub->async(), &AsyncStub::AbortTransfer, request, kBestEffortTimeout,
            [stub](absl::StatusOr<ferry::v1::AbortTransferResponse>) {}, self->spec_.traceparent);
  });
}

void KvSendImpl::ReleaseReservation(const std::string& transfer_id, Actions& actions) {
  ferry::v1::ReleaseRequest request;
  FillKey(spec_.id, request.mutable_key());
  request.set_transfer_id(transfer_id);
  request.set_sender_epoch(context_.runtime->epoch.ToBytes());
  actions.push_back([self = shared_from_this(), stub = stub_, request = std::move(request)] {
    self->context_.calls->Start<AsyncStub, ferry::v1::ReleaseRequest, ferry::v1::ReleaseResponse>(
        stub->async(), &AsyncStub::Release, request, kBestEffortTimeout,
        [stub](absl::StatusOr<ferry::v1::ReleaseResponse>) {}, self->spec_.traceparent);
  });
}

}  // namespace prefill_worker
