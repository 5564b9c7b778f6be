// Side: one worker's end of a transfer in tests: a transport, its incoming transfers, and waiting
// for what they report.

#ifndef TESTS_KV_TRANSFER_SIDE_H_
#define TESTS_KV_TRANSFER_SIDE_H_

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/outgoing_transfer.h"
#include "kv_transfer/transport.h"
#include "tests/kv_transfer/test_memory.h"

namespace kv_transfer {

// A value that another thread sets; waiting for it is bounded.  A handle: copies share the value,
// so a callback that comes late, after its test has failed, finds it alive.
template <typename T>
class Promised {
 public:
  void Set(T value) const {
    std::lock_guard lock(state_->mutex);
    ++state_->times;
    state_->value = std::move(value);
    state_->changed.notify_all();
  }
  // Nothing if it was not set in time.
  std::optional<T> Wait(absl::Duration timeout = absl::Seconds(20)) const {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                             [&] { return state_->value.has_value(); });
    return state_->value;
  }
  int times() const {
    std::lock_guard lock(state_->mutex);
    return state_->times;
  }

 private:
  struct State {
    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
    std::optional<T> value;
    int times = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

inline TransferId RandomId() { return Epoch::Random().bytes; }

// Bytes that depend on the seed and the position.
inline void FillPattern(absl::Span<std::byte> block, uint64_t seed) {
  uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;
  for (size_t i = 0; i < block.size(); i += sizeof(x)) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t mixed = x ^ (x >> 29);
    std::memcpy(block.data() + i, &mixed, std::min(sizeof(mixed), block.size() - i));
  }
}
inline constexpr std::byte kPoison{0xdd};

inline bool HasPattern(absl::Span<const std::byte> block, uint64_t seed) {
  std::vector<std::byte> expected(block.size());
  FillPattern(absl::MakeSpan(expected), seed);
  return block.empty() || std::memcmp(expected.data(), block.data(), block.size()) == 0;
}
// Bytes that are not poison.  Compared in chunks, as a sanitizer makes looking at each byte slow.
inline int64_t CountForeign(absl::Span<const std::byte> block) {
  static const std::vector<std::byte> poison(64 << 10, kPoison);
  int64_t foreign = 0;
  for (; !block.empty(); block.remove_prefix(std::min(poison.size(), block.size()))) {
    const auto chunk = block.subspan(0, poison.size());
    if (std::memcmp(chunk.data(), poison.data(), chunk.size()) == 0) continue;
    for (const std::byte b : chunk) foreign += b != kPoison;
  }
  return foreign;
}

// Blocks of TestMemory, each of its own length.
class Blocks {
 public:
  Blocks(int32_t count, size_t bytes) : Blocks(std::vector<size_t>(count, bytes)) {}
  explicit Blocks(const std::vector<size_t>& lengths) {
    for (const size_t length : lengths) {
      memory_.push_back(TestMemory::Get().Allocate(length));
      spans_.emplace_back(memory_.back()->data(), length);
    }
    Poison();
  }
  void Fill(uint64_t seed) {
    for (size_t i = 0; i < spans_.size(); ++i) {
      std::vector<std::byte> pattern(spans_[i].size());
      FillPattern(absl::MakeSpan(pattern), seed + i);
      TestMemory::Get().Write(spans_[i], pattern);
    }
  }
  void Poison() {
    for (const absl::Span<std::byte> block : spans_) {
      TestMemory::Get().Write(block, std::vector<std::byte>(block.size(), kPoison));
    }
  }
  bool HavePattern(uint64_t seed) const {
    for (size_t i = 0; i < spans_.size(); ++i) {
      if (!BlockHasPattern(i, seed + i)) return false;
    }
    return true;
  }
  bool BlockHasPattern(size_t i, uint64_t seed) const { return HasPattern(Bytes(i), seed); }
  int64_t Foreign() const {
    int64_t foreign = 0;
    for (size_t i = 0; i < spans_.size(); ++i) foreign += BlockForeign(i);
    return foreign;
  }
  int64_t BlockForeign(size_t i) const { return CountForeign(Bytes(i)); }
  const std::vector<absl::Span<std::byte>>& spans() const { return spans_; }
  absl::Span<std::byte> operator[](size_t i) { return spans_[i]; }
  int32_t size() const { return static_cast<int32_t>(spans_.size()); }
  uint64_t bytes() const {
    uint64_t bytes = 0;
    for (const absl::Span<std::byte> block : spans_) bytes += block.size();
    return bytes;
  }

 private:
  std::vector<std::byte> Bytes(size_t i) const {
    std::vector<std::byte> bytes(spans_[i].size());
    TestMemory::Get().Read(absl::MakeSpan(bytes), spans_[i]);
    return bytes;
  }

