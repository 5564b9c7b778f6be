// PrefillSpeeds: how much longer than it said at its start each worker takes to compute prompts,
// learned from what it has computed.
//
// The slowdown is a ratio of sums, time observed over time predicted, in which every observation
// fades with e^(-age / 10 s), plus a little time in which nothing surprised.  So long prompts say
// more than short ones, a slow worker is noticed within a few prompts, and one that is given
// nothing because it was slow is tried again.
//
// Pure of clocks.  Owned by the loop's thread.

#ifndef ROUTER_PREFILL_SPEEDS_H_
#define ROUTER_PREFILL_SPEEDS_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "router/prefix_index.h"

namespace router {

class PrefillSpeeds final {
 public:
  // What one observation, and so the slowdown, can say: beyond this the worker stood still.
  static constexpr double kMost = 4;

  // The worker has computed a prompt.  `predicted`: by its numbers of its start; of 0, or without
  // end, nothing is learned.  Another epoch is another worker.
  void Observe(WorkerSlot slot, const std::string& epoch, absl::Duration predicted,
               absl::Duration observed, absl::Time now);

  // Within 1 / kMost .. kMost; 1: as it said, or nothing is known.
  double slowdown(WorkerSlot slot, const std::string& epoch, absl::Time now) const;

 private:
  struct Worker {
    std::string epoch;
    double predicted_s = 0;  // faded until `at`
    double observed_s = 0;
    absl::Time at = absl::InfinitePast();
  };
  std::vector<Worker> workers_;  // by slot
};

}  // namespace router

#endif  // ROUTER_PREFILL_SPEEDS_H_
