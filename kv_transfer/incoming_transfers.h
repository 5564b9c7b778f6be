// IncomingTransfers: the receiving worker's record of what is expected, from whom, into which
// memory.
//
// It is the transport's sink.  A transfer is opened with its destinations (Expect), filled by the
// transport, closed by the sender's announcement (Announce) and confirmed when its own receives
// cover every announced byte; or it ends by failure: a stalled or dead sender, a total deadline, an
// abort. In every case `on_end` is called exactly once, and only when no byte can land in the
// destinations any more: the caller may then reuse them.  That is rule M1 of serving.md 4; a
// timeout alone never authorises reuse, it fences the peer first.
//
// A sender may take its time (a slow worker computes a chunk for seconds): its heartbeats say that
// it is alive and at work.  A stopped or cut-off one ends the transfer within the stall timeout.
//
// Stale or unknown messages (another epoch, attempt or transfer, an index twice, a wrong length)
// are refused and counted, never written.
//
// Thread-safe.  `on_end` runs on the transport's progress thread or on this object's timer thread
// and must not block.

#ifndef KV_TRANSFER_INCOMING_TRANSFERS_H_
#define KV_TRANSFER_INCOMING_TRANSFERS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

struct IncomingSpec {
  TransferId transfer_id{};
  uint32_t attempt = 0;
  Epoch sender;
  std::vector<absl::Span<std::byte>> blocks;  // by index in the reservation
  absl::Span<std::byte> state_slot;           // empty: none expected
  // No receive completed for so long and, while none is started, no heartbeat came either.
  absl::Duration stall_timeout = absl::Seconds(5);
  absl::Duration total_timeout = absl::Seconds(60);
};

struct IncomingResult {
  absl::Status status;  // OK: every byte announced has arrived
  uint64_t bytes = 0;
  int32_t blocks = 0;
  absl::Duration first_to_last = absl::ZeroDuration();  // first offer .. last receive
};

struct IncomingCounts {  // transfers now
  int32_t receiving = 0;
  int32_t quarantined = 0;  // ended, but a receive has not completed: blocks are not reusable yet
};

class IncomingTransfers {
 public:
  virtual ~IncomingTransfers() = default;

  // Errors: kAlreadyExists for a known transfer_id.
  virtual absl::Status Expect(IncomingSpec spec, std::function<void(IncomingResult)> on_end) = 0;

  // The sender says that it sent `num_blocks` blocks and `num_bytes` bytes.  A difference from what
  // was expected ends the transfer with kDataLoss.  An unknown transfer: kNotFound.
  virtual absl::Status Announce(const TransferId& id, int32_t num_blocks, uint64_t num_bytes) = 0;

  // Ends a transfer: refuses further offers; `on_end` follows (with `cause`) once started receives
  // have completed; if they have not within `grace`, the sender is fenced.  False: unknown (already
  // ended).
  virtual bool Abort(const TransferId& id, absl::Status cause, absl::Duration grace) = 0;

  // Ends every transfer of a sender that is known to be gone; fences it.
  virtual void AbortPeer(const Epoch& sender, absl::Status cause) = 0;

  virtual IncomingCounts counts() const = 0;
};

// Becomes `transport`'s sink.  `transport` must outlive it, and must be closed before it is
// destroyed.
std::unique_ptr<IncomingTransfers> CreateIncomingTransfers(const Epoch& own_epoch,
                                                           Transport* transport);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_INCOMING_TRANSFERS_H_
