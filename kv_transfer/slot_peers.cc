#include "kv_transfer/slot_peers.h"

#include <utility>

namespace kv_transfer {
namespace {

// Links between processes of one host.
bool WithinHost(const LinkAddress& address) {
  return address.kind == "shm" || address.kind == "loopback";
}

}  // namespace

void SlotPeers::Offer(std::vector<LinkAddress>& addresses) const {
  if (own_ == nullptr) return;
  for (LinkAddress& address : addresses) {
    if (WithinHost(address)) address.slots = own_->address();
  }
}

absl::StatusOr<std::shared_ptr<const PeerSlots>> SlotPeers::Open(
    absl::Span<const LinkAddress> own_addresses,
    absl::Span<const LinkAddress> peer_addresses) const {
  for (const LinkAddress& own : own_addresses) {
    if (!WithinHost(own)) continue;
    for (const LinkAddress& peer : peer_addresses) {
      if (peer.kind == own.kind && peer.host_id == own.host_id && !peer.slots.empty()) {
        return PeerSlots::Open(copies_, peer.slots);
      }
    }
  }
  return absl::NotFoundError("no slots are offered within this host");
}

void SlotPeers::Add(const Epoch& peer, std::shared_ptr<const PeerSlots> slots) {
  const std::lock_guard<std::mutex> lock(mutex_);
  theirs_.emplace(peer, std::move(slots));  // messages may lie in those that are there
}

void SlotPeers::AddReader(const Epoch& peer) {
  if (own_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  readers_.insert(peer);
}

void SlotPeers::Lose(const Epoch& peer) {
  std::shared_ptr<const PeerSlots> slots;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    readers_.erase(peer);
    const auto it = theirs_.find(peer);
    if (it == theirs_.end()) return;
    slots = std::move(it->second);
    theirs_.erase(it);
  }
  copies_->Settle([slots = std::move(slots)](const absl::Status&) mutable { slots.reset(); });
}

bool SlotPeers::ReadsOurs(const Epoch& peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return readers_.contains(peer);
}

bool SlotPeers::WeRead(const Epoch& peer) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return theirs_.contains(peer);
}

absl::Span<const std::byte> SlotPeers::Find(const Epoch& peer, uint16_t slot,
                                            uint64_t length) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = theirs_.find(peer);
  if (it == theirs_.end()) return {};
  return it->second->Find(slot, length);
}

}  // namespace kv_transfer
