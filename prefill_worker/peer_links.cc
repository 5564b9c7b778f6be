#include "prefill_worker/peer_links.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/channel.h"
#include "service/grpc_server.h"
#include "service/process.h"
#include "spdlog/spdlog.h"
#include "status/grpc_status.h"

namespace prefill_worker {
namespace {

// A worker that cannot be reached takes a thread for the handshake's time; others go on.
constexpr int kNumThreads = 4;
constexpr absl::Duration kFenceTry = absl::Seconds(5);

// What Connect tells of a peer: "linking decode worker 10.0.0.7:9001: ...".
absl::Status Annotate(const Destination& peer, const absl::Status& status) {
  absl::Status annotated(status.code(), absl::StrCat("linking decode worker ", peer.address, ": ",
                                                     std::string(status.message())));
  const std::string reason = status::Reason(status);
  return reason.empty() ? annotated : status::WithReason(std::move(annotated), reason);
}

}  // namespace

PeerLinks::PeerLinks(worker::WorkerRuntime* runtime, worker::WorkerMetrics* metrics,
                     service::CallTracker* calls)
    : runtime_(runtime), metrics_(metrics), calls_(calls), work_(kNumThreads) {}

void PeerLinks::Connect(const Destination& peer, Ready ready) {
  std::unique_lock<std::mutex> lock(mutex_);
  Link& link = links_[peer.epoch];
  if (link.connected || !link.refused.ok()) {
    absl::StatusOr<std::shared_ptr<Stub>> result = link.stub;
    if (!link.refused.ok()) result = link.refused;
    lock.unlock();
    return ready(std::move(result));
  }
  link.waiting.push_back(std::move(ready));
  if (link.waiting.size() > 1) return;  // somebody's handshake is under way
  link.stub =
      ferry::v1::KvTransfer::NewStub(service::MakeChannel(peer.address, runtime_->options.tls));
  work_.Add(peer.epoch, [this, peer, stub = link.stub] {
    Handshake(peer, stub);
    return true;
  });
}

void PeerLinks::Handshake(const Destination& peer, const std::shared_ptr<Stub>& stub) {
  ferry::v1::HandshakeRequest request;
  request.set_epoch(runtime_->epoch.ToBytes());
  request.set_address(own_address_);
  request.set_peer_epoch(peer.epoch.ToBytes());
  worker::FillLayoutRecord(*runtime_, request.mutable_layout());
  for (const kv_transfer::LinkAddress& address : runtime_->transport->addresses()) {
    ferry::v1::LinkAddress* out = request.add_links();
    out->set_kind(address.kind);
    out->set_host_id(address.host_id);
    out->set_worker_address(address.worker_address);
    out->set_listener(address.listener);
    out->set_slots(address.slots);
  }
  calls_->Start<AsyncStub, ferry::v1::HandshakeRequest, ferry::v1::HandshakeResponse>(
      stub->async(), &AsyncStub::Handshake, std::move(request), runtime_->options.handshake_timeout,
      [this, peer, stub](absl::StatusOr<ferry::v1::HandshakeResponse> response) {
        OnHandshake(peer, std::move(response));
      });
}

void PeerLinks::OnHandshake(const Destination& peer,
                            absl::StatusOr<ferry::v1::HandshakeResponse> response) {
  if (!response.ok()) return Finish(peer, response.status());
  work_.Add(peer.epoch, [this, peer, response = *std::move(response)] {
    Finish(peer, ConnectTransport(peer, response));
    return true;
  });
}

absl::Status PeerLinks::ConnectTransport(const Destination& peer,
                                         const ferry::v1::HandshakeResponse& response) {
  if (response.epoch() != peer.epoch.ToBytes()) {
    return status::WithReason(absl::FailedPreconditionError("it has restarted"),
                              status::kStaleEpoch);
  }
  std::vector<kv_transfer::LinkAddress> addresses;
  for (const ferry::v1::LinkAddress& link : response.links()) {
    addresses.push_back(
        {link.kind(), link.host_id(), link.worker_address(), link.listener(), link.slots()});
  }
  return runtime_->transport->Connect(peer.epoch, addresses, runtime_->options.handshake_timeout);
}

void PeerLinks::Finish(const Destination& peer, const absl::Status& result) {
  metrics_->CountHandshake(result);
  std::vector<Ready> waiting;
  absl::StatusOr<std::shared_ptr<Stub>> outcome;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = links_.find(peer.epoch);
    if (found == links_.end()) return;
    waiting = std::move(found->second.waiting);
    if (result.ok()) {
      found->second.connected = true;
      found->second.waiting.clear();
      outcome = found->second.stub;
    } else {
      outcome = Annotate(peer, result);
      // Only what no retry can mend is remembered.
      if (status::Reason(result) == status::kIncompatible) {
        found->second.refused = outcome.status();
      } else {
        links_.erase(found);
      }
    }
  }
  if (result.ok()) {
    spdlog::info("peer linked peer={} epoch={} link={}", peer.address, peer.epoch.ToHex(),
                 service::LogValue(runtime_->transport->LinkName(peer.epoch)));
  } else {
    spdlog::warn("peer not linked peer={} epoch={} cause={}", peer.address, peer.epoch.ToHex(),
                 service::LogValue(std::string(result.message())));
  }
  for (const Ready& ready : waiting) ready(outcome);
}

void PeerLinks::Drop(const kv_transfer::Epoch& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = links_.find(peer);
  if (found != links_.end() && found->second.connected) links_.erase(found);
}

void PeerLinks::Fence(const kv_transfer::Epoch& peer, std::function<bool()> wanted) {
  Drop(peer);
  work_.Add(peer, [this, peer, wanted = std::move(wanted)] {
    if (!wanted()) return true;
    const absl::Status status = runtime_->transport->Fence(peer, kFenceTry);
    spdlog::warn("peer fenced epoch={} status={}", peer.ToHex(), status::CodeName(status.code()));
    return status.ok();
  });
}

}  // namespace prefill_worker
