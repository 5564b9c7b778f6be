#include "kv_transfer/incoming_transfers.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kv_transfer/arrivals.h"
#include "kv_transfer/message_header.h"
#include "status/check.h"

namespace kv_transfer {
namespace {

using Clock = std::chrono::steady_clock;
using OnEnd = std::function<void(IncomingResult)>;

// How long one attempt to fence may hold the timer thread; it is repeated until the fence stands.
constexpr absl::Duration kFenceAttempt = absl::Milliseconds(250);

std::string Hex(const TransferId& id) {
  return absl::BytesToHexString(
      std::string(reinterpret_cast<const char*>(id.data()), id.size()));  // absl's own string_view
}

Clock::time_point After(Clock::time_point from, absl::Duration wait) {
  // A day stands for ever, so that an infinite duration does not overflow the clock.
  return from + absl::ToChronoNanoseconds(std::min(wait, absl::Hours(24)));
}

struct Transfer {
  IncomingSpec spec;
  OnEnd on_end;
  Arrivals arrivals;
  bool announced = false;
  absl::Status cause;  // of its failure; OK while it is receiving
  Clock::time_point stall_at;
  Clock::time_point total_at;
  Clock::time_point fence_at = Clock::time_point::max();  // once it has failed
  Clock::time_point first_offer{};
  Clock::time_point last_receive{};
};

class IncomingTransfersImpl final : public IncomingTransfers, public ReceiveSink {
 public:
  IncomingTransfersImpl(const Epoch& own_epoch, Transport* transport)
      : own_epoch_(own_epoch), transport_(transport), timer_([this] { RunTimer(); }) {
    transport->SetSink(this);
  }

  ~IncomingTransfersImpl() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    timer_.join();
    std::vector<Ended> ended;
    {
      std::lock_guard lock(mutex_);
      ended = std::exchange(ended_, {});
      while (!transfers_.empty()) {
        Transfer& transfer = transfers_.begin()->second;
        FERRY_CHECK(transfer.arrivals.num_started() == 0) << "the transport is still open";
        if (transfer.cause.ok()) transfer.cause = absl::CancelledError("the receiver shuts down");
        ended.push_back(Take(transfers_.begin()));
      }
    }
    for (Ended& one : ended) one.on_end(std::move(one.result));
  }

  absl::Status Expect(IncomingSpec spec, OnEnd on_end) override {
    const Clock::time_point now = Clock::now();
    {
      std::lock_guard lock(mutex_);
      if (transfers_.contains(spec.transfer_id)) {
        return absl::AlreadyExistsError(absl::StrCat("transfer ", Hex(spec.transfer_id)));
      }
      Transfer transfer{.spec = std::move(spec),
                        .on_end = std::move(on_end),
                        .arrivals = {},
                        .cause = {},
                        .stall_at = {},
                        .total_at = {}};
      transfer.arrivals = Arrivals(transfer.spec.blocks, transfer.spec.state_slot);
      transfer.stall_at = After(now, transfer.spec.stall_timeout);
      transfer.total_at = After(now, transfer.spec.total_timeout);
      const TransferId id = transfer.spec.transfer_id;
      transfers_.emplace(id, std::move(transfer));
    }
    wake_.notify_all();  // its deadlines may be the next ones
    return absl::OkStatus();
  }

  absl::Status Announce(const TransferId& id, int32_t num_blocks, uint64_t num_bytes) override {
    absl::Status status;
    {
      std::lock_guard lock(mutex_);
      const auto it = transfers_.find(id);
      if (it == transfers_.end()) return absl::NotFoundError(absl::StrCat("transfer ", Hex(id)));
      Transfer& transfer = it->second;
      if (!transfer.cause.ok()) return Failed(transfer);
      if (num_blocks != transfer.arrivals.num_blocks() ||
          num_bytes != transfer.arrivals.total_bytes()) {
        const std::string message =
            absl::StrCat("transfer ", Hex(id), ": the sender announces ", num_blocks,
                         " blocks and ", num_bytes, " bytes, reserved were ",
                         transfer.arrivals.num_blocks(), " and ", transfer.arrivals.total_bytes());
        status = absl::DataLossError(message);
        Fail(it, absl::DataLossError(message), Clock::now());
      } else {
        transfer.announced = true;
        if (transfer.arrivals.complete()) ended_.push_back(Take(it));
      }
    }
    wake_.notify_all();
    return status;
  }

  bool Abort(const TransferId& id, absl::Status cause, absl::Duration grace) override {
    FERRY_CHECK(!cause.ok()) << "a transfer is aborted for a reason";
    {
      std::lock_guard lock(mutex_);
      const auto it = transfers_.find(id);
      if (it == transfers_.end()) return false;
      Fail(it, std::move(cause), After(Clock::now(), grace));
    }
    wake_.notify_all();
    return true;
  }

