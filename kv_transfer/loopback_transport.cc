#include "kv_transfer/loopback_transport.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "status/check.h"

namespace kv_transfer {
namespace {

using Done = std::function<void(absl::Status)>;
using Pair = std::pair<Epoch, Epoch>;  // the smaller epoch first

// A status of the thread that will use it.  Copies share one counted representation, and absl's
// counting is not instrumented: ThreadSanitizer would call its release a race.
absl::Status Detached(const absl::Status& status) { return {status.code(), status.message()}; }

Pair PairOf(const Epoch& a, const Epoch& b) { return a < b ? Pair{a, b} : Pair{b, a}; }

// One process's end: its queue of things to do on its progress thread.
struct Endpoint {
  ReceiveSink* sink = nullptr;
  std::deque<std::function<void()>> todo;
  std::condition_variable wake;
  bool suspended = false;
  bool killed = false;
  bool stop = false;
  TransportStats stats;
};

// A message between Send and its last callback.
struct Message {
  enum class State {
    kQueued,   // waits for the sender's window
    kOnWire,   // the receiver has not been asked yet
    kHeld,     // accepted; its bytes wait for ReleaseDelayed
    kCopying,  // the receiver's thread is in a callback or copies; Cut waits for it
    kEnded,
  };
  Epoch from, to;
  std::shared_ptr<Endpoint> receiver;
  MessageHeader header;
  absl::Span<const std::byte> data;
  Done done;  // null once it is called, and for the second copy of a duplicate
  std::vector<std::byte> own_data;  // of that second copy: the sender's may be gone by then
  LoopbackFault fault = LoopbackFault::kNone;
  State state = State::kQueued;
  bool cut = false;  // the link went while the message was kCopying
  absl::Span<std::byte> destination;
};
using MessagePtr = std::shared_ptr<Message>;

class Network final : public LoopbackNetwork, public std::enable_shared_from_this<Network> {
 public:
  // LoopbackNetwork.

  void SetFaults(std::function<LoopbackFault(const MessageHeader&)> decide) override {
    std::lock_guard lock(mutex_);
    decide_ = decide ? std::make_shared<Decide>(std::move(decide)) : nullptr;
  }

  void ReleaseDelayed() override {
    std::lock_guard lock(mutex_);
    for (const MessagePtr& message : messages_) {
      if (message->state == Message::State::kHeld) {
        Post(message->to, [this, message] { Copy(message); });
      }
    }
    ReleaseReordered();
  }

  void Suspend(const Epoch& epoch) override {
    std::lock_guard lock(mutex_);
    if (Endpoint* const endpoint = Find(epoch)) endpoint->suspended = true;
  }

  void Resume(const Epoch& epoch) override {
    std::lock_guard lock(mutex_);
    Endpoint* const endpoint = Find(epoch);
    if (endpoint == nullptr) return;
    endpoint->suspended = false;
    endpoint->wake.notify_all();
    for (const MessagePtr& message : messages_) {  // those that waited on the wire
      if (message->from == epoch && message->state == Message::State::kOnWire) PostOffer(message);
    }
  }

