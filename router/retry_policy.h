// What the router does when a try of a request has failed (serving.md 3.5): pure rules.

#ifndef ROUTER_RETRY_POLICY_H_
#define ROUTER_RETRY_POLICY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace router {

// What has gone wrong with one request so far.
struct FailureCounts {
  int32_t counted = 0;  // tries used up
  int32_t internal = 0;
  int32_t aborted = 0;  // transfers broken; often by a fence that was meant for another request
  int32_t refused = 0;  // workers that never had it: full, draining, restarted or out of reach
};

struct RetryVerdict {
  bool retry = false;
  // A worker that has failed the request gets it again only after this long, and only if nobody
  // else can.
  absl::Duration same_worker_back_off = absl::ZeroDuration();
};

// Counts `error` in `failures` and decides.  `accepted`: the worker that failed had taken the
// request.  `max_attempts` includes the first try.  It bounds how many workers a request can take
// down with it, so what cannot be its doing costs no try: a worker that never had the request, or
// one that drains; the deadline bounds those.  A broken transfer costs half a one.
// REQUIRES: !error.ok().
RetryVerdict DecideRetry(const absl::Status& error, bool accepted, int32_t max_attempts,
                         FailureCounts* failures);

// Whether `error` may be the fault of the worker it came from, so that other requests should rather
// go elsewhere: not what is the request's own doing, and not a worker that is full or leaves.
bool BlamesWorker(const absl::Status& error);

// What the client is told when there is no further try, with a public message (status/) where
// `error` may speak of workers.
absl::Status FinalStatus(const absl::Status& error, int32_t attempts);

}  // namespace router

#endif  // ROUTER_RETRY_POLICY_H_
