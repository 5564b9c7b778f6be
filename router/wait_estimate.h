// WaitEstimate: how long a request of the queue has to wait, foreseen from what has gone lately.
//
// The queue's speed is measured, not computed: tokens of requests taken, over the time in which
// others waited.  So it holds whatever is short: prefill, seats or room for the cache.  What
// follows (from the worker's choice to the first token) is the policy's prediction, corrected by
// what was observed of its predictions.  Newer observations count more: a weight e^(-time / 10 s).
//
// Pure of clocks: the caller tells the time.  Owned by the loop's thread.

#ifndef ROUTER_WAIT_ESTIMATE_H_
#define ROUTER_WAIT_ESTIMATE_H_

#include <cstdint>

#include "absl/time/time.h"

namespace router {

class WaitEstimate final {
 public:
  // Requests of so many tokens have left the queue for workers; `others_wait`: some were left.
  void OnTaken(int64_t tokens, bool others_wait, absl::Time now);
  // A first token came `observed` after the choice of a worker; `predicted` by the policy, 0: not.
  void OnFirstToken(absl::Duration predicted, absl::Duration observed);

  // Until `tokens` have left the queue; 0 while its speed is not known.
  absl::Duration Wait(int64_t tokens) const;
  // From the choice of a worker to the first token; 0: not known.
  absl::Duration FirstToken() const { return absl::Seconds(first_token_s_); }
  // The policy's prediction of that for one request, corrected.
  absl::Duration Corrected(absl::Duration predicted) const { return predicted * correction_; }

 private:
  bool others_waited_ = false;  // since last_taken_
  absl::Time last_taken_;
  double tokens_ = 0;
  double seconds_ = 0;
  double first_token_s_ = 0;
  double correction_ = 1;
};

}  // namespace router

#endif  // ROUTER_WAIT_ESTIMATE_H_
