#include "kv_transfer/loopback_network.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "status/check.h"

namespace kv_transfer::loopback {
namespace {

// A status of the thread that will use it.  Copies share one counted representation, and absl's
// counting is not instrumented: ThreadSanitizer would call its release a race.
absl::Status Detached(const absl::Status& status) { return {status.code(), status.message()}; }

Pair PairOf(const Epoch& a, const Epoch& b) { return a < b ? Pair{a, b} : Pair{b, a}; }

}  // namespace

void Network::SetFaults(std::function<LoopbackFault(const MessageHeader&)> decide) {
  std::lock_guard lock(mutex_);
  decide_ = decide ? std::make_shared<Decide>(std::move(decide)) : nullptr;
}

void Network::ReleaseDelayed() {
  std::lock_guard lock(mutex_);
  for (const MessagePtr& message : messages_) {
    if (message->state == Message::State::kHeld) {
      Post(message->to, [this, message] { Copy(message); });
    }
  }
  ReleaseReordered();
}

void Network::Suspend(const Epoch& epoch) {
  std::lock_guard lock(mutex_);
  if (Endpoint* const endpoint = Find(epoch)) endpoint->suspended = true;
}

void Network::Resume(const Epoch& epoch) {
  std::lock_guard lock(mutex_);
  Endpoint* const endpoint = Find(epoch);
  if (endpoint == nullptr) return;
  endpoint->suspended = false;
  endpoint->wake.notify_all();
  for (const MessagePtr& message : messages_) {  // those that waited on the wire
    if (message->from == epoch && message->state == Message::State::kOnWire) PostOffer(message);
  }
}

void Network::Kill(const Epoch& epoch) {
  std::unique_lock lock(mutex_);
  Endpoint* const endpoint = Find(epoch);
  if (endpoint == nullptr) return;
  endpoint->killed = true;
  for (const Pair& pair : std::set<Pair>(links_)) {
    if (pair.first == epoch || pair.second == epoch) {
      Cut(lock, pair.first, pair.second, absl::UnavailableError("killed"));
    }
  }
}

std::shared_ptr<Endpoint> Network::Join(const Epoch& epoch) {
  std::lock_guard lock(mutex_);
  auto endpoint = std::make_shared<Endpoint>();
  FERRY_CHECK(endpoints_.emplace(epoch, endpoint).second) << "epoch " << epoch.ToHex();
  return endpoint;
}

void Network::Leave(const Epoch& epoch) {
  Kill(epoch);
  std::unique_lock lock(mutex_);
  // A receiver may be copying from our memory at this moment.
  changed_.wait(lock, [&] {
    return std::none_of(messages_.begin(), messages_.end(), [&](const MessagePtr& message) {
      return message->from == epoch && message->done != nullptr;
    });
  });
  Endpoint* const endpoint = Find(epoch);
  endpoint->stop = true;
  endpoint->wake.notify_all();
  endpoints_.erase(epoch);
}

absl::Status Network::Connect(const Epoch& self, const Epoch& peer, absl::Duration timeout) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                         [&] { return !untold_.contains(PairOf(self, peer)); })) {
    return absl::UnavailableError(absl::StrCat("no answer from epoch ", peer.ToHex(), " within ",
                                               absl::FormatDuration(timeout)));
  }
  Endpoint* const endpoint = Find(peer);
  if (endpoint == nullptr || endpoint->killed) {
    return absl::UnavailableError(absl::StrCat("no process with epoch ", peer.ToHex()));
  }
  links_.insert(PairOf(self, peer));
  return absl::OkStatus();
}

bool Network::Connected(const Epoch& self, const Epoch& peer) const {
  std::lock_guard lock(mutex_);
  return links_.contains(PairOf(self, peer));
}

