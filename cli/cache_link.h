// CacheLink: two UCX transports in this process, from one cache to another: what lies between a
// prefill and a decode worker, without the workers.
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
#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/transport.h"

namespace cli {

class CacheLink final {
 public:
  // Both caches must outlive the link.
  // Errors: kUnavailable if UCX cannot connect them.
  static absl::StatusOr<std::unique_ptr<CacheLink>> Create(absl::Span<std::byte> source_cache,
                                                           absl::Span<std::byte> target_cache);
  ~CacheLink();

  struct Report {
    uint64_t bytes = 0;
    absl::Duration duration;
  };
  // Sends from[i] to to[i] and returns when the receiver has every byte.
  // REQUIRES: equally many blocks of equal sizes, within the caches.
  absl::StatusOr<Report> Send(const std::vector<absl::Span<const std::byte>>& from,
                              const std::vector<absl::Span<std::byte>>& to);

  std::string link_name() const;  // "shm/sysv"

 private:
  struct Side {
    kv_transfer::Epoch epoch;
    std::unique_ptr<kv_transfer::Transport> transport;
    std::unique_ptr<kv_transfer::IncomingTransfers> incoming;
  };
  static absl::StatusOr<Side> OpenSide(absl::Span<std::byte> cache);

  CacheLink(Side source, Side target);

  Side source_;
  Side target_;
};

}  // namespace cli

#endif  // CLI_CACHE_LINK_H_
