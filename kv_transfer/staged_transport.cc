#include "kv_transfer/staged_transport.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kv_transfer/message_header.h"
#include "kv_transfer/staging_slots.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kv_transfer {
namespace {

using Done = std::function<void(absl::Status)>;

// What goes to and comes from a peer until its link is lost; a later link to it is another one.
struct Link {
  explicit Link(const Epoch& to) : peer(to) {}
  const Epoch peer;
  struct Queued {
    MessageHeader header;
    absl::Span<const std::byte> data;  // the device's
    Done done;
  };
  std::deque<Queued> queue;  // sends without a slot
  int32_t num_sending = 0;   // with one
  int32_t num_landing = 0;   // receives that were accepted and have not been reported
  bool lost = false;
  absl::Status cause;

  bool idle() const { return queue.empty() && num_sending == 0 && num_landing == 0; }
};
using LinkPtr = std::shared_ptr<Link>;

struct Sending {
  LinkPtr link;
  Link::Queued message;
  std::byte* slot;
};

struct Landing {
  LinkPtr link;
  MessageHeader header;
  absl::Span<std::byte> destination;  // the device's
  std::byte* slot;                    // null: the link writes to the destination
};

// Of two messages that are alike either may take the other's slot: their bytes are the same ones.
using Key = std::tuple<Epoch, TransferId, uint32_t, MessageKind, uint32_t, uint32_t>;
Key KeyOf(const Epoch& sender, const MessageHeader& header) {
  return {sender, header.transfer_id, header.attempt, header.kind, header.index, header.part};
}

// A status of the thread that will use it: copies share a counted representation, and absl's
// counting is invisible to ThreadSanitizer.
absl::Status Detached(const absl::Status& status) { return {status.code(), status.message()}; }

class StagedTransport final : public Transport, private ReceiveSink {
 public:
  StagedTransport(std::unique_ptr<Transport> inner, kernels::DeviceCopies* copies,
                  int64_t slot_bytes)
      : copies_(copies), slots_(copies, slot_bytes), inner_(std::move(inner)) {
    FERRY_CHECK(slot_bytes > 0 && slot_bytes <= kMaxMessageBytes) << slot_bytes;
  }
  ~StagedTransport() override { Close(); }

  std::vector<LinkAddress> addresses() const override { return inner_->addresses(); }

  absl::Status Register(absl::Span<std::byte> region, MemoryKind kind) override {
    return inner_->Register(region, kind);
  }

  void SetSink(ReceiveSink* sink) override {
    sink_ = sink;
    inner_->SetSink(this);
  }

  absl::Status Connect(const Epoch& peer, absl::Span<const LinkAddress> peer_addresses,
                       absl::Duration timeout) override {
    RETURN_IF_ERROR(inner_->Connect(peer, peer_addresses, timeout));
    if (inner_->TakesDeviceMemory(peer)) return absl::OkStatus();
    int64_t num_peers = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      staged_peers_.insert(peer);
      num_peers = static_cast<int64_t>(staged_peers_.size());
    }
    // Until they are there each message that comes makes its own.
    return slots_.Provide(num_peers * kStagingSlotsPerPeer, [this](absl::Span<std::byte> memory) {
      return inner_->Register(memory, MemoryKind::kHost);
    });
  }

