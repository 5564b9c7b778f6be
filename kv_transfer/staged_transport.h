// StagedTransport: a transport for memory that only a device sees, over one that sees the host's.
//
// A link that takes the device's memory is left to it.  Over any other every message goes through a
// slot of pinned memory.  A sender's slot is sent as soon as its copy has ended, while the next
// ones are being copied; a receiver copies each slot on as soon as it has arrived.  So the copies
// of a transfer run beside its way over the link, and nothing waits for a step of the device or
// holds one up.
//
// Between processes of one host the sender's slot is the receiver's as well (shared_slots.h): the
// link carries only which one it is, and the answer that it is read no more.  Who has mapped the
// other's slots says so; until then, and where they cannot be mapped, bytes go over the link.
//
// What the contract says of the memory holds for the device's copies too: a send is done only when
// its copy has ended as well, a message is received only when its bytes are in the device's memory,
// and OnPeerLost and Fence come after the last copy of that peer.
//
// Thread-safe.  Callbacks run on the inner transport's progress thread or on a thread of the
// copies.

#ifndef KV_TRANSFER_STAGED_TRANSPORT_H_
#define KV_TRANSFER_STAGED_TRANSPORT_H_

#include <cstdint>
#include <memory>

#include "kernels/device_copies.h"
#include "kv_transfer/shared_slots.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

// Slots that are made for each connected peer: what may be on the wire, and what is being copied.
inline constexpr int32_t kStagingSlotsPerPeer = kSendWindow + kSendWindow / 2;
// And for all that read ours: some of them may stand still.
inline constexpr uint16_t kSharedSlots = 2 * kSendWindow;

// `copies` must outlive it.  `slot_bytes`: of the largest message, at most kMaxMessageBytes; a
// larger one ends kInvalidArgument.  `shared`: for peers of this host, of no fewer bytes; null:
// none, all goes over links.
std::unique_ptr<Transport> CreateStagedTransport(std::unique_ptr<Transport> inner,
                                                 kernels::DeviceCopies* copies, int64_t slot_bytes,
                                                 std::unique_ptr<SharedSlots> shared);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_STAGED_TRANSPORT_H_