  void AbortPeer(const Epoch& sender, absl::Status cause) override {
    FERRY_CHECK(!cause.ok()) << "a peer is aborted for a reason";
    {
      std::lock_guard lock(mutex_);
      FailAllOf(sender, cause);
      to_fence_.insert(sender);
    }
    wake_.notify_all();
  }

  IncomingCounts counts() const override {
    std::lock_guard lock(mutex_);
    IncomingCounts counts;
    for (const auto& [id, transfer] : transfers_) {
      ++(transfer.cause.ok() ? counts.receiving : counts.quarantined);
    }
    return counts;
  }

  // ReceiveSink: on the transport's progress thread.

  absl::StatusOr<absl::Span<std::byte>> OnOffer(const Epoch& sender,
                                                const MessageHeader& header) override {
    if (header.receiver_epoch != own_epoch_) {
      return absl::FailedPreconditionError(
          absl::StrCat("stale epoch ", header.receiver_epoch.ToHex()));
    }
    std::lock_guard lock(mutex_);
    const auto it = transfers_.find(header.transfer_id);
    if (it == transfers_.end()) {
      return absl::NotFoundError(absl::StrCat("transfer ", Hex(header.transfer_id)));
    }
    Transfer& transfer = it->second;
    if (!transfer.cause.ok()) return Failed(transfer);
    if (sender != transfer.spec.sender) {
      return absl::FailedPreconditionError(
          absl::StrCat("transfer ", Hex(header.transfer_id), " is not of ", sender.ToHex()));
    }
    if (header.attempt != transfer.spec.attempt) {
      return absl::FailedPreconditionError(
          absl::StrCat("stale attempt ", header.attempt, ", current is ", transfer.spec.attempt));
    }
    if (header.slot != 0 || header.kind > MessageKind::kHeartbeat) {
      return absl::InvalidArgumentError("a message between staged transports");
    }
    if (header.kind == MessageKind::kHeartbeat) {
      if (header.length != 0) {
        return absl::InvalidArgumentError(absl::StrCat("heartbeat of ", header.length, " bytes"));
      }
      // What has been started comes without the sender's doing, or is stuck.
      if (transfer.arrivals.num_started() == 0) {
        transfer.stall_at = After(Clock::now(), transfer.spec.stall_timeout);
      }
      return absl::Span<std::byte>();
    }
    absl::StatusOr<absl::Span<std::byte>> destination = transfer.arrivals.Start(header);
    if (destination.ok() && transfer.first_offer == Clock::time_point{}) {
      transfer.first_offer = Clock::now();
    }
    return destination;
  }

  void OnReceived(const Epoch&, const MessageHeader& header, absl::Status status) override {
    if (header.kind == MessageKind::kHeartbeat) return;  // its transfer may have ended meanwhile
    std::vector<Ended> ended;
    {
      std::lock_guard lock(mutex_);
      const auto it = transfers_.find(header.transfer_id);
      // A started receive keeps its transfer in the map.
      FERRY_CHECK(it != transfers_.end()) << "received for unknown " << Hex(header.transfer_id);
      Transfer& transfer = it->second;
      transfer.arrivals.Finish(header, status.ok());
      if (status.ok()) {
        transfer.last_receive = Clock::now();
        transfer.stall_at = After(transfer.last_receive, transfer.spec.stall_timeout);
      } else if (transfer.cause.ok()) {
        transfer.cause =
            absl::AbortedError(absl::StrCat(Cargo(header), ": ", std::string(status.message())));
        transfer.fence_at = Clock::now();
        wake_.notify_all();
      }
      const bool confirmed =
          transfer.cause.ok() && transfer.announced && transfer.arrivals.complete();
      const bool drained = !transfer.cause.ok() && transfer.arrivals.num_started() == 0;
      if (confirmed || drained) ended.push_back(Take(it));
    }
    for (Ended& one : ended) one.on_end(std::move(one.result));
  }

  void OnPeerLost(const Epoch& peer, absl::Status cause) override {
    std::vector<Ended> ended;
    {
      std::lock_guard lock(mutex_);
      FailAllOf(peer, absl::AbortedError(absl::StrCat("link to ", peer.ToHex(),
                                                      " lost: ", std::string(cause.message()))));
      ended = std::exchange(ended_, {});
    }
    for (Ended& one : ended) one.on_end(std::move(one.result));
  }

 private:
  using Map = absl::flat_hash_map<TransferId, Transfer>;
  struct Ended {
    OnEnd on_end;
    IncomingResult result;
  };

