#include "kv_transfer/staged_transport.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kv_transfer/message_header.h"
#include "kv_transfer/slot_peers.h"
#include "kv_transfer/staged_sends.h"
#include "kv_transfer/staging_slots.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kv_transfer {
namespace {

// What comes from a peer until its link is lost; a later link to it is another one.
struct Link {
  explicit Link(const Epoch& from) : peer(from) {}
  const Epoch peer;
  int32_t num_landing = 0;  // receives that were accepted and have not been reported
  bool lost = false;
  absl::Status cause;
};
using LinkPtr = std::shared_ptr<Link>;

struct Landing {
  LinkPtr link;
  MessageHeader header;
  absl::Span<std::byte> destination;  // the device's
  const std::byte* slot;              // null: the link writes to the destination
  std::byte* own_slot;                // the same if it is ours, null if it is the sender's
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
                  int64_t slot_bytes, std::unique_ptr<SharedSlots> shared)
      : copies_(copies),
        slots_(copies, slot_bytes),
        shared_(copies, std::move(shared)),
        inner_(std::move(inner)),
        sends_(inner_.get(), copies, &slots_, &shared_) {
    FERRY_CHECK(slot_bytes > 0 && slot_bytes <= kMaxMessageBytes) << slot_bytes;
  }
  ~StagedTransport() override { Close(); }

  std::vector<LinkAddress> addresses() const override {
    std::vector<LinkAddress> addresses = inner_->addresses();
    shared_.Offer(addresses);
    return addresses;
  }

  absl::Status Register(absl::Span<std::byte> region, MemoryKind kind) override {
    return inner_->Register(region, kind);
  }

  void SetSink(ReceiveSink* sink) override {
    sink_ = sink;
    inner_->SetSink(this);
  }

  absl::Status Connect(const Epoch& peer, absl::Span<const LinkAddress> peer_addresses,
                       absl::Duration timeout) override {
    bool is_new = false;
    int64_t num_peers = 0;
    {
      // Before there is a link: its loss may come before Connect has returned.
      const std::lock_guard<std::mutex> lock(mutex_);
      is_new = staged_peers_.insert(peer).second;
      num_peers = static_cast<int64_t>(staged_peers_.size());
    }
    const absl::Status connected = inner_->Connect(peer, peer_addresses, timeout);
    if (!connected.ok() || inner_->TakesDeviceMemory(peer)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (is_new) staged_peers_.erase(peer);
      return connected;
    }
    if (ReadSlotsOf(peer, peer_addresses)) return absl::OkStatus();
    // Until they are there each message that comes makes its own.
    return slots_.Provide(num_peers * kStagingSlotsPerPeer, [this](absl::Span<std::byte> memory) {
      return inner_->Register(memory, MemoryKind::kHost);
    });
  }

