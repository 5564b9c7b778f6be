// CacheLink: two UCX transports in this process, from one engine's cache to another's: what lies
// between a prefill and a decode worker, without the workers.
//
// Thread-compatible.

#ifndef CLI_CACHE_LINK_H_
#define CLI_CACHE_LINK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/engine.h"
#include "kernels/device_copies.h"
#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/transport.h"

namespace cli {

class CacheLink final {
 public:
  // Both have a cache, and must outlive the link.  Errors: kUnavailable if UCX cannot connect them.
  static absl::StatusOr<std::unique_ptr<CacheLink>> Create(engine::Engine& source,
                                                           engine::Engine& target);
  ~CacheLink();

  struct Report {
    uint64_t bytes = 0;
    absl::Duration duration;
  };
  // What one side of a transfer holds.
  template <typename Byte>
  struct Pieces {
    std::vector<absl::Span<Byte>> blocks;
    absl::Span<Byte> state_slot = {};  // empty: none
  };
  // Sends from to to and returns when the receiver has every byte.
  // REQUIRES: equally many pieces of equal sizes, within the caches.
  absl::StatusOr<Report> Send(const Pieces<const std::byte>& from, const Pieces<std::byte>& to);

  std::string link_name() const;  // "shm/sysv"

 private:
  struct Side {
    kv_transfer::Epoch epoch;
    std::unique_ptr<kernels::DeviceCopies> copies;  // null: the transport sees the cache itself
    std::unique_ptr<kv_transfer::Transport> transport;
    std::unique_ptr<kv_transfer::IncomingTransfers> incoming;
  };
  static absl::StatusOr<Side> OpenSide(engine::Engine& engine);

  CacheLink(Side source, Side target);

  Side source_;
  Side target_;
};

}  // namespace cli

#endif  // CLI_CACHE_LINK_H_
