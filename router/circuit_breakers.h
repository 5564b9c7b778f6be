// CircuitBreakers: which workers have failed so often in a row that requests go elsewhere for a
// while.
//
//   closed ── `failures` in a row ──► open ── `open_for` ──► half-open: one request tries it
//     ▲                                 ▲                        │
//     └── it answers ───────────────────┼────────────────────────┤
//                                       └──────── it fails ──────┘
//
// Only what may be the worker's fault is told here (retry_policy.h).  A process that has restarted,
// another epoch, is another worker.  That a worker is dead or silent is WorkerLink's to know; here
// is the one that takes requests and fails them.
//
// Pure of clocks.  Owned by the loop's thread.

#ifndef ROUTER_CIRCUIT_BREAKERS_H_
#define ROUTER_CIRCUIT_BREAKERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "router/prefix_index.h"

namespace router {

enum class BreakerState { kClosed, kOpen, kHalfOpen };
const char* BreakerStateName(BreakerState state);

class CircuitBreakers final {
 public:
  struct Options {
    int32_t failures = 3;  // in a row; 0: none ever opens
    absl::Duration open_for = absl::Seconds(5);
  };
  explicit CircuitBreakers(const Options& options) : options_(options) {}

  BreakerState state(WorkerSlot slot, const std::string& epoch, absl::Time now) const;
  // Closed, or half-open and no request tries it yet.
  bool Admits(WorkerSlot slot, const std::string& epoch, absl::Time now) const;

  // `request` (any number of its own) goes to the worker.  If that is not closed it is the one that
  // tries it, whether it was admitted or has nowhere else to go.
  void Begin(WorkerSlot slot, const std::string& epoch, int64_t request, absl::Time now);
  // It has a first answer: the worker works, at least so far.
  void Answered(WorkerSlot slot, const std::string& epoch, int64_t request);
  // It has got all it wanted.
  void Completed(WorkerSlot slot, const std::string& epoch, int64_t request);
  // `began`: when it went there.  What was under way together fails together: only a request that
  // began after the last failure counts as a further one, and of each request one.  Returns whether
  // the breaker has opened by it.
  bool Failed(WorkerSlot slot, const std::string& epoch, int64_t request, absl::Time began,
              absl::Time now);
  // It is there no more; without a verdict the next one tries.
  void Left(WorkerSlot slot, const std::string& epoch, int64_t request);

 private:
  struct Breaker {
    std::string epoch;
    int32_t failures = 0;                          // in a row
    absl::Time open_until = absl::InfinitePast();  // InfinitePast: closed
    int64_t probe = 0;                             // the request that tries it; 0: none
    int64_t last_failed = 0;                       // request
    absl::Time last_failure = absl::InfinitePast();
  };
  const Breaker* Find(WorkerSlot slot, const std::string& epoch) const;
  Breaker* Find(WorkerSlot slot, const std::string& epoch);

  const Options options_;
  std::vector<Breaker> breakers_;  // by slot
};

}  // namespace router

#endif  // ROUTER_CIRCUIT_BREAKERS_H_
