#include "decode_worker/peer_links.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "service/process.h"
#include "service/trace_metadata.h"
#include "spdlog/spdlog.h"
#include "tracing/trace_context.h"

namespace decode_worker {
namespace {

constexpr int kConnectThreads = 4;
constexpr size_t kMaxWaitingConnections = 256;

}  // namespace

struct PeerLinks::Peer {
  kv_transfer::Epoch epoch;
  std::unique_ptr<ferry::v1::KvTransfer::Stub> stub;
};

struct PeerLinks::AbortCall {
  std::shared_ptr<Peer> peer;
  std::unique_ptr<grpc::ClientContext> context;
  ferry::v1::AbortTransferRequest request;
  ferry::v1::AbortTransferResponse response;
  std::string traceparent;
  int attempts = 0;
};

PeerLinks::PeerLinks(kv_transfer::Transport* transport, const kv_transfer::Epoch& own_epoch,
                     const service::TlsOptions& tls, absl::Duration timeout)
    : transport_(transport), own_epoch_(own_epoch), tls_(tls), timeout_(timeout) {
  for (int i = 0; i < kConnectThreads; ++i) threads_.emplace_back([this] { RunConnections(); });
}

PeerLinks::~PeerLinks() { Stop(); }

void PeerLinks::Connect(const kv_transfer::Epoch& peer, const std::string& address,
                        std::vector<kv_transfer::LinkAddress> links,
                        std::function<void(absl::Status)> done) {
  absl::Status refused;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) {
      refused = absl::UnavailableError("the worker stops");
    } else if (waiting_.size() >= kMaxWaitingConnections) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat(waiting_.size(), " connections are waiting to be made"));
    } else {
      waiting_.push_back({peer, address, std::move(links), done});
    }
  }
  if (!refused.ok()) return done(refused);
  changed_.notify_all();
}

void PeerLinks::RunConnections() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (waiting_.empty()) return;  // stopping
    Connection connection = std::move(waiting_.front());
    waiting_.pop_front();
    const bool stopping = stopping_;
    lock.unlock();
    absl::Status status = absl::UnavailableError("the worker stops");
    if (!stopping) {
      status = transport_->Connect(connection.peer, connection.links, timeout_);
      if (status.ok()) AddPeer(connection);
    }
    connection.done(status);
    lock.lock();
  }
}

void PeerLinks::AddPeer(const Connection& connection) {
  auto peer = std::make_shared<Peer>();
  peer->epoch = connection.peer;
  peer->stub = ferry::v1::KvTransfer::NewStub(service::MakeChannel(connection.address, tls_));
  spdlog::info("peer linked peer={} epoch={} link={}", connection.address, connection.peer.ToHex(),
               transport_->LinkName(connection.peer));
  std::vector<kv_transfer::Epoch> known;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [epoch, other] : peers_) known.push_back(epoch);
    peers_[connection.peer] = std::move(peer);
  }
  // Those that have gone meanwhile: the link of a process that died is lost.  Not under the lock,
  // because this asks the transport's thread.
  for (const kv_transfer::Epoch& epoch : known) {
    if (epoch == connection.peer || !transport_->LinkName(epoch).empty()) continue;
    std::lock_guard lock(mutex_);
    peers_.erase(epoch);
  }
}

void PeerLinks::NotifyAborted(const AbortNotice& notice) {
  auto call = std::make_shared<AbortCall>();
  {
    std::lock_guard lock(mutex_);
    if (const auto it = peers_.find(notice.sender); it != peers_.end()) call->peer = it->second;
  }
  if (call->peer == nullptr) return;  // its process has ended: nobody sends any more
  call->request.mutable_key()->set_request_id(notice.request.request_id);
  call->request.mutable_key()->set_attempt(notice.request.attempt);
  call->request.set_transfer_id(reinterpret_cast<const char*>(notice.transfer_id.data()),
                                notice.transfer_id.size());
  call->request.set_caller_epoch(own_epoch_.ToBytes());
  call->request.set_cause(notice.cause);
  call->traceparent = notice.traceparent;
  StartAbort(std::move(call));
}

void PeerLinks::StartAbort(std::shared_ptr<AbortCall> call) {
  AbortCall* const raw = call.get();
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    call->context = std::make_unique<grpc::ClientContext>();
    service::AddTraceparent(call->traceparent, call->context.get());
    call->context->set_deadline(std::chrono::system_clock::now() +
                                absl::ToChronoNanoseconds(timeout_));
    ++call->attempts;
    calls_[raw] = std::move(call);
  }
  raw->peer->stub->async()->AbortTransfer(
      raw->context.get(), &raw->request, &raw->response, [this, raw](const grpc::Status& status) {
        std::shared_ptr<AbortCall> ended;
        bool again;
        {
          std::lock_guard lock(mutex_);
          ended = calls_.extract(raw).mapped();
          again = !status.ok() && ended->attempts < 2 && !stopping_;
          if (!again) changed_.notify_all();
        }
        if (again) return StartAbort(std::move(ended));
        if (!status.ok()) {
          spdlog::warn("request_id={} trace_id={} abort not delivered epoch={} cause={}",
                       service::LogValue(ended->request.key().request_id()),
                       tracing::TraceIdOf(ended->traceparent), ended->peer->epoch.ToHex(),
                       service::LogValue(status.error_message()));
        }
      });
}

void PeerLinks::Stop() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    for (const auto& [raw, call] : calls_) call->context->TryCancel();
    changed_.notify_all();
    changed_.wait(lock, [this] { return calls_.empty(); });
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace decode_worker
