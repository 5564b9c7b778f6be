// FakeDecodeWorker: the receiving side of a transfer, inside the test: a real KvTransfer gRPC
// service and real IncomingTransfers over a loopback transport, with gates where a test wants to
// stand still.

#ifndef TESTS_PREFILL_WORKER_FAKE_DECODE_WORKER_H_
#define TESTS_PREFILL_WORKER_FAKE_DECODE_WORKER_H_

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "gate.h"
#include "grpcpp/grpcpp.h"
#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/loopback_transport.h"
#include "received.h"
#include "service/grpc_server.h"
#include "service/trace_metadata.h"
#include "status/grpc_status.h"

namespace prefill_worker {

class FakeDecodeWorker final : public ferry::v1::KvTransfer::Service {
 public:
  FakeDecodeWorker(std::shared_ptr<kv_transfer::LoopbackNetwork> network, int32_t block_size,
                   int64_t block_bytes, absl::Duration stall = absl::Seconds(20))
      : block_size_(block_size),
        block_bytes_(block_bytes),
        stall_(stall),
        epoch(kv_transfer::Epoch::Random()),
        transport_(kv_transfer::CreateLoopbackTransport(std::move(network), epoch)),
        incoming(kv_transfer::CreateIncomingTransfers(epoch, transport_.get())),
        server_(*service::GrpcServer::Start("127.0.0.1:0", {}, {this})) {}

  ~FakeDecodeWorker() override {
    reserve_gate.Open();
    done_gate.Open();
    StopServer();
    transport_->Close();
  }

  std::string address() const { return absl::StrCat("127.0.0.1:", server_->port()); }
  // As if the process had died.
  void StopServer() { server_->Shutdown(absl::ZeroDuration()); }

  std::shared_ptr<Received> received(const std::string& request_id, uint32_t attempt = 1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = received_.find({request_id, attempt});
    return found == received_.end() ? nullptr : found->second;
  }

 private:
  const int32_t block_size_;
  const int64_t block_bytes_;
  const absl::Duration stall_;

 public:
  // Set before use.
  const kv_transfer::Epoch epoch;
  int64_t state_slot_bytes = 0;  // 0: no state slot is reserved
  std::atomic<uint32_t> cached_blocks{0};
  std::atomic<bool> refuse{false};        // no room
  std::atomic<uint32_t> wrong_blocks{0};  // reserved more than asked for
  absl::Status handshake_status;
  absl::Status reserve_status;
  std::function<void()> on_reserve;
  Gate reserve_gate;
  Gate done_gate;
  std::atomic<int> releases{0};
  std::atomic<int> aborts{0};
  std::atomic<int> handshakes{0};
  std::string peer_address;  // from the handshake
  // Of Reserve and TransferDone calls, in their order.
  std::vector<std::string> traceparents() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return traceparents_;
  }

 private:
  std::unique_ptr<kv_transfer::Transport> transport_;

 public:
  std::unique_ptr<kv_transfer::IncomingTransfers> incoming;

 private:
  grpc::Status Handshake(grpc::ServerContext*, const ferry::v1::HandshakeRequest* request,
                         ferry::v1::HandshakeResponse* response) override {
    ++handshakes;
    if (!handshake_status.ok()) return status::ToGrpc(handshake_status);
    std::vector<kv_transfer::LinkAddress> links;
    for (const auto& link : request->links()) {
      links.push_back({link.kind(), link.host_id(), link.worker_address(), link.listener()});
    }
    const auto peer = kv_transfer::Epoch::FromBytes(request->epoch());
    const absl::Status connected = transport_->Connect(*peer, links, absl::Seconds(5));
    if (!connected.ok()) return status::ToGrpc(connected);
    peer_address = request->address();
    response->set_epoch(epoch.ToBytes());
    for (const auto& address : transport_->addresses()) {
      auto* link = response->add_links();
      link->set_kind(address.kind);
      link->set_host_id(address.host_id);
      link->set_worker_address(address.worker_address);
      link->set_listener(address.listener);
    }
    return grpc::Status::OK;
  }

