#include "prefill_worker/kv_sender.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "prefill_worker/kv_send.h"
#include "prefill_worker/peer_links.h"
#include "service/client_call.h"
#include "steady_time/steady_time.h"

namespace prefill_worker {
namespace {

constexpr auto kTick = std::chrono::milliseconds(100);

// Refuses what is offered to it: nothing is sent to a prefill worker.
class RefusingSink final : public kv_transfer::ReceiveSink {
 public:
  explicit RefusingSink(std::function<void(const kv_transfer::Epoch&, absl::Status)> on_lost)
      : on_lost_(std::move(on_lost)) {}
  absl::StatusOr<absl::Span<std::byte>> OnOffer(const kv_transfer::Epoch&,
                                                const kv_transfer::MessageHeader&) override {
    return absl::FailedPreconditionError("a prefill worker receives no blocks");
  }
  void OnReceived(const kv_transfer::Epoch&, const kv_transfer::MessageHeader&,
                  absl::Status) override {}
  void OnPeerLost(const kv_transfer::Epoch& peer, absl::Status cause) override {
    on_lost_(peer, std::move(cause));
  }

 private:
  const std::function<void(const kv_transfer::Epoch&, absl::Status)> on_lost_;
};

class Sender final : public KvSender {
 public:
  Sender(worker::WorkerRuntime* runtime, worker::WorkerMetrics* metrics)
      : runtime_(runtime),
        metrics_(metrics),
        sink_([this](const kv_transfer::Epoch& peer, absl::Status cause) {
          OnPeerLost(peer, std::move(cause));
        }),
        links_(runtime, metrics, &calls_) {
    runtime_->transport->SetSink(&sink_);
    ticker_ = std::thread([this] { RunTicker(); });
  }
  ~Sender() override { Close(); }

  void SetOwnAddress(std::string address) override { links_.SetOwnAddress(std::move(address)); }

  std::shared_ptr<KvSend> Start(SendSpec spec, std::function<void(SendResult)> on_end) override {
    auto send = std::make_shared<KvSendImpl>(KvSendContext{runtime_, metrics_, &links_, &calls_},
                                             std::move(spec),
                                             [this, on_end = std::move(on_end)](SendResult result) {
                                               // Before anybody learns of the end, so that the
                                               // gauge is not behind it.
                                               Count(-1);
                                               on_end(std::move(result));
                                             });
    Count(1);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      sends_.insert(send);
    }
    changed_.notify_all();
    send->Start();
    return send;
  }

  void Close() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return;
      closed_ = true;
    }
    changed_.notify_all();
    ticker_.join();
    // The links' threads use the transport; after the transport no send is in flight; after the
    // calls no answer comes.
    for (const auto& send : Sends()) send->Silence();
    links_.Close();
    runtime_->transport->Close();
    calls_.Close();
  }

 private:
  std::vector<std::shared_ptr<KvSendImpl>> Sends() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {sends_.begin(), sends_.end()};
  }

  void Count(int32_t change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_live_ += change;
    metrics_->SetTransfersInFlight(num_live_);
  }

  void RunTicker() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!closed_) {
      if (sends_.empty()) {
        changed_.wait(lock);
        continue;
      }
      lock.unlock();
      Tick(steady_time::Now());
      lock.lock();
      changed_.wait_for(lock, kTick, [this] { return closed_; });
    }
  }

  void Tick(absl::Time now) {
    for (const auto& send : Sends()) {
      send->Tick(now);
      if (!send->ended()) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      sends_.erase(send);
    }
  }

  void OnPeerLost(const kv_transfer::Epoch& peer, absl::Status cause) {
    links_.Drop(peer);
    for (const auto& send : Sends()) send->OnPeerLost(peer, cause);
  }

  worker::WorkerRuntime* const runtime_;
  worker::WorkerMetrics* const metrics_;
  RefusingSink sink_;
  service::CallTracker calls_;
  PeerLinks links_;

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  bool closed_ = false;
  int32_t num_live_ = 0;
  absl::flat_hash_set<std::shared_ptr<KvSendImpl>> sends_;  // live ones, and ended ones for a tick

  std::thread ticker_;  // last: it starts when everything else exists
};

}  // namespace

std::unique_ptr<KvSender> CreateKvSender(worker::WorkerRuntime* runtime,
                                         worker::WorkerMetrics* metrics) {
  return std::make_unique<Sender>(runtime, metrics);
}

}  // namespace prefill_worker
