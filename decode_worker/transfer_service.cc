#include "decode_worker/transfer_service.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "decode_worker/peer_links.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "pairing/pair_check.h"
#include "service/listen_address.h"
#include "service/process.h"
#include "spdlog/spdlog.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"

namespace decode_worker {
namespace {

using kv_transfer::Epoch;
using kv_transfer::TransferId;

worker::RequestId ToRequestId(const ferry::v1::RequestKey& key) {
  return {.request_id = key.request_id(), .attempt = key.attempt()};
}

absl::StatusOr<TransferId> ToTransferId(const std::string& raw) {
  TransferId id;
  if (raw.size() != id.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("transfer_id has ", raw.size(), " bytes, it must have ", id.size()));
  }
  std::copy(raw.begin(), raw.end(), id.begin());
  return id;
}

absl::StatusOr<TransferRef> ToTransferRef(const ferry::v1::RequestKey& key,
                                          const std::string& transfer_id,
                                          const std::string& sender_epoch) {
  TransferRef ref{.request = ToRequestId(key), .transfer_id = {}, .sender = {}};
  if (!transfer_id.empty()) {
    ASSIGN_OR_RETURN(ref.transfer_id, ToTransferId(transfer_id));
  }
  ASSIGN_OR_RETURN(ref.sender, Epoch::FromBytes(sender_epoch));
  return ref;
}

FirstToken ToFirstToken(const ferry::v1::FirstToken& wire) {
  FirstToken token;
  token.branch = static_cast<int32_t>(wire.branch());
  token.sample.token_id = static_cast<int32_t>(wire.token_id());
  token.sample.logprob = wire.logprobs().chosen().logprob();
  std::fill(std::begin(token.sample.top_ids), std::end(token.sample.top_ids), -1);
  const int count = std::min(wire.logprobs().top_size(), kernels::kMaxLogprobs);
  for (int i = 0; i < count; ++i) {
    token.sample.top_ids[i] = static_cast<int32_t>(wire.logprobs().top(i).token_id());
    token.sample.top_logprobs[i] = wire.logprobs().top(i).logprob();
  }
  return token;
}

// As the router knows it from GetInfo.
pairing::Profile OwnProfile(const worker::WorkerRuntime& runtime) {
  ferry::v1::WorkerInfo info;
  worker::FillRuntimeInfo(runtime, &info);
  return pairing::ProfileOf(info, "the decode worker");
}

class TransferServiceImpl final : public TransferService,
                                  private ferry::v1::KvTransfer::CallbackService {
 public:
  TransferServiceImpl(DecodeScheduler* scheduler, PeerLinks* links,
                      const worker::WorkerRuntime* runtime,
                      std::function<void(const absl::Status&)> on_handshake)
      : scheduler_(scheduler),
        links_(links),
        runtime_(runtime),
        own_profile_(OwnProfile(*runtime)),
        on_handshake_(std::move(on_handshake)) {}

  grpc::Service* grpc_service() override { return this; }

 private:
  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  static Reactor* Answer(Reactor* reactor, const absl::Status& status) {
    reactor->Finish(status::ToGrpc(status));
    return reactor;
  }

  // What is said to a process that no longer exists must not reach this one.
  absl::Status CheckEpoch(const std::string& epoch) const {
    if (epoch == runtime_->epoch.ToBytes()) return absl::OkStatus();
    return status::WithReason(
        absl::FailedPreconditionError("the message is meant for another epoch of this worker"),
        status::kStaleEpoch);
  }

  Reactor* Handshake(Context* context, const ferry::v1::HandshakeRequest* request,
                     ferry::v1::HandshakeResponse* response) override {
    Reactor* reactor = context->DefaultReactor();
    const std::string address = service::ReachableAddress(request->address(), context->peer());
    const auto refuse = [&](const absl::Status& status) {
      spdlog::warn("handshake refused peer={} cause={}", service::LogValue(address),
                   service::LogValue(std::string(status.message())));
      on_handshake_(status);
      return Answer(reactor, status);
    };
    if (const absl::Status status = CheckEpoch(request->peer_epoch()); !status.ok()) {
      return refuse(status);
    }
    const absl::StatusOr<Epoch> peer = Epoch::FromBytes(request->epoch());
    if (!peer.ok()) return refuse(peer.status());
    const pairing::Profile theirs =
        pairing::ProfileOf(*request, absl::StrCat("prefill worker ", address));
    if (const absl::Status status = pairing::CheckPair(theirs, own_profile_); !status.ok()) {
      return refuse(status);
    }
    std::vector<kv_transfer::LinkAddress> links;
    for (const ferry::v1::LinkAddress& link : request->links()) {
      links.push_back({.kind = link.kind(),
                       .host_id = link.host_id(),
                       .worker_address = link.worker_address(),
                       .listener = service::ReachableAddress(link.listener(), context->peer()),
                       .slots = link.slots()});
    }
    links_->Connect(
        *peer, address, std::move(links),
        [this, reactor, response, caller = context->peer()](const absl::Status& status) {
          on_handshake_(status);
          response->set_epoch(runtime_->epoch.ToBytes());
          for (const kv_transfer::LinkAddress& own : runtime_->transport->addresses()) {
            ferry::v1::LinkAddress* link = response->add_links();
            link->set_kind(own.kind);
            link->set_host_id(own.host_id);
            link->set_worker_address(own.worker_address);
            link->set_listener(service::OwnAddressFor(own.listener, caller));
            link->set_slots(own.slots);
          }
          Answer(reactor, status);
        });
    return reactor;
  }

  Reactor* Reserve(Context* context, const ferry::v1::ReserveRequest* request,
                   ferry::v1::ReserveResponse* response) override {
    Reactor* reactor = context->DefaultReactor();
    if (const absl::Status status = CheckEpoch(request->receiver_epoch()); !status.ok()) {
      return Answer(reactor, status);
    }
    const absl::StatusOr<Epoch> sender = Epoch::FromBytes(request->sender_epoch());
    if (!sender.ok()) return Answer(reactor, sender.status());
    constexpr uint64_t kLongest = 3600 * 1000;  // ms; the scheduler waits less
    scheduler_->Reserve(
        {.request = ToRequestId(request->key()),
         .sender = *sender,
         .num_tokens = static_cast<int32_t>(request->num_tokens()),
         .wait = absl::Milliseconds(static_cast<int64_t>(std::min(request->wait_ms(), kLongest)))},
        [reactor, response](const absl::StatusOr<ReserveGrant>& grant) {
          if (grant.ok()) {
            response->set_transfer_id(reinterpret_cast<const char*>(grant->transfer_id.data()),
                                      grant->transfer_id.size());
            response->set_cached_tokens(static_cast<uint32_t>(grant->cached_tokens));
            response->set_num_blocks(static_cast<uint32_t>(grant->num_blocks));
            response->set_state_slot(grant->state_slot);
          }
          Answer(reactor, grant.status());
        });
    return reactor;
  }

  Reactor* TransferDone(Context* context, const ferry::v1::TransferDoneRequest* request,
                        ferry::v1::TransferDoneResponse*) override {
    Reactor* reactor = context->DefaultReactor();
    if (const absl::Status status = CheckEpoch(request->receiver_epoch()); !status.ok()) {
      return Answer(reactor, status);
    }
    const absl::StatusOr<Epoch> sender = Epoch::FromBytes(request->sender_epoch());
    if (!sender.ok()) return Answer(reactor, sender.status());
    const absl::StatusOr<TransferId> id = ToTransferId(request->transfer_id());
    if (!id.ok()) return Answer(reactor, id.status());
    ConfirmCall call{.request = ToRequestId(request->key()),
                     .transfer_id = *id,
                     .sender = *sender,
                     .num_blocks = static_cast<int32_t>(request->num_blocks()),
                     .num_bytes = request->num_bytes(),
                     .first_tokens = {}};
    for (const ferry::v1::FirstToken& token : request->first_tokens()) {
      call.first_tokens.push_back(ToFirstToken(token));
    }
    scheduler_->ConfirmTransfer(std::move(call),
                                [reactor](const absl::Status& status) { Answer(reactor, status); });
    return reactor;
  }

  Reactor* Release(Context* context, const ferry::v1::ReleaseRequest* request,
                   ferry::v1::ReleaseResponse*) override {
    Reactor* reactor = context->DefaultReactor();
    const absl::StatusOr<TransferRef> ref =
        ToTransferRef(request->key(), request->transfer_id(), request->sender_epoch());
    if (!ref.ok()) return Answer(reactor, ref.status());
    scheduler_->ReleaseTransfer(*ref,
                                [reactor](const absl::Status& status) { Answer(reactor, status); });
    return reactor;
  }

  Reactor* AbortTransfer(Context* context, const ferry::v1::AbortTransferRequest* request,
                         ferry::v1::AbortTransferResponse* response) override {
    Reactor* reactor = context->DefaultReactor();
    const absl::StatusOr<TransferRef> ref =
        ToTransferRef(request->key(), request->transfer_id(), request->caller_epoch());
    if (!ref.ok()) return Answer(reactor, ref.status());
    scheduler_->AbortTransfer(*ref, request->cause(), [reactor, response](bool landed) {
      response->set_writer_state(landed ? ferry::v1::WRITER_STATE_DRAINED
                                        : ferry::v1::WRITER_STATE_NEVER_STARTED);
      Answer(reactor, absl::OkStatus());
    });
    return reactor;
  }

  DecodeScheduler* const scheduler_;
  PeerLinks* const links_;
  const worker::WorkerRuntime* const runtime_;
  const pairing::Profile own_profile_;
  const std::function<void(const absl::Status&)> on_handshake_;
};

}  // namespace

std::unique_ptr<TransferService> CreateTransferService(
    DecodeScheduler* scheduler, PeerLinks* links, const worker::WorkerRuntime* runtime,
    std::function<void(const absl::Status&)> on_handshake) {
  return std::make_unique<TransferServiceImpl>(scheduler, links, runtime, std::move(on_handshake));
}

}  // namespace decode_worker