  void Note(const grpc::ServerContext& context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    traceparents_.push_back(service::ReceivedTraceparent(context));
  }
  grpc::Status Reserve(grpc::ServerContext* context, const ferry::v1::ReserveRequest* request,
                       ferry::v1::ReserveResponse* response) override {
    Note(*context);
    if (on_reserve) on_reserve();
    reserve_gate.Pass();
    if (!reserve_status.ok()) return status::ToGrpc(reserve_status);
    if (refuse) return {grpc::StatusCode::RESOURCE_EXHAUSTED, "no room here"};
    const uint32_t blocks = (request->num_tokens() + block_size_ - 1) / block_size_;
    const uint32_t cached = std::min<uint32_t>(cached_blocks, request->num_tokens() / block_size_);
    auto received = std::make_shared<Received>();
    received->num_tokens = request->num_tokens();
    received->cached_tokens = cached * block_size_;
    received->memory.resize((blocks - cached) * block_bytes_);
    kv_transfer::IncomingSpec spec;
    const kv_transfer::Epoch id = kv_transfer::Epoch::Random();
    spec.transfer_id = id.bytes;
    spec.attempt = request->key().attempt();
    spec.sender = *kv_transfer::Epoch::FromBytes(request->sender_epoch());
    spec.stall_timeout = stall_;
    for (uint32_t i = 0; i < blocks - cached; ++i) {
      spec.blocks.push_back(
          absl::MakeSpan(received->memory).subspan(i * block_bytes_, block_bytes_));
    }
    received->state.resize(state_slot_bytes);
    spec.state_slot = absl::MakeSpan(received->state);
    const absl::Status expected = incoming->Expect(
        std::move(spec),
        [received](kv_transfer::IncomingResult result) { received->result.set_value(result); });
    if (!expected.ok()) return status::ToGrpc(expected);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      received_[{request->key().request_id(), request->key().attempt()}] = received;
    }
    response->set_transfer_id(id.ToBytes());
    response->set_cached_tokens(received->cached_tokens);
    response->set_num_blocks(blocks - cached + wrong_blocks);
    response->set_state_slot(state_slot_bytes > 0);
    return grpc::Status::OK;
  }

  grpc::Status TransferDone(grpc::ServerContext* context,
                            const ferry::v1::TransferDoneRequest* request,
                            ferry::v1::TransferDoneResponse*) override {
    Note(*context);
    const auto r = received(request->key().request_id(), request->key().attempt());
    if (r == nullptr) return {grpc::StatusCode::NOT_FOUND, "no such transfer"};
    r->done = *request;
    const absl::Status announced = incoming->Announce(IdOf(request->transfer_id()),
                                                      request->num_blocks(), request->num_bytes());
    if (!announced.ok()) return status::ToGrpc(announced);
    const kv_transfer::IncomingResult result = r->result.get_future().get();
    done_gate.Pass();
    if (!result.status.ok()) {
      return {grpc::StatusCode::ABORTED, std::string(result.status.message())};
    }
    return grpc::Status::OK;
  }

  grpc::Status Release(grpc::ServerContext*, const ferry::v1::ReleaseRequest* request,
                       ferry::v1::ReleaseResponse*) override {
    ++releases;
    incoming->Abort(IdOf(request->transfer_id()), absl::CancelledError("released"),
                    absl::Seconds(1));
    return grpc::Status::OK;
  }

  grpc::Status AbortTransfer(grpc::ServerContext*, const ferry::v1::AbortTransferRequest* request,
                             ferry::v1::AbortTransferResponse* response) override {
    ++aborts;
    if (!request->transfer_id().empty()) {
      incoming->Abort(IdOf(request->transfer_id()), absl::AbortedError(request->cause()),
                      absl::Seconds(1));
    }
    response->set_writer_state(ferry::v1::WRITER_STATE_NEVER_STARTED);
    return grpc::Status::OK;
  }

  static kv_transfer::TransferId IdOf(const std::string& bytes) {
    kv_transfer::TransferId id{};
    std::copy_n(bytes.begin(), std::min(bytes.size(), id.size()), id.begin());
    return id;
  }

  std::mutex mutex_;  // guards received_
  std::map<std::pair<std::string, uint32_t>, std::shared_ptr<Received>> received_;
  std::vector<std::string> traceparents_;
  std::unique_ptr<service::GrpcServer> server_;
};

}  // namespace prefill_worker

#endif  // TESTS_PREFILL_WORKER_FAKE_DECODE_WORKER_H_
