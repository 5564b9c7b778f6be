// SlotPeers: with which peers slots are shared (shared_slots.h): who reads ours, and whose we read.
//
// Thread-safe.

#ifndef KV_TRANSFER_SLOT_PEERS_H_
#define KV_TRANSFER_SLOT_PEERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device_copies.h"
#include "kv_transfer/shared_slots.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

class SlotPeers {
 public:
  // `copies` must outlive it.  `own` may be null: then nobody is asked to read them.
  SlotPeers(kernels::DeviceCopies* copies, std::unique_ptr<SharedSlots> own)
      : copies_(copies), own_(std::move(own)) {}

  // Adds our slots to the addresses of links within a host.
  void Offer(std::vector<LinkAddress>& addresses) const;

  // Maps those that a process of this host offers.  Blocks for some milliseconds.
  // Errors: kUnavailable, kResourceExhausted; kNotFound if it offers none to us.
  absl::StatusOr<std::shared_ptr<const PeerSlots>> Open(
      absl::Span<const LinkAddress> own_addresses,
      absl::Span<const LinkAddress> peer_addresses) const;
  void Add(const Epoch& peer, std::shared_ptr<const PeerSlots> slots);

  // The peer has mapped ours.
  void AddReader(const Epoch& peer);

  // No message of the peer's slots is accepted any more.  They are unmapped behind the copies to
  // the device that were started by now.
  void Lose(const Epoch& peer);

  bool ReadsOurs(const Epoch& peer) const;
  bool WeRead(const Epoch& peer) const;

  // Of ours.
  uint16_t Take() { return own_ == nullptr ? uint16_t{0} : own_->Take(); }
  void Return(uint16_t slot) { own_->Return(slot); }
  std::byte* data(uint16_t slot) const { return own_->data(slot); }

  // What lies in a slot of the peer.  Empty: that is none.
  absl::Span<const std::byte> Find(const Epoch& peer, uint16_t slot, uint64_t length) const;

 private:
  kernels::DeviceCopies* const copies_;
  const std::unique_ptr<SharedSlots> own_;
  mutable std::mutex mutex_;  // guards the rest
  std::set<Epoch> readers_;
  std::map<Epoch, std::shared_ptr<const PeerSlots>> theirs_;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_SLOT_PEERS_H_