  void Kill(const Epoch& epoch) override {
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

  // For the transports.

  std::shared_ptr<Endpoint> Join(const Epoch& epoch) {
    std::lock_guard lock(mutex_);
    auto endpoint = std::make_shared<Endpoint>();
    FERRY_CHECK(endpoints_.emplace(epoch, endpoint).second) << "epoch " << epoch.ToHex();
    return endpoint;
  }

  void Leave(const Epoch& epoch) {
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

  absl::Status Connect(const Epoch& self, const Epoch& peer) {
    std::lock_guard lock(mutex_);
    Endpoint* const endpoint = Find(peer);
    if (endpoint == nullptr || endpoint->killed) {
      return absl::UnavailableError(absl::StrCat("no process with epoch ", peer.ToHex()));
    }
    links_.insert(PairOf(self, peer));
    return absl::OkStatus();
  }

  bool Connected(const Epoch& self, const Epoch& peer) const {
    std::lock_guard lock(mutex_);
    return links_.contains(PairOf(self, peer));
  }

  void Send(const Epoch& from, const Epoch& to, const MessageHeader& header,
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
    if (header.length != data.size() || data.size() > static_cast<size_t>(kMaxMessageBytes)) {
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

  void Cut(const Epoch& self, const Epoch& peer, const absl::Status& cause) {
    std::unique_lock lock(mutex_);
    Cut(lock, self, peer, cause);
  }

  TransportStats stats(const Endpoint& endpoint) const {
    std::lock_guard lock(mutex_);
    return endpoint.stats;
  }
  void CountFence(Endpoint* endpoint) {
    std::lock_guard lock(mutex_);
    ++endpoint->stats.fences;
  }
  void SetSink(Endpoint* endpoint, ReceiveSink* sink) {
    std::lock_guard lock(mutex_);
    endpoint->sink = sink;
  }

  // Runs `call` on self's progress thread after everything queued there, and waits for it.
  bool WaitForThread(const Epoch& self, absl::Duration timeout) {
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

  // The progress thread of one endpoint.
  void Run(const std::shared_ptr<Endpoint>& endpoint) {
    std::unique_lock lock(mutex_);
    while (true) {
      endpoint->wake.wait(lock, [&] {
        return endpoint->stop || (!endpoint->suspended && !endpoint->todo.empty());
      });
      if (endpoint->todo.empty()) return;  // stopped, and all callbacks have been made
      const std::function<void()> call = std::move(endpoint->todo.front());
      endpoint->todo.pop_front();
      lock.unlock();
      call();
      lock.lock();
    }
  }

 private:
  using Decide = std::function<LoopbackFault(const MessageHeader&)>;

  // All below, unless they say so: mutex_ is held.

  Endpoint* Find(const Epoch& epoch) {
    const auto it = endpoints_.find(epoch);
    return it == endpoints_.end() ? nullptr : it->second.get();
  }

  void Post(const Epoch& epoch, std::function<void()> call) {
    if (Endpoint* const endpoint = Find(epoch)) {
      endpoint->todo.push_back(std::move(call));
      endpoint->wake.notify_all();
    }
  }

  void PostOffer(const MessagePtr& message) {
    Post(message->to, [this, message] { Offer(message); });
  }

  // Tells the sender, once, that its data is read no more.
  void AnswerSender(const MessagePtr& message, const absl::Status& status) {
    if (message->done == nullptr) return;
    if (Endpoint* const sender = Find(message->from)) {
      ++(status.ok() ? sender->stats.messages_sent : sender->stats.messages_failed);
      if (status.ok()) sender->stats.bytes_sent += message->header.length;
    }
    Post(message->from,
         [done = std::move(message->done), status = Detached(status)] { done(status); });
    message->done = nullptr;
  }

  void End(const MessagePtr& message, const absl::Status& status) {
    message->state = Message::State::kEnded;
    AnswerSender(message, status);
    messages_.remove(message);
    FillWindow(message->from, message->to);
    changed_.notify_all();
  }

  void FillWindow(const Epoch& from, const Epoch& to) {
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

  void PutOnWire(const MessagePtr& message) {
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

  void ReleaseReordered() {
    for (const MessagePtr& message : std::exchange(reordered_, {})) {
      if (message->state == Message::State::kOnWire) PostOffer(message);
    }
  }

  // On the receiver's progress thread, without the lock.
  void Offer(const MessagePtr& message) {
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
    absl::StatusOr<absl::Span<std::byte>> destination =
        sink->OnOffer(message->from, message->header);
    bool copy_now = false;
    {
      std::lock_guard lock(mutex_);
      if (!destination.ok()) {
        ++message->receiver->stats.messages_refused;
        End(message, message->cut ? absl::UnavailableError("link lost")
                                  : absl::AbortedError("refused by the receiver"));
        return;
      }
      FERRY_CHECK(destination->size() == message->header.length) << destination->size();
      message->destination = *destination;
      copy_now = message->fault != LoopbackFault::kDelay || message->cut;
      message->state = Message::State::kHeld;
    }
    if (copy_now) Copy(message);
  }

  // Ends an accepted message; on the receiver's progress thread, without the lock.
  void Copy(const MessagePtr& message) {
    ReceiveSink* sink = nullptr;
    bool cut = false;
    {
      std::lock_guard lock(mutex_);
      if (message->state != Message::State::kHeld) return;
      message->state = Message::State::kCopying;
      cut = message->cut;
      sink = message->receiver->sink;
    }
    if (!cut && !message->data.empty()) {
      std::memcpy(message->destination.data(), message->data.data(), message->data.size());
    }
    sink->OnReceived(message->from, message->header,
                     cut ? absl::UnavailableError("link lost") : absl::OkStatus());
    std::lock_guard lock(mutex_);
    TransportStats& stats = message->receiver->stats;
    ++(cut ? stats.messages_failed : stats.messages_received);
    if (!cut) stats.bytes_received += message->header.length;
    End(message, message->cut ? absl::UnavailableError("link lost") : absl::OkStatus());
  }

  // Ends the link.  Messages not offered end now, started receives end on their receiver's thread,
  // then both sides hear OnPeerLost.
  void Cut(std::unique_lock<std::mutex>&, const Epoch& a, const Epoch& b,
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
      Post(self, [sink = endpoint->sink, peer = peer, cause = Detached(cause)] {
        sink->OnPeerLost(peer, cause);
      });
    }
  }

  mutable std::mutex mutex_;  // guards everything below and every Endpoint and Message
  std::condition_variable changed_;
  std::shared_ptr<Decide> decide_;
  std::map<Epoch, std::shared_ptr<Endpoint>> endpoints_;
  std::set<Pair> links_;
  std::list<MessagePtr> messages_;  // in the order of Send
  std::vector<MessagePtr> reordered_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Network> network, const Epoch& epoch)
      : network_(std::move(network)),
        epoch_(epoch),
        endpoint_(network_->Join(epoch)),
        thread_([this] { network_->Run(endpoint_); }) {}
  ~LoopbackTransport() override { Close(); }

  std::vector<LinkAddress> addresses() const override {
    return {{.kind = "loopback",
             .host_id = "loopback",
             .worker_address = epoch_.ToBytes(),
             .listener = ""}};
  }
  absl::Status Register(absl::Span<std::byte>) override { return absl::OkStatus(); }
  void SetSink(ReceiveSink* sink) override { network_->SetSink(endpoint_.get(), sink); }

  absl::Status Connect(const Epoch& peer, absl::Span<const LinkAddress> peer_addresses,
                       absl::Duration) override {
    for (const LinkAddress& address : peer_addresses) {
      if (address.kind == "loopback") return network_->Connect(epoch_, peer);
    }
    return absl::FailedPreconditionError("no common link kind: this process has loopback");
  }
  std::string LinkName(const Epoch& peer) const override {
    return network_->Connected(epoch_, peer) ? "loopback" : "";
  }
  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            Done done) override {
    if (closed_) {
      done(absl::UnavailableError("the transport is closed"));
      return;
    }
    network_->Send(epoch_, peer, header, data, std::move(done));
  }
  absl::Status Fence(const Epoch& peer, absl::Duration timeout) override {
    network_->CountFence(endpoint_.get());
    network_->Cut(epoch_, peer, absl::UnavailableError("fenced"));
    // Started receives end on our thread; once it has passed them, they are over.
    if (!network_->WaitForThread(epoch_, timeout)) {
      return absl::DeadlineExceededError(absl::StrCat("fencing ", peer.ToHex()));
    }
    return absl::OkStatus();
  }
  TransportStats stats() const override { return network_->stats(*endpoint_); }
  void Close() override {
    if (!thread_.joinable()) return;
    closed_ = true;
    network_->Leave(epoch_);
    thread_.join();
  }

 private:
  const std::shared_ptr<Network> network_;
  const Epoch epoch_;
  const std::shared_ptr<Endpoint> endpoint_;
  std::atomic<bool> closed_{false};
  std::thread thread_;  // the progress thread
};

}  // namespace

std::shared_ptr<LoopbackNetwork> CreateLoopbackNetwork() { return std::make_shared<Network>(); }

std::unique_ptr<Transport> CreateLoopbackTransport(std::shared_ptr<LoopbackNetwork> network,
                                                   const Epoch& epoch) {
  auto* const own = dynamic_cast<Network*>(network.get());
  FERRY_CHECK(own != nullptr) << "a network of CreateLoopbackNetwork";
  return std::make_unique<LoopbackTransport>(own->shared_from_this(), epoch);
}

}  // namespace kv_transfer