void Network::Send(const Epoch& from, const Epoch& to, const MessageHeader& header,
                   absl::Span<const std::byte> data, Done done) {
  const std::shared_ptr<Decide> decide = [this] {
    std::lock_guard lock(mutex_);
    return decide_;
  }();
  auto message = std::make_shared<Message>();
  message->from = from;
  message->to = to;
  message->header = header;
  message->data = data;
  message->done = std::move(done);
  if (decide != nullptr) message->fault = (*decide)(header);
  std::lock_guard lock(mutex_);
  if (header.following() != data.size() || data.size() > static_cast<size_t>(kMaxMessageBytes)) {
    End(message, absl::InvalidArgumentError(
                     absl::StrCat("message of ", data.size(), " bytes, header ", header.length)));
    return;
  }
  const auto receiver = endpoints_.find(to);
  if (receiver == endpoints_.end() || !links_.contains(PairOf(from, to))) {
    End(message, absl::UnavailableError("not connected"));
    return;
  }
  message->receiver = receiver->second;
  messages_.push_back(message);
  FillWindow(from, to);
}

void Network::Cut(const Epoch& self, const Epoch& peer, const absl::Status& cause) {
  std::unique_lock lock(mutex_);
  Cut(lock, self, peer, cause);
}

TransportStats Network::stats(const Endpoint& endpoint) const {
  std::lock_guard lock(mutex_);
  return endpoint.stats;
}

void Network::CountFence(Endpoint* endpoint) {
  std::lock_guard lock(mutex_);
  ++endpoint->stats.fences;
}

void Network::SetSink(Endpoint* endpoint, ReceiveSink* sink) {
  std::lock_guard lock(mutex_);
  endpoint->sink = sink;
}

bool Network::WaitForThread(const Epoch& self, absl::Duration timeout) {
  auto passed = std::make_shared<bool>(false);
  std::unique_lock lock(mutex_);
  if (Find(self) == nullptr) return true;  // closed
  Post(self, [this, passed] {
    std::lock_guard relock(mutex_);
    *passed = true;
    changed_.notify_all();
  });
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [&] { return *passed; });
}

void Network::Run(const std::shared_ptr<Endpoint>& endpoint) {
  std::unique_lock lock(mutex_);
  while (true) {
    endpoint->wake.wait(
        lock, [&] { return endpoint->stop || (!endpoint->suspended && !endpoint->todo.empty()); });
    if (endpoint->todo.empty()) return;  // stopped, and all callbacks have been made
    const std::function<void()> call = std::move(endpoint->todo.front());
    endpoint->todo.pop_front();
    lock.unlock();
    call();
    lock.lock();
  }
}

Endpoint* Network::Find(const Epoch& epoch) {
  const auto it = endpoints_.find(epoch);
  return it == endpoints_.end() ? nullptr : it->second.get();
}

void Network::Post(const Epoch& epoch, std::function<void()> call) {
  if (Endpoint* const endpoint = Find(epoch)) {
    endpoint->todo.push_back(std::move(call));
    endpoint->wake.notify_all();
  }
}

void Network::PostOffer(const MessagePtr& message) {
  Post(message->to, [this, message] { Offer(message); });
}

void Network::AnswerSender(const MessagePtr& message, const absl::Status& status) {
  if (message->done == nullptr) return;
  if (Endpoint* const sender = Find(message->from)) {
    ++(status.ok() ? sender->stats.messages_sent : sender->stats.messages_failed);
    if (status.ok()) sender->stats.bytes_sent += message->header.length;
  }
  Post(message->from,
       [done = std::move(message->done), status = Detached(status)] { done(status); });
  message->done = nullptr;
}

void Network::End(const MessagePtr& message, const absl::Status& status) {
  message->state = Message::State::kEnded;
  AnswerSender(message, status);
  messages_.remove(message);
  FillWindow(message->from, message->to);
  changed_.notify_all();
}

void Network::FillWindow(const Epoch& from, const Epoch& to) {
  int32_t on_wire = 0;
  std::vector<MessagePtr> next;
  for (const MessagePtr& message : messages_) {
    if (message->from != from || message->to != to) continue;
    if (message->state != Message::State::kQueued) {
      ++on_wire;
    } else if (on_wire + static_cast<int32_t>(next.size()) < kSendWindow) {
      next.push_back(message);
    }
  }
  for (const MessagePtr& message : next) PutOnWire(message);
}

