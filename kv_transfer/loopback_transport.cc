#include "kv_transfer/loopback_transport.h"

#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kv_transfer/loopback_network.h"
#include "status/check.h"

namespace kv_transfer {
namespace {

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<loopback::Network> network, const Epoch& epoch)
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
  absl::Status Register(absl::Span<std::byte>, MemoryKind) override { return absl::OkStatus(); }
  void SetSink(ReceiveSink* sink) override { network_->SetSink(endpoint_.get(), sink); }

  absl::Status Connect(const Epoch& peer, absl::Span<const LinkAddress> peer_addresses,
                       absl::Duration timeout) override {
    for (const LinkAddress& address : peer_addresses) {
      if (address.kind == "loopback") return network_->Connect(epoch_, peer, timeout);
    }
    return absl::FailedPreconditionError("no common link kind: this process has loopback");
  }
  bool TakesDeviceMemory(const Epoch&) const override { return false; }
  std::string LinkName(const Epoch& peer) const override {
    return network_->Connected(epoch_, peer) ? "loopback" : "";
  }
  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            std::function<void(absl::Status)> done) override {
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
  const std::shared_ptr<loopback::Network> network_;
  const Epoch epoch_;
  const std::shared_ptr<loopback::Endpoint> endpoint_;
  std::atomic<bool> closed_{false};
  std::thread thread_;  // the progress thread
};

}  // namespace

std::shared_ptr<LoopbackNetwork> CreateLoopbackNetwork() {
  return std::make_shared<loopback::Network>();
}

std::unique_ptr<Transport> CreateLoopbackTransport(std::shared_ptr<LoopbackNetwork> network,
                                                   const Epoch& epoch) {
  auto* const own = dynamic_cast<loopback::Network*>(network.get());
  FERRY_CHECK(own != nullptr) << "a network of CreateLoopbackNetwork";
  return std::make_unique<LoopbackTransport>(own->shared_from_this(), epoch);
}

}  // namespace kv_transfer
