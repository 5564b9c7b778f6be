// ObservedTransport: passes everything on and lets a test wait for what it has seen.

#ifndef TESTS_KV_TRANSFER_OBSERVED_TRANSPORT_H_
#define TESTS_KV_TRANSFER_OBSERVED_TRANSPORT_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

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

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_OBSERVED_TRANSPORT_H_
