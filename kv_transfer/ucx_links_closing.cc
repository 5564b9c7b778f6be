// How links end: one by one, all together, or those of a worker that is to be renewed.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kv_transfer/ucx_links.h"

namespace kv_transfer {

void UcxLinks::CloseEndpoint(const EndpointPtr& endpoint) {
  if (endpoint->closed) return;
  endpoint->closed = true;
  const EndpointPtr keep = endpoint;
  endpoints_.erase(endpoint->handle);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(keep->handle, &param);
  if (!UCS_PTR_IS_PTR(request)) return;  // done at once
  keep->close_request = request;
  closing_.push_back(keep);
}

void UcxLinks::CloseLink(Entry& entry, const absl::Status& cause) {
  if (entry.link->state() == UcxLink::State::kClosing) return;
  ++num_closing_links_;
  entry.link->StartClosing(absl::Status(cause.code(), cause.message()));
  AnswerConnects(entry, absl::StatusCode::kUnavailable, std::string(cause.message()));
  for (const EndpointPtr& endpoint : entry.link->endpoints()) {
    // On shared memory a forced close tells the peer nothing.
    if (endpoint->worker->kind() == "shm" && endpoint->confirmed && !endpoint->failed) {
      SendHello(endpoint, LinkHello::Kind::kGoodbye, entry.link->peer(), entry.link->session(),
                entry.link->peer_session);
    }
    CloseEndpoint(endpoint);
  }
}

void UcxLinks::HandleErrors() {
  std::vector<EndpointPtr> failed;
  for (const auto& [handle, endpoint] : endpoints_) {
    if (endpoint->failed) failed.push_back(endpoint);
  }
  for (const EndpointPtr& endpoint : failed) {
    if (endpoint->link != nullptr) {
      CloseLink(links_.at(endpoint->link->peer()),
                absl::UnavailableError(absl::StrCat("ucx ", endpoint->worker->kind(), ": ",
                                                    ucs_status_string(endpoint->error))));
    } else {
      CloseEndpoint(endpoint);
    }
  }
}

bool UcxLinks::FinishClosed() {
  const size_t num_before = closing_.size() + num_closing_links_;
  std::erase_if(closing_, [](const EndpointPtr& endpoint) {
    if (ucp_request_check_status(endpoint->close_request) == UCS_INPROGRESS) return false;
    ucp_request_free(endpoint->close_request);
    return true;
  });
  std::vector<Entry> finished;
  for (auto it = links_.begin(); num_closing_links_ > 0 && it != links_.end();) {
    const UcxLink* const link = it->second.link.get();
    const bool done = link->state() == UcxLink::State::kClosing && link->drained() &&
                      std::none_of(closing_.begin(), closing_.end(),
                                   [&](const EndpointPtr& one) { return one->link == link; });
    if (!done) {
      ++it;
      continue;
    }
    finished.push_back(std::move(it->second));
    it = links_.erase(it);
    --num_closing_links_;
  }
  for (Entry& entry : finished) {
    const UcxLink& link = *entry.link;
    if (link.was_up() && sink_ != nullptr) sink_->OnPeerLost(link.peer(), link.cause());
    for (const auto& answer : entry.waiting.fenced) answer();
    for (const Hello& hello : entry.waiting.hellos) HandleHello(hello);
    for (Attempt& attempt : entry.waiting.reconnect) Make(std::move(attempt));
  }
  return closing_.size() + num_closing_links_ != num_before;
}

void UcxLinks::CloseAll() {
  for (auto& [peer, entry] : links_) {
    entry.waiting.reconnect.clear();
    entry.waiting.hellos.clear();
    CloseLink(entry, absl::UnavailableError("this process closes its transport"));
  }
  for (const Attempt& attempt : std::exchange(postponed_, {})) {
    attempt.answer(absl::UnavailableError("this process closes its transport"));
  }
  shut_ = true;
}

bool UcxLinks::Leave(UcxWorker* worker) {
  const auto of_worker = [&](const EndpointPtr& one) { return one->worker == worker; };
  std::vector<EndpointPtr> open;
  for (const auto& [handle, endpoint] : endpoints_) {
    if (of_worker(endpoint)) open.push_back(endpoint);
  }
  for (const EndpointPtr& endpoint : open) {
    if (endpoint->link == nullptr) {
      CloseEndpoint(endpoint);
      continue;
    }
    Entry& entry = links_.at(endpoint->link->peer());
    // The peer may have answered long ago: whoever waits for it gets a second try.
    for (Attempt& attempt : std::exchange(entry.waiting.connected, {})) {
      entry.waiting.reconnect.push_back(std::move(attempt));
    }
    CloseLink(entry, absl::UnavailableError(
                         "a process has died or stands still in the middle of a message, shared "
                         "memory begins anew"));
  }
  return std::none_of(closing_.begin(), closing_.end(), of_worker) &&
         std::none_of(links_.begin(), links_.end(), [&](const auto& one) {
           const auto& endpoints = one.second.link->endpoints();
           return std::any_of(endpoints.begin(), endpoints.end(), of_worker);
         });
}

void UcxLinks::Resume(UcxWorker* worker, const absl::Status& status) {
  for (Attempt& attempt : std::exchange(postponed_, {})) {
    if (attempt.worker != worker) {
      postponed_.push_back(std::move(attempt));
    } else if (status.ok()) {
      Make(std::move(attempt));
    } else {
      attempt.answer(status);
    }
  }
}

}  // namespace kv_transfer
