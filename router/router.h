// Router: everything behind the public service: the loop and what belongs to it.  main and the
// tests make one, put its service on a server, and stop both.

#ifndef ROUTER_ROUTER_H_
#define ROUTER_ROUTER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "router/circuit_breakers.h"
#include "router/dispatcher.h"
#include "router/event_loop.h"
#include "router/generation.h"
#include "router/load_ledger.h"
#include "router/metrics.h"
#include "router/name_watch.h"
#include "router/options.h"
#include "router/prefix_index.h"
#include "router/request.h"
#include "router/worker_registry.h"
#include "tracing/span_exporter.h"

namespace prometheus {
class Registry;
}

namespace router {

class Router final {
 public:
  // `metrics` must outlive the router.  REQUIRES: options.Validate() is OK.
  Router(const RouterOptions& options, std::vector<std::unique_ptr<ModelAssets>> models,
         prometheus::Registry* metrics);
  ~Router();  // Stop()

  // Connects to the workers.  `on_ready` is told, on the loop's thread, whenever IsReady changes.
  void Start(std::function<void(bool)> on_ready);

  // Refuses new requests from now on; running ones go on.  Thread-safe.
  void StartDrain() { draining_ = true; }
  bool draining() const { return draining_; }
  // Waits until no request runs.  False: `limit` passed first.  Not on the loop's thread.
  bool WaitUntilIdle(absl::Duration limit) { return client_calls_->WaitForNone(limit); }
  // Ends what still runs with `status`.  Not on the loop's thread.
  void AbortAll(const absl::Status& status);
  // Leaves the workers and stops the loop.  No call of the service may be running any more.
  void Stop();

  // Any thread.
  const ServedModels& models() const { return models_; }
  EventLoop* loop() { return &loop_; }
  RouterMetrics* metrics() { return metrics_.get(); }
  absl::Duration default_deadline() const { return default_deadline_; }
  double trace_ratio() const { return trace_ratio_; }
  int64_t NextNumber() { return next_number_.fetch_add(1); }
  const std::shared_ptr<OutstandingCalls>& client_calls() const { return client_calls_; }

  // The loop's thread only.
  // Errors: kAlreadyExists when the id belongs to a running request; the stream is then not used.
  absl::Status Submit(int64_t number, PreparedRequest request,
                      std::shared_ptr<ClientStream> client);
  // Whether the request of that number was submitted and has not ended.
  bool IsOpen(int64_t number) const;
  void OnClientGone(int64_t number);
  void OnClientDrained(int64_t number);
  // Whether a new request for some model would be served.  Errors: kUnavailable, with what is
  // missing.
  absl::Status CheckReady() const;
  WorkerRegistry& registry() { return *registry_; }
  PrefixIndex& index() { return index_; }
  LoadLedger& ledger() { return ledger_; }
  CircuitBreakers& breakers() { return breakers_; }
  size_t num_running() const { return generations_.size(); }

 private:
  bool IsReady() const;  // CheckReady, without the sentence
  void OnWorkersChanged();
  void OnWorkerLost(WorkerSlot slot, const std::string& epoch, const absl::Status& cause);
  void RemoveLeftWorkers();
  void WriteGauges();

  const absl::Duration default_deadline_;
  const absl::Duration name_period_;
  const double trace_ratio_;
  std::vector<WorkerName> names_;  // of workers, to be looked up
  const ServedModels models_;
  const std::unique_ptr<RouterMetrics> metrics_;
  std::unique_ptr<tracing::SpanExporter> spans_;  // null: nobody wants them
  std::atomic<bool> draining_{false};
  std::atomic<int64_t> next_number_{1};
  // Shared with RPCs whose last callback may come late.
  const std::shared_ptr<OutstandingCalls> worker_calls_;
  const std::shared_ptr<OutstandingCalls> client_calls_;

  EventLoop loop_;
  bool stopped_ = false;
  std::unique_ptr<NameWatch> name_watch_;
  // All below belong to the loop's thread.
  PrefixIndex index_;
  LoadLedger ledger_;
  CircuitBreakers breakers_;
  std::unique_ptr<WorkerRegistry> registry_;
  std::unique_ptr<Dispatcher> dispatcher_;
  GenerationContext generation_context_;
  absl::flat_hash_map<int64_t, std::unique_ptr<Generation>> generations_;  // by number
  absl::flat_hash_map<std::string, int64_t> running_ids_;
  std::function<void(bool)> on_ready_;
  bool ready_ = false;
};

}  // namespace router

#endif  // ROUTER_ROUTER_H_
