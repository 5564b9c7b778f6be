// DeviceMemory: which of the memory that a transport moves is a device's, and to and from which
// peers it goes as it is.
//
// Thread-safe.

#ifndef KV_TRANSFER_DEVICE_MEMORY_H_
#define KV_TRANSFER_DEVICE_MEMORY_H_

#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

#include "absl/types/span.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

class DeviceMemory final {
 public:
  void Add(absl::Span<const std::byte> region) {
    const std::lock_guard<std::mutex> lock(mutex_);
    regions_.push_back(region);
  }
  bool Contains(const std::byte* data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(regions_.begin(), regions_.end(), [&](const auto& region) {
      return data >= region.data() && data < region.data() + region.size();
    });
  }

  void SetPeer(const Epoch& peer, bool takes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    takes ? void(peers_.insert(peer)) : void(peers_.erase(peer));
  }
  bool TakenBy(const Epoch& peer) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return peers_.contains(peer);
  }

 private:
  mutable std::mutex mutex_;  // guards the rest
  std::vector<absl::Span<const std::byte>> regions_;
  std::set<Epoch> peers_;
};

}  // namespace kv_transfer

#endif  // KV_TRANSFER_DEVICE_MEMORY_H_
