// KvReceiver: the destination blocks and state slots of transfers that are on their way.
//
// It owns them from the reservation until nothing lands in them any more (rule M1 of serving.md 4):
// they leave it either confirmed, to the request, or back to the pool, and in both cases only when
// IncomingTransfers has called on_end.  A transfer that nobody wants any more is abandoned: its
// blocks and slot are quarantined until then.
//
// Owned by the scheduler thread; `post` brings the ends of transfers there.

#ifndef DECODE_WORKER_KV_RECEIVER_H_
#define DECODE_WORKER_KV_RECEIVER_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "decode_worker/transfer_calls.h"
#include "engine/block_pool.h"
#include "kv_transfer/incoming_transfers.h"
#include "worker/worker_runtime.h"
#include "worker/worker_service.h"

namespace decode_worker {

class KvReceiver final {
 public:
  using TransferId = kv_transfer::TransferId;

  // How a transfer that was not abandoned ended.  With an OK status blocks and slot hold the
  // announced bytes and belong to the callee; otherwise they are back in the pool and not named.
  struct End {
    uint64_t owner = 0;
    TransferId id{};
    kv_transfer::IncomingResult result;
    std::vector<engine::BlockId> blocks;
    engine::SlotId state_slot = engine::kNoSlot;
  };
  struct Options {
    absl::Duration stall_timeout;
    absl::Duration
        abandon_grace;  // started receives of an abandoned transfer get so long before a fence
  };

  // Everything must outlive it, and `post` may be called until `incoming` is destroyed.  `post`
  // runs its argument on the scheduler thread, or drops it when that has stopped.
  KvReceiver(const worker::WorkerRuntime* runtime, kv_transfer::IncomingTransfers* incoming,
             const Options& options, std::function<void(std::function<void()>)> post,
             std::function<void(End)> on_end);

  // Expects `blocks`, and a state slot unless it is kNoSlot, from `sender`, whose link must stand.
  // They belong to the receiver from now on.
  TransferId Open(uint64_t owner, const worker::RequestId& request,
                  const kv_transfer::Epoch& sender, std::vector<engine::BlockId> blocks,
                  engine::SlotId state_slot, absl::Duration total_timeout);

  // The sender says that every byte has left it.  Errors: the transfer has failed; its end follows.
  absl::Status Announce(const TransferId& id, int32_t num_blocks, uint64_t num_bytes);

  // The owner wants it no more: its on_end will not be called.  REQUIRES: open, not abandoned.
  void Abandon(const TransferId& id, const absl::Status& cause);

  // Calls `done` when nothing of the transfers that `ref` names lands any more, with whether
  // anything had.  At once, with false, if there is none.
  void OnDrained(const TransferRef& ref, std::function<void(bool anything_landed)> done);

  // For the end of the process: calls every OnDrained that still waits.  The memory is not used
  // again.
  void AnswerWaiters();

  int32_t num_receiving() const { return static_cast<int32_t>(transfers_.size()); }
  struct Counts {
    int32_t blocks = 0;
    int32_t state_slots = 0;
  };
  const Counts& reserved() const { return reserved_; }
  const Counts& quarantined() const { return quarantined_; }

 private:
  struct Transfer {
    uint64_t owner = 0;
    worker::RequestId request;
    kv_transfer::Epoch sender;
    std::vector<engine::BlockId> blocks;
    engine::SlotId state_slot = engine::kNoSlot;
    bool abandoned = false;
    std::vector<std::function<void(bool)>> on_drained;
  };
  void Ended(const TransferId& id, kv_transfer::IncomingResult result);
  static void Add(const Transfer& transfer, int32_t sign, Counts& counts);

  const worker::WorkerRuntime* const runtime_;
  kv_transfer::IncomingTransfers* const incoming_;
  const Options options_;
  const std::function<void(std::function<void()>)> post_;
  const std::function<void(End)> on_end_;
  absl::flat_hash_map<TransferId, Transfer> transfers_;
  Counts reserved_;
  Counts quarantined_;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_KV_RECEIVER_H_