  // Not the cause itself: copies of a status share a counter, and the timer thread may release one
  // while the caller's thread does; absl's counting is invisible to ThreadSanitizer.
  static absl::Status Failed(const Transfer& transfer) {  // mutex_ is held
    return absl::AbortedError(absl::StrCat("transfer ", Hex(transfer.spec.transfer_id),
                                           " has failed: ", std::string(transfer.cause.message())));
  }

  // Takes a transfer without started receives out of the map.  mutex_ is held; the caller calls
  // on_end after releasing it.
  Ended Take(Map::iterator it) {
    Transfer& transfer = it->second;
    Ended ended{.on_end = std::move(transfer.on_end),
                .result = {.status = transfer.cause,
                           .bytes = transfer.arrivals.arrived_bytes(),
                           .blocks = transfer.arrivals.arrived_blocks(),
                           .first_to_last = absl::ZeroDuration()}};
    if (transfer.last_receive > transfer.first_offer) {
      ended.result.first_to_last = absl::FromChrono(transfer.last_receive - transfer.first_offer);
    }
    transfers_.erase(it);
    return ended;
  }

  // mutex_ is held.  A transfer that has failed already keeps its first cause; an earlier fence
  // wins.
  void Fail(Map::iterator it, absl::Status cause, Clock::time_point fence_at) {
    Transfer& transfer = it->second;
    if (transfer.cause.ok()) transfer.cause = std::move(cause);
    transfer.fence_at = std::min(transfer.fence_at, fence_at);
    if (transfer.arrivals.num_started() == 0) ended_.push_back(Take(it));
  }

  void FailAllOf(const Epoch& sender, const absl::Status& cause) {  // mutex_ is held
    std::vector<TransferId> ids;
    for (const auto& [id, transfer] : transfers_) {
      if (transfer.spec.sender == sender) ids.push_back(id);
    }
    for (const TransferId& id : ids) {
      Fail(transfers_.find(id), absl::Status(cause.code(), cause.message()), Clock::now());
    }
  }

  // Ends transfers whose time is over, asks for the fences that are due and returns when to look
  // again. mutex_ is held.
  Clock::time_point CheckDeadlines(Clock::time_point now) {
    Clock::time_point next = now + std::chrono::hours(1);
    std::vector<std::pair<TransferId, absl::Status>> late;
    for (auto& [id, transfer] : transfers_) {
      if (!transfer.cause.ok()) {
        if (transfer.fence_at <= now) {
          to_fence_.insert(transfer.spec.sender);
        } else {
          next = std::min(next, transfer.fence_at);
        }
      } else if (transfer.total_at <= now || transfer.stall_at <= now) {
        const bool stalled = transfer.total_at > now;
        late.emplace_back(id,
                          absl::AbortedError(absl::StrCat(
                              "transfer ", Hex(id), stalled ? " stalled for " : " took more than ",
                              absl::FormatDuration(stalled ? transfer.spec.stall_timeout
                                                           : transfer.spec.total_timeout),
                              ", ", transfer.arrivals.arrived_bytes(), " of ",
                              transfer.arrivals.total_bytes(), " bytes arrived")));
      } else {
        next = std::min({next, transfer.total_at, transfer.stall_at});
      }
    }
    for (auto& [id, cause] : late) {
      const auto it = transfers_.find(id);
      // Without a started receive nothing can land, and the link is left alone.
      if (it->second.arrivals.num_started() > 0) to_fence_.insert(it->second.spec.sender);
      Fail(it, std::move(cause), now);
    }
    return next;
  }

  void RunTimer() {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      const Clock::time_point next = CheckDeadlines(Clock::now());
      if (ended_.empty() && to_fence_.empty()) {
        wake_.wait_until(lock, next);
        continue;
      }
      std::vector<Ended> ended = std::exchange(ended_, {});
      const std::set<Epoch> to_fence = std::exchange(to_fence_, {});
      lock.unlock();
      for (Ended& one : ended) one.on_end(std::move(one.result));
      // The receives that a fence completes come back through OnReceived and end their transfers
      // there. If it does not stand yet, their fence_at is still due and the next round tries
      // again.
      for (const Epoch& sender : to_fence) {
        if (!transport_->Fence(sender, kFenceAttempt).ok()) {
          std::lock_guard relock(mutex_);
          to_fence_.insert(sender);
        }
      }
      lock.lock();
    }
  }

  const Epoch own_epoch_;
  Transport* const transport_;

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable wake_;
  Map transfers_;
  std::vector<Ended> ended_;  // out of the map; the timer thread calls their on_end
  std::set<Epoch> to_fence_;
  bool stop_ = false;

  std::thread timer_;  // last: it starts when everything else exists
};

}  // namespace

std::unique_ptr<IncomingTransfers> CreateIncomingTransfers(const Epoch& own_epoch,
                                                           Transport* transport) {
  return std::make_unique<IncomingTransfersImpl>(own_epoch, transport);
}

}  // namespace kv_transfer
