// EndedRequests: which requests have ended here lately, so that one that comes once more, late, is
// known and does not run again.
//
// Thread-compatible.

#ifndef WORKER_ENDED_REQUESTS_H_
#define WORKER_ENDED_REQUESTS_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"

namespace worker {

class EndedRequests final {
 public:
  // So many are remembered, those that ended last.
  static constexpr size_t kMost = 4096;

  // This attempt of the request, or a newer one, has ended.
  void Add(const std::string& request_id, uint32_t attempt);
  // The newest attempt that has ended; nothing if none is remembered.
  std::optional<uint32_t> newest(const std::string& request_id) const;

 private:
  struct Ended {
    uint32_t newest;
    std::list<std::string>::iterator place;  // in order_
  };

  absl::flat_hash_map<std::string, Ended> requests_;
  std::list<std::string> order_;  // of their last ends
};

}  // namespace worker

#endif  // WORKER_ENDED_REQUESTS_H_
