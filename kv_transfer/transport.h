// Transport: moves registered bytes between processes.  Knows bytes, not tensors.
//
// The movement is receiver-directed.  A sender offers a message with a fixed header; the receiver's
// sink names the memory it goes to, or refuses it.  Three facts shape everything above:
//
//   - A send completes with success also for data that the receiver dropped: at the sender it means
//     only "the source is read no more".  Only the receiver knows that bytes arrived.
//   - A started receive cannot be cancelled.  Destination memory may be reused only when its
//     receive has completed, was never started, or after Fence of its peer.
//   - A dead, suspended or cut-off peer may go unnoticed: every transfer has a deadline of its own
//     (kv_transfer/incoming_transfers.h).
//
// Thread-safe.  Callbacks run on the transport's progress thread and must not block.  Register,
// SetSink, Connect, LinkName, Fence and Close wait for that thread: they are not called from a
// callback (which may Send), and not under a lock that a callback takes.

#ifndef KV_TRANSFER_TRANSPORT_H_
#define KV_TRANSFER_TRANSPORT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace kv_transfer {

// 16 random bytes drawn at process start: a restarted process is another peer.
struct Epoch {
  std::array<uint8_t, 16> bytes{};
  friend bool operator==(const Epoch&, const Epoch&) = default;
  friend auto operator<=>(const Epoch&, const Epoch&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Epoch& epoch) {
    return H::combine(std::move(h), epoch.bytes);
  }
  static Epoch Random();
  // Errors: kInvalidArgument unless raw has 16 bytes.
  static absl::StatusOr<Epoch> FromBytes(std::string_view raw);
  std::string ToBytes() const;
  std::string ToHex() const;  // for logs
};

using TransferId = std::array<uint8_t, 16>;

// A heartbeat carries no bytes: it says that the sender of an open transfer is at work on what
// comes next.  What follows it is between two staged transports (staged_transport.cc).
enum class MessageKind : uint32_t {
  kBlock = 1,
  kStateSlot = 2,
  kHeartbeat = 3,
  kSlotsMapped = 4,  // who sends this takes messages in the receiver's slots
  kSlotRead = 5,     // answers such a message, with its fields: the slot is read no more
  kSlotRefused = 6,  // the same, and the message was refused
};

// Travels in front of every message; little-endian, 64 bytes on the wire.
struct MessageHeader {
  TransferId transfer_id{};
  uint32_t attempt = 0;
  MessageKind kind = MessageKind::kBlock;
  Epoch receiver_epoch;  // whom the sender means; another process drops it as stale
  uint32_t index = 0;    // position in the reservation; raw block ids never travel
  uint32_t part = 0;     // of a block above kMaxMessageBytes: covers part * kMaxMessageBytes ..
  uint64_t length = 0;   // bytes
  // Where they are: in this one of the sender's shared slots (shared_slots.h); 0: they follow.
  uint16_t slot = 0;

  uint64_t following() const { return slot == 0 ? length : 0; }
};

// Where a receiver wants a message, or why not.
class ReceiveSink {
 public:
  virtual ~ReceiveSink() = default;
  // Called before any byte of `header` lands.  Returns the destination, exactly header.following()
  // bytes that stay valid until OnReceived, or an error to drop the message (it is counted, and
  // never seen as arrived).
  virtual absl::StatusOr<absl::Span<std::byte>> OnOffer(const Epoch& sender,
                                                        const MessageHeader& header) = 0;
  // Once for every accepted offer: OK means the bytes are readable now; otherwise they are
  // undefined and nothing lands any more.
  virtual void OnReceived(const Epoch& sender, const MessageHeader& header,
                          absl::Status status) = 0;
  // The link to `peer` is gone (death, fence, disconnect).  Receives of it have all completed.
  virtual void OnPeerLost(const Epoch& peer, absl::Status cause) = 0;
};

// What another process needs to reach this one over one kind of link.
struct LinkAddress {
  std::string kind;            // "shm", "tcp", "rc", "loopback"
  std::string host_id;         // equal = same host (shm is possible)
  std::string worker_address;  // opaque
  std::string listener;        // "ip:port" or ""; who listens on 0.0.0.0 says so
  std::string slots = "";      // SharedSlots::address()
};

// Whose memory it is.  A device's is not readable by the host.
enum class MemoryKind : uint8_t { kHost, kDevice };

struct TransportStats {  // counters since start
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t messages_sent = 0;
  uint64_t messages_received = 0;
  uint64_t messages_refused = 0;  // dropped by the sink or as stale
  uint64_t messages_failed = 0;   // receives or sends that ended in an error
  uint64_t fences = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::vector<LinkAddress> addresses() const = 0;  // may change: ask before each handshake

  // Memory that will be sent from or received into.  Must outlive the transport.  A device's goes
  // only to and comes only from peers whose link takes it.
  virtual absl::Status Register(absl::Span<std::byte> region, MemoryKind kind) = 0;

  // `sink` must outlive the transport.  REQUIRES: called once, before the first Connect.
  virtual void SetSink(ReceiveSink* sink) = 0;

  // Makes a peer reachable, over the best link kind both have.  The other side calls Connect too
  // (both addresses travel in the Handshake).  Connecting again to a connected epoch is a no-op.
  // Errors: kUnavailable (cannot be reached within `timeout`), kFailedPrecondition (no common link
  // kind: no further try mends that).
  virtual absl::Status Connect(const Epoch& peer, absl::Span<const LinkAddress> peer_addresses,
                               absl::Duration timeout) = 0;
  // "shm/sysv", "tcp/lo": the link in use to a connected peer, "" if there is none.
  virtual std::string LinkName(const Epoch& peer) const = 0;
  // Whether the link to a connected peer takes a device's memory as it is.  May be called from a
  // callback.
  virtual bool TakesDeviceMemory(const Epoch& peer) const = 0;

  // Sends `data` (may be empty).  At most kSendWindow messages a peer are on the wire, the rest
  // queue. `done` is called once: OK means the source is read no more and may be reused -- not that
  // it arrived. Errors (through `done`): kUnavailable if the peer is lost or fenced, kAborted if
  // its sink refused the message, kInvalidArgument if header.following() is not data.size() or
  // above kMaxMessageBytes.
  virtual void Send(const Epoch& peer, const MessageHeader& header,
                    absl::Span<const std::byte> data, std::function<void(absl::Status)> done) = 0;

  // Cuts the link to `peer`: no receive from it is started any more, and when Fence returns OK
  // every receive that had started has completed (OnReceived was called): nothing of the peer lands
  // from then on.  Its queued sends end kUnavailable.  Ends every transfer of that pair.  An
  // unknown peer: OK. Errors: kDeadlineExceeded if `timeout` passed first; memory must then stay
  // untouched, call again.
  virtual absl::Status Fence(const Epoch& peer, absl::Duration timeout) = 0;

  virtual TransportStats stats() const = 0;

  // Fences every peer and stops the progress thread.  Called by the destructor if needed.
  virtual void Close() = 0;
};

inline constexpr int32_t kSendWindow = 16;  // outstanding messages a peer
inline constexpr int64_t kMaxMessageBytes =
    8 << 20;  // OutgoingTransfer cuts larger blocks into parts

}  // namespace kv_transfer

#endif  // KV_TRANSFER_TRANSPORT_H_