  std::string LinkName(const Epoch& peer) const override {
    const std::string name = inner_->LinkName(peer);
    return name.empty() || inner_->TakesDeviceMemory(peer) ? name : absl::StrCat(name, "+staged");
  }
  bool TakesDeviceMemory(const Epoch&) const override { return true; }

  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            Done done) override {
    // The inner transport says what is wrong with a length before it reads a byte.
    if (data.empty() || header.length != data.size() || inner_->TakesDeviceMemory(peer)) {
      return inner_->Send(peer, header, data, std::move(done));
    }
    if (static_cast<int64_t>(data.size()) > slots_.slot_bytes()) {
      return done(absl::InvalidArgumentError(
          absl::StrCat("message of ", data.size(), " bytes, slots have ", slots_.slot_bytes())));
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!closed_) {
        LinkTo(peer)->queue.push_back({header, data, std::exchange(done, nullptr)});
      }
    }
    if (done) return done(absl::UnavailableError("the transport is closed"));
    Pump();
  }

  absl::Status Fence(const Epoch& peer, absl::Duration timeout) override {
    const auto deadline = std::chrono::steady_clock::now() +
                          absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24)));
    RETURN_IF_ERROR(inner_->Fence(peer, timeout));
    std::unique_lock<std::mutex> lock(mutex_);
    const bool landed = changed_.wait_until(lock, deadline, [&] {
      return std::none_of(losing_.begin(), losing_.end(),
                          [&](const LinkPtr& link) { return link->peer == peer; });
    });
    if (landed) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat("copies of what came from ", peer.ToHex(),
                                                    " have not ended within ",
                                                    absl::FormatDuration(timeout)));
  }

  TransportStats stats() const override { return inner_->stats(); }

  void Close() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    inner_->Close();
    // What had a slot ends by itself: the inner transport takes nothing any more.
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock,
                  [this] { return links_.empty() && losing_.empty() && num_under_way_ == 0; });
  }

 private:
  LinkPtr& LinkTo(const Epoch& peer) {  // mutex_ is held
    LinkPtr& link = links_[peer];
    if (link == nullptr) link = std::make_shared<Link>(peer);
    return link;
  }

  // After a change of its counts.  mutex_ is held.
  void ForgetIfIdle(const LinkPtr& link) {
    if (!link->lost && link->idle()) links_.erase(link->peer);
    changed_.notify_all();
  }

  // Starts the copies that the windows allow.
  void Pump() {
    std::vector<std::shared_ptr<Sending>> ready;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [peer, link] : links_) {
        while (!link->queue.empty() && link->num_sending < kSendWindow) {
          std::byte* const slot = slots_.Take();
          ready.push_back(
              std::make_shared<Sending>(Sending{link, std::move(link->queue.front()), slot}));
          link->queue.pop_front();
          ++link->num_sending;
          ++num_under_way_;
        }
      }
    }
    for (const std::shared_ptr<Sending>& one : ready) {
      if (one->slot == nullptr) {
        FinishSend(*one, absl::ResourceExhaustedError("no memory for copies of the device"));
        continue;
      }
      const absl::Span<const std::byte> data = one->message.data;
      copies_->ToHost({one->slot, data.size()}, data.data(),
                      [this, one](absl::Status status) { OnStaged(one, std::move(status)); });
    }
  }

  void OnStaged(const std::shared_ptr<Sending>& one, absl::Status status) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (status.ok() && one->link->lost) status = Lost(*one->link);
    }
    if (!status.ok()) return FinishSend(*one, std::move(status));
    inner_->Send(one->link->peer, one->message.header, {one->slot, one->message.data.size()},
                 [this, one](absl::Status sent) { FinishSend(*one, std::move(sent)); });
  }

  void FinishSend(Sending& one, absl::Status status) {
    if (one.slot != nullptr) slots_.Return(one.slot);
    one.message.done(std::move(status));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      --one.link->num_sending;
      ForgetIfIdle(one.link);
    }
    Pump();
    Leave();
  }

  // The last thing that a callback does here: Close may return from now on.
  void Leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    --num_under_way_;
    changed_.notify_all();
  }

  static absl::Status Lost(const Link& link) {  // mutex_ is held
    return absl::UnavailableError(
        absl::StrCat("link to ", link.peer.ToHex(), ": ", std::string(link.cause.message())));
  }

  // ReceiveSink: on the inner transport's progress thread.

  absl::StatusOr<absl::Span<std::byte>> OnOffer(const Epoch& sender,
                                                const MessageHeader& header) override {
    if (header.length == 0) return sink_->OnOffer(sender, header);
    if (header.length > static_cast<uint64_t>(slots_.slot_bytes())) {
      return absl::InvalidArgumentError(
          absl::StrCat("message of ", header.length, " bytes, slots have ", slots_.slot_bytes()));
    }
    const bool direct = inner_->TakesDeviceMemory(sender);
    std::byte* const slot = direct ? nullptr : slots_.Take();
    if (slot == nullptr && !direct) {
      return absl::ResourceExhaustedError("no memory for copies of the device");
    }
    const absl::StatusOr<absl::Span<std::byte>> destination = sink_->OnOffer(sender, header);
    if (!destination.ok()) {
      if (!direct) slots_.Return(slot);
      return destination.status();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const LinkPtr& link = LinkTo(sender);
    ++link->num_landing;
    ++num_under_way_;
    landings_.emplace(KeyOf(sender, header),
                      std::make_shared<Landing>(Landing{link, header, *destination, slot}));
    return direct ? *destination : absl::Span<std::byte>(slot, header.length);
  }

  void OnReceived(const Epoch& sender, const MessageHeader& header, absl::Status status) override {
    if (header.length == 0) return sink_->OnReceived(sender, header, std::move(status));
    std::shared_ptr<Landing> one;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto it = landings_.find(KeyOf(sender, header));
      FERRY_CHECK(it != landings_.end()) << Cargo(header) << " was not accepted";
      one = it->second;
      landings_.erase(it);
    }
    if (one->slot == nullptr && !status.ok()) {
      // UCX gives up a receive that its copy on the device may still be working on.
      return copies_->Settle([this, one, cause = Detached(status)](const absl::Status&) {
        FinishLanding(*one, Detached(cause));
      });
    }
    if (one->slot == nullptr || !status.ok()) return FinishLanding(*one, std::move(status));
    copies_->ToDevice(one->destination.data(), {one->slot, one->destination.size()},
                      [this, one](absl::Status copied) { FinishLanding(*one, std::move(copied)); });
  }

  void FinishLanding(Landing& one, absl::Status status) {
    if (one.slot != nullptr) slots_.Return(one.slot);
    sink_->OnReceived(one.link->peer, one.header, std::move(status));
    bool last = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      last = --one.link->num_landing == 0 && one.link->lost;
      ForgetIfIdle(one.link);
    }
    if (last) TellLost(one.link);
    Leave();
  }

  void OnPeerLost(const Epoch& peer, absl::Status cause) override {
    LinkPtr link;
    std::deque<Link::Queued> queue;
    bool landed = true;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      staged_peers_.erase(peer);
      if (const auto it = links_.find(peer); it != links_.end()) {
        link = it->second;
        links_.erase(it);
      } else {
        link = std::make_shared<Link>(peer);
      }
      link->lost = true;
      link->cause = std::move(cause);
      queue.swap(link->queue);
      landed = link->num_landing == 0;
      losing_.push_back(link);
    }
    for (Link::Queued& one : queue) {
      one.done(absl::UnavailableError(absl::StrCat("link to ", peer.ToHex(), " is lost")));
    }
    if (landed) TellLost(link);
  }

  void TellLost(const LinkPtr& link) {
    sink_->OnPeerLost(link->peer, Detached(link->cause));
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(losing_, link);
    changed_.notify_all();
  }

  kernels::DeviceCopies* const copies_;
  StagingSlots slots_;
  const std::unique_ptr<Transport> inner_;  // has the slots' memory registered
  ReceiveSink* sink_ = nullptr;

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::map<Epoch, LinkPtr> links_;                         // with anything under way, not lost
  std::vector<LinkPtr> losing_;                            // lost, and the sink has not been told
  std::set<Epoch> staged_peers_;                           // connected
  std::multimap<Key, std::shared_ptr<Landing>> landings_;  // accepted, not arrived
  int32_t num_under_way_ = 0;  // messages with a slot; their callbacks use this object
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<Transport> CreateStagedTransport(std::unique_ptr<Transport> inner,
                                                 kernels::DeviceCopies* copies,
                                                 int64_t slot_bytes) {
  return std::make_unique<StagedTransport>(std::move(inner), copies, slot_bytes);
}

}  // namespace kv_transfer
