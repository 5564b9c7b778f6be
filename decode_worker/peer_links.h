// PeerLinks: this worker's links to prefill workers: connecting back after a Handshake, and telling
// a sender that its transfer is not wanted any more.
//
// Connecting may take as long as the handshake timeout, so it has threads of its own: an RPC thread
// must not wait, and one unreachable peer must not keep the others out. Thread-safe.

#ifndef DECODE_WORKER_PEER_LINKS_H_
#define DECODE_WORKER_PEER_LINKS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "decode_worker/transfer_calls.h"
#include "kv_transfer/transport.h"
#include "service/grpc_server.h"

namespace decode_worker {

class PeerLinks final {
 public:
  // `transport` must outlive it.
  PeerLinks(kv_transfer::Transport* transport, const kv_transfer::Epoch& own_epoch,
            const service::TlsOptions& tls, absl::Duration timeout);
  ~PeerLinks();
  PeerLinks(const PeerLinks&) = delete;
  PeerLinks& operator=(const PeerLinks&) = delete;

  // Connects to a peer whose gRPC server is at `address` and calls `done` on another thread.
  // Errors: those of Transport::Connect; kResourceExhausted if too many wait; kUnavailable after
  // Stop.
  void Connect(const kv_transfer::Epoch& peer, const std::string& address,
               std::vector<kv_transfer::LinkAddress> links, std::function<void(absl::Status)> done);

  // Calls AbortTransfer at the sender, without waiting; a second time if the first call fails.
  // Nothing depends on its answer: what lands here is known from the receives alone.
  void NotifyAborted(const AbortNotice& notice);

  // Ends the threads; cancels calls and waits for them.
  void Stop();

 private:
  struct Connection {
    kv_transfer::Epoch peer;
    std::string address;
    std::vector<kv_transfer::LinkAddress> links;
    std::function<void(absl::Status)> done;
  };
  struct Peer;  // channel and stub
  struct AbortCall;
  void RunConnections();
  void AddPeer(const Connection& connection);
  void StartAbort(std::shared_ptr<AbortCall> call);

  kv_transfer::Transport* const transport_;
  const kv_transfer::Epoch own_epoch_;
  const service::TlsOptions tls_;
  const absl::Duration timeout_;

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<Connection> waiting_;
  // Those with a link.  Two processes may be known by one address, or have had it one after
  // another.
  absl::flat_hash_map<kv_transfer::Epoch, std::shared_ptr<Peer>> peers_;
  absl::flat_hash_map<AbortCall*, std::shared_ptr<AbortCall>> calls_;
  bool stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_PEER_LINKS_H_
