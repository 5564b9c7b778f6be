// KvSendImpl: the state machine of one transfer (kv_sender.h).
//
//   kLinking -> kReserving -> kSending -> kDraining -> kConfirming -> kEnded
//
// kSending: blocks go out as they become ready, then the state slot.  kDraining: no more will be
// sent, some are in flight. kConfirming: TransferDone waits for the decode worker.  Any state may
// end by a failure; from kSending and kDraining that goes through kDraining with `cause_` set,
// because sends read the source blocks.
//
// Thread-safe.

#ifndef PREFILL_WORKER_KV_SEND_H_
#define PREFILL_WORKER_KV_SEND_H_

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kv_transfer/outgoing_transfer.h"
#include "prefill_worker/kv_sender.h"
#include "prefill_worker/peer_links.h"
#include "service/client_call.h"

namespace prefill_worker {

struct KvSendContext {
  worker::WorkerRuntime* runtime;
  worker::WorkerMetrics* metrics;
  PeerLinks* links;
  service::CallTracker* calls;
};

class KvSendImpl final : public KvSend, public std::enable_shared_from_this<KvSendImpl> {
 public:
  KvSendImpl(KvSendContext context, SendSpec spec, std::function<void(SendResult)> on_end);

  void Start();
  void SetReady(int32_t num_blocks) override;
  void Complete(std::vector<FirstToken> first_tokens) override;
  void Stop(absl::Status cause) override;
  void StopForPeer(const std::string& cause, std::function<void(bool any_sent)> drained) override;
  std::string transfer_id() const override;
  bool draining() const override;

  void Tick(absl::Time now);
  void OnPeerLost(const kv_transfer::Epoch& peer, const absl::Status& cause);
  // `on_end` is not called any more.
  void Silence();
  bool ended() const;

 private:
  enum class State { kLinking, kReserving, kSending, kDraining, kConfirming, kEnded };
  // What is to be done once mutex_ is free: calls that may come back to this object.
  using Actions = std::vector<std::function<void()>>;

  void OnLinked(absl::StatusOr<std::shared_ptr<Stub>> stub);
  void OnReserved(absl::StatusOr<ferry::v1::ReserveResponse> response);
  void OnDrained(const kv_transfer::OutgoingResult& result);
  void OnConfirmed(const absl::Status& status);

  // REQUIRE: mutex_ is held.
  absl::Status TakeReservation(const ferry::v1::ReserveResponse& response);
  void Pump(Actions& actions);
  void StopLocked(absl::Status cause, bool tell_peer, Actions& actions);
  void EndLocked(absl::Status status, Actions& actions);
  // Calls (kv_send_calls.cc).
  void Reserve(Actions& actions);
  void Confirm(const kv_transfer::OutgoingResult& result, Actions& actions);
  void TellPeer(const std::string& cause, Actions& actions);
  void ReleaseReservation(const std::string& transfer_id, Actions& actions);
  std::string TransferIdBytes() const;
  static void Run(Actions& actions);

  const KvSendContext context_;
  const SendSpec spec_;

  mutable std::mutex mutex_;  // guards everything below
  std::function<void(SendResult)> on_end_;
  State state_ = State::kLinking;
  absl::Status cause_;  // of a stop; the first one wins
  std::shared_ptr<Stub> stub_;
  int32_t ready_blocks_ = 0;
  bool complete_ = false;
  std::vector<FirstToken> first_tokens_;
  kv_transfer::TransferId transfer_id_{};
  bool reserved_ = false;
  int32_t cached_blocks_ = 0;  // the decode worker has them
  int32_t next_block_ = 0;     // to hand to the transport
  std::shared_ptr<kv_transfer::OutgoingTransfer> transfer_;
  std::vector<std::function<void(bool)>> on_drained_for_peer_;
  int32_t completed_sends_ = 0;
  absl::Time last_progress_ = absl::InfinitePast();
  absl::Time last_sent_ = absl::InfinitePast();  // a block or a heartbeat
  bool fenced_ = false;
  absl::Time first_sent_ = absl::InfinitePast();
  SendResult result_;
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_KV_SEND_H_
