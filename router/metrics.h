// RouterMetrics: the ferry_router_... metrics (serving.md 10.3), seconds and bytes.
//
// Thread-safe.

#ifndef ROUTER_METRICS_H_
#define ROUTER_METRICS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"

namespace prometheus {
class Registry;
}

namespace router {

class RouterMetrics {
 public:
  // `registry` must outlive the object.
  static std::unique_ptr<RouterMetrics> Create(prometheus::Registry* registry);
  virtual ~RouterMetrics() = default;

  // One ended request; negative durations have not happened and are not observed.
  struct Ended {
    std::string model;
    std::string route;    // "remote", "local", "none"
    std::string outcome;  // status::CodeName
    int64_t prompt_tokens = 0;
    int64_t completion_tokens = 0;
    int64_t cached_tokens = 0;
    absl::Duration ttft = -absl::InfiniteDuration();
    absl::Duration tpot = -absl::InfiniteDuration();
    absl::Duration total = -absl::InfiniteDuration();
  };
  virtual void RequestEnded(const Ended& ended) = 0;
  // `stage`: tokenize, queue, dispatch, prefill, first_token (from its placing on), decode.
  virtual void ObserveStage(const std::string& stage, absl::Duration duration) = 0;
  virtual void ObserveSelect(absl::Duration duration) = 0;
  virtual void ObserveTokenGap(absl::Duration duration) = 0;
  virtual void ObservePredictedTtftRatio(double observed_over_predicted) = 0;
  virtual void CountDecision(const std::string& decision, const std::string& reason) = 0;
  virtual void CountRejected(const std::string& reason) = 0;
  virtual void CountRetry(const std::string& cause) = 0;
  virtual void CountMigration() = 0;
  virtual void CountBreakerOpened(const std::string& worker) = 0;
  virtual void CountCancelled(const std::string& phase) = 0;

  // Gauges, written by a timer.
  virtual void SetQueue(int64_t requests, int64_t bytes) = 0;
  virtual void SetRunning(int64_t requests) = 0;
  // Since start.
  virtual void SetSpans(int64_t exported, int64_t dropped) = 0;
  struct Index {
    int64_t entries = 0;
    int64_t predicted = 0;
    int64_t bytes = 0;
    int64_t gaps = 0;
    int64_t snapshots = 0;
    int64_t untrusted_workers = 0;
    int64_t foreign_workers = 0;
  };
  virtual void SetIndex(const Index& index) = 0;
  // 1 for the worker's state; the one it had before disappears.
  virtual void SetWorkerState(const std::string& worker, const std::string& role,
                              const std::string& state) = 0;
  // It has been removed: nothing is said of it any more.
  virtual void ForgetWorker(const std::string& worker) = 0;
  // Observed over stated time to compute a prompt.
  virtual void SetPrefillSlowdown(const std::string& worker, double slowdown) = 0;
  virtual void SetBreakerState(const std::string& worker, const std::string& state) = 0;
  // `tenant`: one with limits of its own, or "other" for all others together.
  virtual void SetTenant(const std::string& tenant, int64_t running, int64_t queued) = 0;
  virtual void SetConfigSeconds(const std::string& name, absl::Duration value) = 0;
};

}  // namespace router

#endif  // ROUTER_METRICS_H_
