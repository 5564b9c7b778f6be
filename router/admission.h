// AdmissionQueue: requests that wait for a worker, in the router, before anything is allocated
// anywhere. Bounded by count and bytes; within a model the higher priority goes first, then the
// earlier arrival.
//
// Owned by the loop's thread.

#ifndef ROUTER_ADMISSION_H_
#define ROUTER_ADMISSION_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

namespace router {

class AdmissionQueue final {
 public:
  struct Limits {
    int64_t max_requests = 4096;
    int64_t max_bytes = int64_t{1} << 30;
  };
  // What stands in the queue; identity is the address, the owner keeps it alive until it is out.
  struct Entry {
    std::string model;
    int32_t priority = 0;
    int64_t arrival = 0;  // unique, counts up: a request that comes back keeps its place
    int64_t bytes = 0;
    absl::Time not_before = absl::InfinitePast();  // left alone until then (back-off)
  };
  enum class Visit {
    kTaken,   // out of the queue
    kSkip,    // stays; the next one may be tried
    kNoRoom,  // stays; nobody behind it is tried either, so that large requests do not starve
  };

  explicit AdmissionQueue(const Limits& limits) : limits_(limits) {}

  // Errors: kResourceExhausted / QUEUE_FULL naming the bound.
  absl::Status Enter(Entry* entry);
  // A request that had been admitted once and comes back: not refused.
  void Return(Entry* entry);
  // False if it was not in.
  bool Leave(Entry* entry);

  // One look at each model's entries: in order until half of kMaxSkips of them have been skipped,
  // then as many again from where the last look ended, so that whoever could go is found behind any
  // number of those who wait.  `visit` must not change the queue.
  static constexpr int kMaxSkips = 64;
  void ForEach(absl::Time now, const std::function<Visit(Entry*)>& visit);

  int64_t num_requests() const { return num_requests_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  using Key = std::tuple<int64_t, int64_t>;  // -priority, arrival
  static Key KeyOf(const Entry& entry) { return {-int64_t{entry.priority}, entry.arrival}; }

  using Entries = std::map<Key, Entry*>;
  struct Model {
    Entries entries;
    Key resume = {std::numeric_limits<int64_t>::min(), 0};  // where the next look goes on
  };

  const Limits limits_;
  absl::flat_hash_map<std::string, Model> models_;
  int64_t num_requests_ = 0;
  int64_t num_bytes_ = 0;
};

}  // namespace router

#endif  // ROUTER_ADMISSION_H_
