#include "kv_transfer/ucx_link.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "status/check.h"

namespace kv_transfer {

UcxLink::~UcxLink() { FERRY_CHECK(drained() && queue_.empty()) << peer_.ToHex(); }

void UcxLink::Add(std::shared_ptr<UcxEndpoint> endpoint) {
  endpoint->link = this;
  endpoints_.push_back(std::move(endpoint));
}

void UcxLink::Confirm(UcxEndpoint* endpoint) {
  if (state_ == State::kClosing) return;
  endpoint->confirmed = true;
  if (state_ != State::kConnecting) return;
  state_ = State::kUp;
  was_up_ = true;
  send_endpoint_ = endpoint;
  device_memory_->SetPeer(peer_, endpoint->worker->TakesDeviceMemory(endpoint->handle));
  FillWindow();
}

void UcxLink::Send(const MessageHeader& header, absl::Span<const std::byte> data,
                   std::function<void(absl::Status)> done) {
  auto request = std::make_unique<SendRequest>(
      SendRequest{this, EncodeMessageHeader(header), header.length, data, std::move(done)});
  if (state_ == State::kClosing) {
    ++counters_->messages_failed;
    request->done(absl::UnavailableError(absl::StrCat("link to ", peer_.ToHex(), " is closing")));
    return;
  }
  queue_.push_back(std::move(request));
  FillWindow();
}

void UcxLink::FillWindow() {
  if (filling_) return;  // called by a completion inside the loop below, which goes on by itself
  filling_ = true;
  while (state_ == State::kUp && !queue_.empty() && sends_in_flight_ < kSendWindow) {
    std::unique_ptr<SendRequest> request = std::move(queue_.front());
    queue_.pop_front();
    ucp_request_param_t param{};
    param.op_attr_mask =
        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    // An empty message has nothing to receive, so it goes as a control message.
    param.flags = UCP_AM_SEND_FLAG_REPLY |
                  (request->data.empty() ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV);
    param.cb.send = &UcxLink::OnSent;
    param.user_data = request.get();
    ++sends_in_flight_;
    if (!SetMemoryType(request->data.data(), param)) {
      FinishSend(std::move(request), UCS_ERR_UNSUPPORTED);
      continue;
    }
    const ucs_status_ptr_t sent =
        ucp_am_send_nbx(send_endpoint_->handle, kMessageAm, request->header.data(),
                        request->header.size(), request->data.data(), request->data.size(), &param);
    if (UCS_PTR_IS_PTR(sent)) {
      request.release();  // OnSent takes it back
    } else {
      FinishSend(std::move(request), UCS_PTR_STATUS(sent));
    }
  }
  filling_ = false;
}

bool UcxLink::SetMemoryType(const std::byte* data, ucp_request_param_t& param) const {
  if (!device_memory_->Contains(data)) return true;  // the host's, which UCX sees for itself
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UCS_MEMORY_TYPE_CUDA;
  return device_memory_->TakenBy(peer_);
}

void UcxLink::OnSent(void* request, ucs_status_t status, void* user_data) {
  ucp_request_free(request);
  std::unique_ptr<SendRequest> own(static_cast<SendRequest*>(user_data));
  UcxLink* const link = own->link;
  link->FinishSend(std::move(own), status);
}

void UcxLink::FinishSend(std::unique_ptr<SendRequest> request, ucs_status_t status) {
  --sends_in_flight_;
  if (status == UCS_OK) {
    ++counters_->messages_sent;
    counters_->bytes_sent += request->length;
    request->done(absl::OkStatus());
  } else {
    ++counters_->messages_failed;
    // The receiver's callback refuses with UCS_ERR_CANCELED; so does a forced close of our own.
    request->done(status == UCS_ERR_CANCELED && state_ == State::kUp && !send_endpoint_->failed
                      ? absl::AbortedError("refused by the receiver")
                      : absl::UnavailableError(absl::StrCat("link to ", peer_.ToHex(), ": ",
                                                            ucs_status_string(status))));
  }
  FillWindow();
}

ucs_status_t UcxLink::Offer(ReceiveSink* sink, UcxWorker* worker, const MessageHeader& header,
                            void* data, const ucp_am_recv_param_t* param) {
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  // Of an eager message UCS_OK says "done with it"; of a rendezvous it would tell the sender
  // success.
  const ucs_status_t refused = rendezvous ? UCS_ERR_CANCELED : UCS_OK;
  // A peer that pushes data without asking is not one of ours.
  if (state_ != State::kUp || sink == nullptr || rendezvous != (header.following() > 0)) {
    ++counters_->messages_refused;
    return refused;
  }
  const absl::StatusOr<absl::Span<std::byte>> destination = sink->OnOffer(peer_, header);
  if (!destination.ok()) {
    ++counters_->messages_refused;
    return refused;
  }
  FERRY_CHECK(destination->size() == header.following())
      << destination->size() << " bytes for a message of " << header.length;
  auto request = std::make_unique<ReceiveRequest>(ReceiveRequest{this, sink, header});
  ++receives_in_flight_;
  if (!rendezvous) {
    FinishReceive(std::move(request), UCS_OK);
    return UCS_OK;
  }
  ucp_request_param_t receive{};
  receive.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  receive.cb.recv_am = &UcxLink::OnReceived;
  receive.user_data = request.get();
  FERRY_CHECK(SetMemoryType(destination->data(), receive)) << "of a device, over " << peer_.ToHex();
  const ucs_status_ptr_t started = ucp_am_recv_data_nbx(worker->handle(), data, destination->data(),
                                                        destination->size(), &receive);
  if (UCS_PTR_IS_PTR(started)) {
    request.release();  // OnReceived takes it back
  } else {
    FinishReceive(std::move(request), UCS_PTR_STATUS(started));
  }
  return UCS_INPROGRESS;  // UCX owns the descriptor now
}

void UcxLink::OnReceived(void* request, ucs_status_t status, size_t, void* user_data) {
  ucp_request_free(request);
  std::unique_ptr<ReceiveRequest> own(static_cast<ReceiveRequest*>(user_data));
  UcxLink* const link = own->link;
  link->FinishReceive(std::move(own), status);
}

void UcxLink::FinishReceive(std::unique_ptr<ReceiveRequest> request, ucs_status_t status) {
  --receives_in_flight_;
  if (status == UCS_OK) {
    ++counters_->messages_received;
    counters_->bytes_received += request->header.length;
    request->sink->OnReceived(peer_, request->header, absl::OkStatus());
  } else {
    ++counters_->messages_failed;
    request->sink->OnReceived(peer_, request->header,
                              absl::UnavailableError(absl::StrCat("link to ", peer_.ToHex(), ": ",
                                                                  ucs_status_string(status))));
  }
}

void UcxLink::StartClosing(absl::Status cause) {
  if (state_ == State::kClosing) return;
  state_ = State::kClosing;
  device_memory_->SetPeer(peer_, false);
  cause_ = std::move(cause);
  for (std::unique_ptr<SendRequest>& request : std::exchange(queue_, {})) {
    ++counters_->messages_failed;
    request->done(absl::UnavailableError(
        absl::StrCat("link to ", peer_.ToHex(), ": ", std::string(cause_.message()))));
  }
}

}  // namespace kv_transfer
