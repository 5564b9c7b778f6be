// LosingTransport: loses the peer while somebody asks for the link to it.  As the real transport it
// calls the sink on a thread of its own, and the asker waits for that thread.

#ifndef TESTS_PREFILL_WORKER_LOSING_TRANSPORT_H_
#define TESTS_PREFILL_WORKER_LOSING_TRANSPORT_H_

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kv_transfer/transport.h"

namespace prefill_worker {

class LosingTransport final : public kv_transfer::Transport {
 public:
  explicit LosingTransport(std::unique_ptr<kv_transfer::Transport> inner)
      : inner_(std::move(inner)) {}

  // The next LinkName loses the peer.
  void Arm() { armed_ = true; }
  // The sink has taken a loss while LinkName waited for it.
  bool loss_was_taken() const { return taken_; }

  std::string LinkName(const kv_transfer::Epoch& peer) const override {
    if (armed_.exchange(false)) {
      told_ = std::async(std::launch::async, [this, peer] {
        sink_->OnPeerLost(peer, absl::UnavailableError("lost by the test"));
      });
      // Bounded, so that a deadlock is a failure and not a hang.
      taken_ = told_.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    }
    return inner_->LinkName(peer);
  }

  std::vector<kv_transfer::LinkAddress> addresses() const override { return inner_->addresses(); }
  absl::Status Register(absl::Span<std::byte> region, kv_transfer::MemoryKind kind) override {
    return inner_->Register(region, kind);
  }
  bool TakesDeviceMemory(const kv_transfer::Epoch& peer) const override {
    return inner_->TakesDeviceMemory(peer);
  }
  void SetSink(kv_transfer::ReceiveSink* sink) override {
    sink_ = sink;
    inner_->SetSink(sink);
  }
  absl::Status Connect(const kv_transfer::Epoch& peer,
                       absl::Span<const kv_transfer::LinkAddress> addresses,
                       absl::Duration timeout) override {
    return inner_->Connect(peer, addresses, timeout);
  }
  void Send(const kv_transfer::Epoch& peer, const kv_transfer::MessageHeader& header,
            absl::Span<const std::byte> data, std::function<void(absl::Status)> done) override {
    inner_->Send(peer, header, data, std::move(done));
  }
  absl::Status Fence(const kv_transfer::Epoch& peer, absl::Duration timeout) override {
    return inner_->Fence(peer, timeout);
  }
  kv_transfer::TransportStats stats() const override { return inner_->stats(); }
  void Close() override { inner_->Close(); }

 private:
  const std::unique_ptr<kv_transfer::Transport> inner_;
  kv_transfer::ReceiveSink* sink_ = nullptr;  // set before the first LinkName
  mutable std::atomic<bool> armed_{false};
  mutable std::atomic<bool> taken_{false};
  mutable std::future<void> told_;  // of the one LinkName that was armed
};

}  // namespace prefill_worker

#endif  // TESTS_PREFILL_WORKER_LOSING_TRANSPORT_H_
