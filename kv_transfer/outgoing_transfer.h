// OutgoingTransfer: the sending worker's side of one transfer: which blocks were handed to the
// transport, how many of its sends have completed, and whether any failed.
//
// Source blocks may be reused only when num_in_flight() is 0 (rules M2, M5).
// Thread-safe.  Callbacks run on the transport's progress thread and must not block.

#ifndef KV_TRANSFER_OUTGOING_TRANSFER_H_
#define KV_TRANSFER_OUTGOING_TRANSFER_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

struct OutgoingResult {
  absl::Status status;  // OK: every send completed
  uint64_t bytes = 0;
  int32_t blocks = 0;
  absl::Time first_sent = absl::InfinitePast();  // of this host, for durations only
};

class OutgoingTransfer {
 public:
  virtual ~OutgoingTransfer() = default;

  // Queues one block for sending.  After a failure or Stop: ignored.
  virtual void SendBlock(uint32_t index, absl::Span<const std::byte> block) = 0;
  virtual void SendStateSlot(absl::Span<const std::byte> slot) = 0;
  // For a sender that has nothing to send yet, so that the receiver goes on waiting
  // (IncomingSpec::stall_timeout).  As SendBlock, but counts for nothing in the result.
  virtual void SendHeartbeat() = 0;

  // No more will be sent: `on_drained` is called once when no send is in flight any more (at once,
  // on the caller's thread, if none is).
  virtual void Finish(std::function<void(OutgoingResult)> on_drained) = 0;
  // As Finish, and sends not yet handed to the transport are dropped; status is `cause`.  May
  // follow Finish; each call's `on_drained` is called once.
  virtual void Stop(absl::Status cause, std::function<void(OutgoingResult)> on_drained) = 0;

  virtual int32_t num_in_flight() const = 0;
  virtual absl::Status status() const = 0;  // first failure so far
};

// `transport` must outlive it.  Keeps itself alive while sends are in flight.
std::shared_ptr<OutgoingTransfer> StartOutgoingTransfer(Transport* transport, const Epoch& receiver,
                                                        const TransferId& id, uint32_t attempt);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_OUTGOING_TRANSFER_H_
