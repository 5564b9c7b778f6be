// LoopbackTransport: Transport inside one process, for tests.  It can drop, delay, reorder and
// duplicate messages, and play a suspended or dead peer.
//
// Endpoints find each other through a LoopbackNetwork; a fault is decided per message by a
// function.

#ifndef KV_TRANSFER_LOOPBACK_TRANSPORT_H_
#define KV_TRANSFER_LOOPBACK_TRANSPORT_H_

#include <functional>
#include <memory>

#include "kv_transfer/transport.h"

namespace kv_transfer {

enum class LoopbackFault : uint8_t {
  kNone,
  kDrop,   // vanishes; the send completes, as it does for data that a receiver dropped
  kDelay,  // is offered at once, its bytes land after ReleaseDelayed: a started receive that hangs
  kDuplicate,  // arrives twice
  kReorder,    // is offered after the next message of anyone, or at ReleaseDelayed
};

class LoopbackNetwork {
 public:
  virtual ~LoopbackNetwork() = default;
  // Decides what happens to each message; called under no lock.  Null: no faults.
  virtual void SetFaults(std::function<LoopbackFault(const MessageHeader&)> decide) = 0;
  // Delivers messages held back by kDelay and kReorder.
  virtual void ReleaseDelayed() = 0;
  // A suspended endpoint makes no progress: its sends stay on the wire until it is resumed.  Must
  // be resumed before its transport is closed.
  virtual void Suspend(const Epoch& epoch) = 0;
  virtual void Resume(const Epoch& epoch) = 0;
  // Peers of a killed endpoint get OnPeerLost.
  virtual void Kill(const Epoch& epoch) = 0;
};

std::shared_ptr<LoopbackNetwork> CreateLoopbackNetwork();
std::unique_ptr<Transport> CreateLoopbackTransport(std::shared_ptr<LoopbackNetwork> network,
                                                   const Epoch& epoch);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_LOOPBACK_TRANSPORT_H_
