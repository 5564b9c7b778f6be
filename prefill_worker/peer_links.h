// PeerLinks: which decode workers this process can send to.  A link is made at first contact of a
// pair of epochs: Handshake (the decode worker compares layouts and links, transport addresses are
// exchanged), then Connect on both sides.  A link that was lost is made anew when it is wanted
// again; a peer that does not fit stays refused.
//
// The transport's Connect and Fence block, so they run as work of their peer (peer_work.h): a link
// is made anew when the fence of the one before it has ended. Thread-safe.

#ifndef PREFILL_WORKER_PEER_LINKS_H_
#define PREFILL_WORKER_PEER_LINKS_H_

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "prefill_worker/kv_sender.h"
#include "prefill_worker/peer_work.h"
#include "service/client_call.h"

namespace prefill_worker {

using Stub = ferry::v1::KvTransfer::StubInterface;
using AsyncStub = ferry::v1::KvTransfer::StubInterface::async_interface;

class PeerLinks final {
 public:
  // `runtime`, `metrics` and `calls` must outlive it.
  PeerLinks(worker::WorkerRuntime* runtime, worker::WorkerMetrics* metrics,
            service::CallTracker* calls);

  // REQUIRES: called before the first Connect, which it happens before.
  void SetOwnAddress(std::string address) { own_address_ = std::move(address); }

  // Calls `ready`, on any thread or at once, with the stub of a linked peer or why there is no
  // link. Errors: kUnavailable; kFailedPrecondition / STALE_EPOCH or INCOMPATIBLE.
  void Connect(const Destination& peer,
               std::function<void(absl::StatusOr<std::shared_ptr<Stub>>)> ready);

  // Forgets a link that is gone.
  void Drop(const kv_transfer::Epoch& peer);

  // Cuts the link: the sends to the peer end soon.  Tries until it has worked, as long as `wanted`,
  // called on any thread, says so.
  void Fence(const kv_transfer::Epoch& peer, std::function<bool()> wanted);

  // Makes and cuts no more links.
  void Close() { work_.Close(); }

 private:
  using Ready = std::function<void(absl::StatusOr<std::shared_ptr<Stub>>)>;
  struct Link {
    std::shared_ptr<Stub> stub;
    bool connected = false;
    absl::Status refused;  // not OK: the two do not fit
    std::vector<Ready> waiting;
  };

  void Handshake(const Destination& peer, const std::shared_ptr<Stub>& stub);
  void OnHandshake(const Destination& peer, absl::StatusOr<ferry::v1::HandshakeResponse> response);
  absl::Status ConnectTransport(const Destination& peer,
                                const ferry::v1::HandshakeResponse& response);
  void Finish(const Destination& peer, const absl::Status& status);

  worker::WorkerRuntime* const runtime_;
  worker::WorkerMetrics* const metrics_;
  service::CallTracker* const calls_;
  std::string own_address_;

  std::mutex mutex_;  // guards links_
  absl::flat_hash_map<kv_transfer::Epoch, Link> links_;

  PeerWork work_;  // last: its threads use everything else
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_PEER_LINKS_H_