  std::vector<std::unique_ptr<kernels::Buffer>> memory_;
  std::vector<absl::Span<std::byte>> spans_;
};

// Passes everything on and lets a test wait until a number of messages has been received.
class ObservedTransport final : public Transport, public ReceiveSink {
 public:
  explicit ObservedTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  // True if `count` messages have been received since the start, within the time.
  bool WaitForReceived(uint64_t count, absl::Duration timeout = absl::Seconds(20)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                             [&] { return received_ >= count; });
  }
  // True if the link to some peer was lost `count` times.
  bool WaitForLost(int count, absl::Duration timeout = absl::Seconds(20)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                             [&] { return lost_ >= count; });
  }
  uint64_t received() const {
    std::lock_guard lock(mutex_);
    return received_;
  }

  std::vector<LinkAddress> addresses() const override { return inner_->addresses(); }
  absl::Status Register(absl::Span<std::byte> region, MemoryKind kind) override {
    return inner_->Register(region, kind);
  }
  bool TakesDeviceMemory(const Epoch& peer) const override {
    return inner_->TakesDeviceMemory(peer);
  }
  void SetSink(ReceiveSink* sink) override {
    sink_ = sink;
    inner_->SetSink(this);
  }
  absl::Status Connect(const Epoch& peer, absl::Span<const LinkAddress> addresses,
                       absl::Duration timeout) override {
    return inner_->Connect(peer, addresses, timeout);
  }
  std::string LinkName(const Epoch& peer) const override { return inner_->LinkName(peer); }
  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            std::function<void(absl::Status)> done) override {
    inner_->Send(peer, header, data, std::move(done));
  }
  absl::Status Fence(const Epoch& peer, absl::Duration timeout) override {
    return inner_->Fence(peer, timeout);
  }
  TransportStats stats() const override { return inner_->stats(); }
  void Close() override { inner_->Close(); }

  absl::StatusOr<absl::Span<std::byte>> OnOffer(const Epoch& sender,
                                                const MessageHeader& header) override {
    return sink_->OnOffer(sender, header);
  }
  void OnReceived(const Epoch& sender, const MessageHeader& header, absl::Status status) override {
    const bool ok = status.ok();
    sink_->OnReceived(sender, header, std::move(status));
    std::lock_guard lock(mutex_);
    received_ += ok;
    changed_.notify_all();
  }
  void OnPeerLost(const Epoch& peer, absl::Status cause) override {
    sink_->OnPeerLost(peer, std::move(cause));
    std::lock_guard lock(mutex_);
    ++lost_;
    changed_.notify_all();
  }

 private:
  const std::unique_ptr<Transport> inner_;
  ReceiveSink* sink_ = nullptr;
  mutable std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  uint64_t received_ = 0;
  int lost_ = 0;
};

// Closed in the right order by its destructor.
struct Side {
  Epoch epoch;
  std::unique_ptr<ObservedTransport> transport;
  std::unique_ptr<IncomingTransfers> incoming;

  Side(const Epoch& own, std::unique_ptr<Transport> t)
      : epoch(own),
        transport(std::make_unique<ObservedTransport>(std::move(t))),
        incoming(CreateIncomingTransfers(own, transport.get())) {}
  ~Side() { transport->Close(); }

  MessageHeader HeaderTo(const Side& receiver, const TransferId& id, uint32_t index,
                         uint64_t length) const {
    MessageHeader header;
    header.transfer_id = id;
    header.attempt = 1;
    header.receiver_epoch = receiver.epoch;
    header.index = index;
    header.length = length;
    return header;
  }
  // Sends one message and waits for its end.
  absl::Status SendAndWait(const Epoch& peer, const MessageHeader& header,
                           absl::Span<const std::byte> data) {
    Promised<absl::Status> done;
    transport->Send(peer, header, data,
                    [done](absl::Status status) { done.Set(std::move(status)); });
    return done.Wait().value_or(absl::DeadlineExceededError("the send did not end"));
  }
  // Sends all blocks as one transfer and waits until no send is in flight.
  OutgoingResult SendAll(const Epoch& peer, const TransferId& id, Blocks& source) {
    const auto outgoing = StartOutgoingTransfer(transport.get(), peer, id, /*attempt=*/1);
    for (int32_t i = 0; i < source.size(); ++i) outgoing->SendBlock(i, source[i]);
    Promised<OutgoingResult> drained;
    outgoing->Finish([drained](OutgoingResult result) { drained.Set(std::move(result)); });
    return drained.Wait().value_or(
        OutgoingResult{.status = absl::DeadlineExceededError("sends did not drain"),
                       .first_sent = absl::InfinitePast()});
  }
};

inline IncomingSpec SpecFor(const TransferId& id, const Epoch& sender, Blocks& destination) {
  IncomingSpec spec;
  spec.transfer_id = id;
  spec.attempt = 1;
  spec.sender = sender;
  spec.blocks = destination.spans();
  return spec;
}

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_SIDE_H_
