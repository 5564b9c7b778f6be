#include "kv_transfer/ucx_links.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kv_transfer/message_header.h"
#include "status/check.h"

namespace kv_transfer {
namespace {

UcxLinks* LinksOf(const UcxWorker* worker) { return static_cast<UcxLinks*>(worker->user_data()); }

absl::Span<const std::byte> Bytes(const void* data, size_t length) {
  return {static_cast<const std::byte*>(data), length};
}

// UCX reads both until the send completes.
struct HelloRequest {
  std::array<std::byte, kLinkHelloBytes> header;
  std::string address;
};

void OnHelloSent(void* request, ucs_status_t, void* user_data) {
  ucp_request_free(request);
  delete static_cast<HelloRequest*>(user_data);
}

}  // namespace

UcxLinks::~UcxLinks() { FERRY_CHECK(empty()) << links_.size() << " links are open"; }

UcxWorker::Handlers UcxLinks::handlers() {
  return {.on_hello = &UcxLinks::OnHelloMessage,
          .on_message = &UcxLinks::OnMessage,
          .on_connection = &UcxLinks::OnConnection,
          .user_data = this};
}

// Callbacks of UCX.

ucs_status_t UcxLinks::OnHelloMessage(void* arg, const void* header, size_t header_length,
                                      void* data, size_t length, const ucp_am_recv_param_t* param) {
  auto* const worker = static_cast<UcxWorker*>(arg);
  UcxLinks* const links = LinksOf(worker);
  const absl::StatusOr<LinkHello> hello = DecodeLinkHello(Bytes(header, header_length));
  const bool has_reply = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  const bool eager = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  if (!hello.ok() || !has_reply || !eager) return eager ? UCS_OK : UCS_ERR_CANCELED;
  const EndpointPtr endpoint = links->FindOrExpose(worker, param->reply_ep, Bytes(data, length));
  if (endpoint == nullptr) return UCS_OK;
  if (hello->kind == LinkHello::Kind::kAccepted) {
    // At once: messages of the peer may follow in the same call of progress.
    links->HandleAccepted(endpoint, *hello);
  } else {
    links->hellos_.push_back({endpoint, *hello});
  }
  return UCS_OK;
}

ucs_status_t UcxLinks::OnMessage(void* arg, const void* header, size_t header_length, void* data,
                                 size_t length, const ucp_am_recv_param_t* param) {
  auto* const worker = static_cast<UcxWorker*>(arg);
  UcxLinks* const links = LinksOf(worker);
  const absl::StatusOr<MessageHeader> decoded = DecodeMessageHeader(Bytes(header, header_length));
  const auto it = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0
                      ? links->endpoints_.find(param->reply_ep)
                      : links->endpoints_.end();
  if (!decoded.ok() || decoded->following() != length || it == links->endpoints_.end() ||
      !it->second->confirmed) {
    ++links->counters_->messages_refused;
    return (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 ? UCS_ERR_CANCELED : UCS_OK;
  }
  return it->second->link->Offer(links->sink_, worker, *decoded, data, param);
}

void UcxLinks::OnConnection(ucp_conn_request_h request, void* arg) {
  auto* const worker = static_cast<UcxWorker*>(arg);
  UcxLinks* const links = LinksOf(worker);
  EndpointPtr endpoint = links->NewEndpoint(worker);
  const auto handle = worker->Accept(request, &UcxLinks::OnError, endpoint.get());
  if (handle.ok()) links->Open(std::move(endpoint), *handle);
}

void UcxLinks::OnError(void* arg, ucp_ep_h, ucs_status_t status) {
  auto* const endpoint = static_cast<UcxEndpoint*>(arg);
  endpoint->failed = true;
  endpoint->error = status;
  LinksOf(endpoint->worker)->error_noted_ = true;
}

// Endpoints.

UcxLinks::EndpointPtr UcxLinks::NewEndpoint(UcxWorker* worker) {
  auto endpoint = std::make_shared<UcxEndpoint>();
  endpoint->worker = worker;
  return endpoint;
}

UcxLinks::EndpointPtr UcxLinks::Open(EndpointPtr endpoint, ucp_ep_h handle) {
  endpoint->handle = handle;
  FERRY_CHECK(endpoints_.emplace(handle, endpoint).second) << "an endpoint is opened once";
  return endpoint;
}

// The endpoint that a hello came over.  On shared memory UCX made one by itself when the peer
// connected; creating an endpoint to the peer's address makes that one ours, with error handling.
// Null if it cannot be had.
UcxLinks::EndpointPtr UcxLinks::FindOrExpose(UcxWorker* worker, ucp_ep_h reply,
                                             absl::Span<const std::byte> address) {
  if (const auto it = endpoints_.find(reply); it != endpoints_.end()) return it->second;
  EndpointPtr endpoint = NewEndpoint(worker);
  const auto handle = worker->ConnectToWorker(
      std::string(reinterpret_cast<const char*>(address.data()), address.size()),
      &UcxLinks::OnError, endpoint.get());
  if (!handle.ok()) return nullptr;
  Open(endpoint, *handle);
  if (*handle == reply) return endpoint;
  // UCX pairs the n-th endpoint of one side with the n-th of the other, and attempts that failed on
  // one side alone have put the two out of step.  The pair that the peer uses works; only UCX's own
  // notice of its death is missing, and every transfer has its own deadline.
  superfluous_.push_back(endpoint);
  return Open(NewEndpoint(worker), reply);
}

// Requests of the transport.

void UcxLinks::Make(Attempt attempt) {
  if (attempt.worker->blocked()) {
    postponed_.push_back(std::move(attempt));
    return;
  }
  const Epoch peer = attempt.peer;
  if (const auto it = links_.find(peer); it != links_.end()) {
    Waiting& waiting = it->second.waiting;
    switch (it->second.link->state()) {
      case UcxLink::State::kUp:
        attempt.answer(absl::OkStatus());
        break;
      case UcxLink::State::kConnecting:
        waiting.connected.push_back(std::move(attempt));
        break;
      case UcxLink::State::kClosing:
        waiting.reconnect.push_back(std::move(attempt));
        break;
    }
    return;
  }
  EndpointPtr endpoint = NewEndpoint(attempt.worker);
  auto handle = attempt.worker->ConnectTo(attempt.address, &UcxLinks::OnError, endpoint.get());
  if (!handle.ok()) {
    // Not shared with who asked: absl counts a status's owners where the thread sanitizer cannot
    // see.
    attempt.answer(std::move(handle).status());
    return;
  }
  Open(endpoint, *handle);
  UcxLink* const link = StartLink(peer);
  link->Add(endpoint);
  links_.at(peer).waiting.connected.push_back(std::move(attempt));
  SendHello(endpoint, LinkHello::Kind::kHello, peer, link->session(), 0);
}

void UcxLinks::CancelConnect(const Epoch& peer) {
  std::erase_if(postponed_, [&](const Attempt& attempt) { return attempt.peer == peer; });
  const auto it = links_.find(peer);
  if (it == links_.end()) return;
  Entry& entry = it->second;
  if (entry.link->state() == UcxLink::State::kConnecting) {
    CloseLink(entry, absl::UnavailableError("no answer"));
  }
}

void UcxLinks::Send(const Epoch& peer, const MessageHeader& header,
                    absl::Span<const std::byte> data, std::function<void(absl::Status)> done) {
  const auto it = links_.find(peer);
  if (it != links_.end()) {
    it->second.link->Send(header, data, std::move(done));
    return;
  }
  ++counters_->messages_failed;
  done(absl::UnavailableError(absl::StrCat("no link to ", peer.ToHex())));
}

void UcxLinks::Fence(const Epoch& peer, const absl::Status& cause, std::function<void()> answer) {
  const auto it = links_.find(peer);
  if (it == links_.end()) {
    answer();
    return;
  }
  it->second.waiting.fenced.push_back(std::move(answer));
  CloseLink(it->second, cause);
}

std::string UcxLinks::LinkName(const Epoch& peer) const {
  const auto it = links_.find(peer);
  if (it == links_.end() || it->second.link->state() != UcxLink::State::kUp) return "";
  const EndpointPtr& endpoint = it->second.link->endpoints().front();
  return endpoint->worker->LinkName(endpoint->handle);
}

// Links.

UcxLink* UcxLinks::StartLink(const Epoch& peer) {
  Entry& entry = links_[peer];
  FERRY_CHECK(entry.link == nullptr) << "a second link to " << peer.ToHex();
  entry.link = std::make_unique<UcxLink>(peer, ++last_session_, counters_, device_memory_);
  return entry.link.get();
}

void UcxLinks::SendHello(const EndpointPtr& endpoint, LinkHello::Kind kind, const Epoch& to,
                         uint64_t session, uint64_t peer_session) {
  auto own = std::make_unique<HelloRequest>();
  own->header = EncodeLinkHello({.kind = kind,
                                 .from = own_epoch_,
                                 .to = to,
                                 .session = session,
                                 .peer_session = peer_session});
  if (kind == LinkHello::Kind::kHello) own->address = endpoint->worker->address().worker_address;
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
  param.cb.send = &OnHelloSent;
  param.user_data = own.get();
  const ucs_status_ptr_t sent =
      ucp_am_send_nbx(endpoint->handle, kHelloAm, own->header.data(), own->header.size(),
                      own->address.data(), own->address.size(), &param);
  if (UCS_PTR_IS_PTR(sent)) own.release();  // OnHelloSent deletes it
  // An error here comes to OnError too.
}

void UcxLinks::HandleHello(const Hello& one) {
  const EndpointPtr endpoint = one.endpoint.lock();
  if (endpoint == nullptr || endpoint->closed) return;
  const LinkHello& hello = one.hello;
  if (hello.kind != LinkHello::Kind::kHello) {
    HandleRefusal(endpoint, hello);
    return;
  }
  const bool of_another = endpoint->link != nullptr && endpoint->link->peer() != hello.from;
  if (hello.to != own_epoch_ || of_another) {
    SendHello(endpoint, LinkHello::Kind::kWrongEpoch, hello.from, 0, hello.session);
    return;
  }
  const auto it = links_.find(hello.from);
  if (it == links_.end()) {
    StartLink(hello.from);
    Bind(links_.at(hello.from), endpoint, hello);
    return;
  }
  Entry& entry = it->second;
  const uint64_t known = entry.link->peer_session;
  if (entry.link->state() == UcxLink::State::kClosing) {
    entry.waiting.hellos.push_back(one);
  } else if (known == 0 || known == hello.session) {
    Bind(entry, endpoint, hello);
  } else if (hello.session > known) {
    // The peer has closed the link that we still believe in.
    CloseLink(entry, absl::UnavailableError("the peer made a new link"));
    entry.waiting.hellos.push_back(one);
  } else {
    CloseEndpoint(endpoint);  // a late hello of a link that the peer has given up
  }
}

void UcxLinks::Bind(Entry& entry, const EndpointPtr& endpoint, const LinkHello& hello) {
  UcxLink* const link = entry.link.get();
  if (endpoint->link == nullptr) link->Add(endpoint);
  link->peer_session = hello.session;
  SendHello(endpoint, LinkHello::Kind::kAccepted, hello.from, link->session(), hello.session);
  link->Confirm(endpoint.get());
  AnswerConnects(entry, absl::StatusCode::kOk, "");
}

void UcxLinks::HandleAccepted(const EndpointPtr& endpoint, const LinkHello& answer) {
  UcxLink* const link = endpoint->link;
  if (link == nullptr || answer.from != link->peer() || answer.to != own_epoch_ ||
      answer.peer_session != link->session()) {
    return;  // to a hello that is of no interest any more
  }
  if (link->peer_session == 0) link->peer_session = answer.session;
  link->Confirm(endpoint.get());
  AnswerConnects(links_.at(link->peer()), absl::StatusCode::kOk, "");
}

// The peer will not use the endpoint, or not any more.
void UcxLinks::HandleRefusal(const EndpointPtr& endpoint, const LinkHello& answer) {
  UcxLink* const link = endpoint->link;
  if (link == nullptr) {
    CloseEndpoint(endpoint);
  } else if (answer.kind == LinkHello::Kind::kGoodbye) {
    CloseLink(links_.at(link->peer()), absl::UnavailableError("the peer closed the link"));
  } else if (answer.peer_session == link->session()) {
    CloseLink(links_.at(link->peer()),
              absl::UnavailableError(
                  absl::StrCat("process ", answer.from.ToHex(), " answers at this address")));
  }
}

void UcxLinks::AnswerConnects(Entry& entry, absl::StatusCode code, const std::string& message) {
  for (const Attempt& attempt : std::exchange(entry.waiting.connected, {})) {
    attempt.answer(absl::Status(code, message));
  }
}

bool UcxLinks::moving() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& entry) { return !entry.second.link->drained(); });
}

bool UcxLinks::Advance() {
  bool acted = false;
  if (shut_) {
    hellos_.clear();
    std::vector<EndpointPtr> rest;  // of nobody known
    for (const auto& [handle, endpoint] : endpoints_) rest.push_back(endpoint);
    for (const EndpointPtr& endpoint : rest) CloseEndpoint(endpoint);
  }
  if (!superfluous_.empty()) {
    for (const EndpointPtr& endpoint : std::exchange(superfluous_, {})) CloseEndpoint(endpoint);
    acted = true;
  }
  if (!hellos_.empty()) {
    for (const Hello& hello : std::exchange(hellos_, {})) HandleHello(hello);
    acted = true;
  }
  if (std::exchange(error_noted_, false)) {
    HandleErrors();
    acted = true;
  }
  if (closing()) acted |= FinishClosed();
  return acted;
}

}  // namespace kv_transfer