void Network::PutOnWire(const MessagePtr& message) {
  if (message->state != Message::State::kQueued) return;  // a dropped one let it pass already
  message->state = Message::State::kOnWire;
  switch (message->fault) {
    case LoopbackFault::kDrop:
      End(message, absl::OkStatus());
      return;
    case LoopbackFault::kReorder:
      reordered_.push_back(message);  // goes after the next one
      return;
    case LoopbackFault::kDuplicate: {
      PostOffer(message);
      auto twin = std::make_shared<Message>(*message);
      twin->done = nullptr;
      twin->own_data.assign(message->data.begin(), message->data.end());
      twin->data = twin->own_data;
      messages_.push_back(twin);
      PostOffer(twin);
      break;
    }
    default:
      PostOffer(message);
  }
  ReleaseReordered();
}

void Network::ReleaseReordered() {
  for (const MessagePtr& message : std::exchange(reordered_, {})) {
    if (message->state == Message::State::kOnWire) PostOffer(message);
  }
}

void Network::Offer(const MessagePtr& message) {
  ReceiveSink* sink = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (message->state != Message::State::kOnWire) return;  // cut, or offered before
    const Endpoint* const sender = Find(message->from);
    if (sender == nullptr || sender->suspended) return;  // Resume offers it again
    sink = message->receiver->sink;
    if (sink == nullptr) {
      ++message->receiver->stats.messages_refused;
      End(message, absl::AbortedError("refused by the receiver"));
      return;
    }
    message->state = Message::State::kCopying;
  }
  absl::StatusOr<absl::Span<std::byte>> destination = sink->OnOffer(message->from, message->header);
  bool copy_now = false;
  {
    std::lock_guard lock(mutex_);
    if (!destination.ok()) {
      ++message->receiver->stats.messages_refused;
      End(message, message->cut ? absl::UnavailableError("link lost")
                                : absl::AbortedError("refused by the receiver"));
      return;
    }
    FERRY_CHECK(destination->size() == message->header.following()) << destination->size();
    message->destination = *destination;
    copy_now = message->fault != LoopbackFault::kDelay || message->cut;
    message->state = Message::State::kHeld;
  }
  if (copy_now) Copy(message);
}

void Network::Copy(const MessagePtr& message) {
  ReceiveSink* sink = nullptr;
  bool cut = false;
  {
    std::lock_guard lock(mutex_);
    if (message->state != Message::State::kHeld) return;
    message->state = Message::State::kCopying;
    cut = message->cut;
    sink = message->receiver->sink;
    TransportStats& stats = message->receiver->stats;
    ++(cut ? stats.messages_failed : stats.messages_received);
    if (!cut) stats.bytes_received += message->header.length;
  }
  if (!cut && !message->data.empty()) {
    std::memcpy(message->destination.data(), message->data.data(), message->data.size());
  }
  sink->OnReceived(message->from, message->header,
                   cut ? absl::UnavailableError("link lost") : absl::OkStatus());
  std::lock_guard lock(mutex_);
  End(message, message->cut ? absl::UnavailableError("link lost") : absl::OkStatus());
}

void Network::Cut(std::unique_lock<std::mutex>&, const Epoch& a, const Epoch& b,
                  const absl::Status& cause) {
  if (links_.erase(PairOf(a, b)) == 0) return;
  for (const MessagePtr& message : std::list<MessagePtr>(messages_)) {
    if (PairOf(message->from, message->to) != PairOf(a, b)) continue;
    message->cut = true;
    if (message->state == Message::State::kQueued || message->state == Message::State::kOnWire) {
      End(message, absl::UnavailableError(std::string(cause.message())));
    } else if (message->state == Message::State::kHeld) {
      AnswerSender(message, absl::UnavailableError(std::string(cause.message())));
      Post(message->to, [this, message] { Copy(message); });
    }
  }
  for (const auto& [self, peer] : {std::pair(a, b), std::pair(b, a)}) {
    Endpoint* const endpoint = Find(self);
    if (endpoint == nullptr || endpoint->sink == nullptr) continue;
    untold_.insert(PairOf(a, b));
    Post(self,
         [this, sink = endpoint->sink, peer = peer, pair = PairOf(a, b), cause = Detached(cause)] {
           sink->OnPeerLost(peer, cause);
           std::lock_guard relock(mutex_);
           untold_.erase(untold_.find(pair));
           changed_.notify_all();
         });
  }
}

}  // namespace kv_transfer::loopback