  std::string LinkName(const Epoch& peer) const override {
    const std::string name = inner_->LinkName(peer);
    if (name.empty() || inner_->TakesDeviceMemory(peer)) return name;
    return absl::StrCat(name,
                        shared_.ReadsOurs(peer) || shared_.WeRead(peer) ? "+shared" : "+staged");
  }
  bool TakesDeviceMemory(const Epoch&) const override { return true; }

  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            StagedSends::Done done) override {
    // The inner transport says what is wrong with a length before it reads a byte.
    if (data.empty() || header.length != data.size() || inner_->TakesDeviceMemory(peer)) {
      return inner_->Send(peer, header, data, std::move(done));
    }
    if (static_cast<int64_t>(data.size()) > slots_.slot_bytes()) {
      return done(absl::InvalidArgumentError(
          absl::StrCat("message of ", data.size(), " bytes, slots have ", slots_.slot_bytes())));
    }
    sends_.Send(peer, header, data, std::move(done));
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
    sends_.Close();
    inner_->Close();
    // What had a slot ends by itself: the inner transport takes nothing any more.
    sends_.Wait();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return links_.empty() && losing_.empty() && num_landing_ == 0; });
  }

 private:
  // Maps what the peer offers and tells it so.  False: it offers nothing that we can read.
  bool ReadSlotsOf(const Epoch& peer, absl::Span<const LinkAddress> peer_addresses) {
    if (!shared_.WeRead(peer)) {
      absl::StatusOr<std::shared_ptr<const PeerSlots>> slots =
          shared_.Open(inner_->addresses(), peer_addresses);
      if (!slots.ok()) return false;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!staged_peers_.contains(peer)) return true;  // lost meanwhile
      shared_.Add(peer, *std::move(slots));
    }
    MessageHeader note;
    note.kind = MessageKind::kSlotsMapped;
    note.receiver_epoch = peer;
    inner_->Send(peer, note, {}, [](const absl::Status&) {});
    return true;
  }

  // ReceiveSink: on the inner transport's progress thread.

  absl::StatusOr<absl::Span<std::byte>> OnOffer(const Epoch& sender,
                                                const MessageHeader& header) override {
    if (header.kind > MessageKind::kHeartbeat) return OnNote(sender, header);
    if (header.slot != 0) return OnOfferInSlot(sender, header);
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
    Land(sender, header, *destination, slot, slot);
    return direct ? *destination : absl::Span<std::byte>(slot, header.length);
  }

  // The bytes are there; the device may read them when the sink has said where to.
  absl::StatusOr<absl::Span<std::byte>> OnOfferInSlot(const Epoch& sender,
                                                      const MessageHeader& header) {
    const absl::Span<const std::byte> bytes = shared_.Find(sender, header.slot, header.length);
    MessageHeader told = header;  // as if it had come over the link
    told.slot = 0;
    absl::StatusOr<absl::Span<std::byte>> destination =
        bytes.empty() ? absl::InvalidArgumentError(absl::StrCat("no slot ", header.slot))
                      : sink_->OnOffer(sender, told);
    if (!destination.ok()) {
      Answer(sender, header, MessageKind::kSlotRefused);
      return destination.status();
    }
    Land(sender, header, *destination, bytes.data(), nullptr);
    return absl::Span<std::byte>();
  }

  void Land(const Epoch& sender, const MessageHeader& header, absl::Span<std::byte> destination,
            const std::byte* slot, std::byte* own_slot) {
    const std::lock_guard<std::mutex> lock(mutex_);
    LinkPtr& link = links_[sender];
    if (link == nullptr) link = std::make_shared<Link>(sender);
    ++link->num_landing;
    ++num_landing_;
    landings_.emplace(KeyOf(sender, header), std::make_shared<Landing>(Landing{
                                                 link, header, destination, slot, own_slot}));
  }

  void Answer(const Epoch& sender, const MessageHeader& header, MessageKind kind) {
    MessageHeader answer = header;
    answer.kind = kind;
    answer.receiver_epoch = sender;
    answer.length = 0;
    inner_->Send(sender, answer, {}, [](const absl::Status&) {});  // if not, the link is lost
  }

  // What staged transports tell one another; nothing follows it.
  absl::StatusOr<absl::Span<std::byte>> OnNote(const Epoch& sender, const MessageHeader& note) {
    if (note.length != 0) return absl::InvalidArgumentError("a note with bytes");
    if (note.kind == MessageKind::kSlotsMapped) {
      shared_.AddReader(sender);
    } else {
      sends_.OnAnswer(sender, note);
    }
    return absl::Span<std::byte>();
  }

  void OnReceived(const Epoch& sender, const MessageHeader& header, absl::Status status) override {
    if (header.kind > MessageKind::kHeartbeat) return;
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
    if (one.own_slot != nullptr) slots_.Return(one.own_slot);
    if (one.header.slot != 0) {
      Answer(one.link->peer, one.header, MessageKind::kSlotRead);
      one.header.slot = 0;
    }
    sink_->OnReceived(one.link->peer, one.header, std::move(status));
    bool last = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      last = --one.link->num_landing == 0;
      if (last && !one.link->lost) links_.erase(one.link->peer);
      last &= one.link->lost;
    }
    if (last) TellLost(one.link);
    // The last thing that a callback does here: Close may return from now on.
    const std::lock_guard<std::mutex> lock(mutex_);
    --num_landing_;
    changed_.notify_all();
  }

  void OnPeerLost(const Epoch& peer, absl::Status cause) override {
    sends_.OnPeerLost(peer, cause);
    LinkPtr link;
    bool landed = true;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      staged_peers_.erase(peer);
      shared_.Lose(peer);
      if (const auto it = links_.find(peer); it != links_.end()) {
        link = it->second;
        links_.erase(it);
      } else {
        link = std::make_shared<Link>(peer);
      }
      link->lost = true;
      link->cause = Detached(cause);
      landed = link->num_landing == 0;
      losing_.push_back(link);
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
  SlotPeers shared_;
  const std::unique_ptr<Transport> inner_;  // has the slots' memory registered
  StagedSends sends_;
  ReceiveSink* sink_ = nullptr;

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::map<Epoch, LinkPtr> links_;                         // with anything landing, not lost
  std::vector<LinkPtr> losing_;                            // lost, and the sink has not been told
  std::set<Epoch> staged_peers_;                           // connected
  std::multimap<Key, std::shared_ptr<Landing>> landings_;  // accepted, not arrived
  int32_t num_landing_ = 0;  // of all links; their callbacks use this object
};

}  // namespace

std::unique_ptr<Transport> CreateStagedTransport(std::unique_ptr<Transport> inner,
                                                 kernels::DeviceCopies* copies, int64_t slot_bytes,
                                                 std::unique_ptr<SharedSlots> shared) {
  FERRY_CHECK(shared == nullptr || shared->slot_bytes() >= slot_bytes);
  return std::make_unique<StagedTransport>(std::move(inner), copies, slot_bytes, std::move(shared));
}

}  // namespace kv_transfer
