#include "router/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <mutex>
#include <utility>

namespace router {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;

Histogram::BucketBoundaries LatencyBuckets() {
  return {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300};
}
Histogram::BucketBoundaries DecisionBuckets() {
  return {5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2};
}

Family<Counter>& Counters(Registry* registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(*registry);
}
Family<Gauge>& Gauges(Registry* registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry);
}
Family<Histogram>& Histograms(Registry* registry, const char* name, const char* help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(*registry);
}

void Observe(Histogram& histogram, absl::Duration duration) {
  if (duration >= absl::ZeroDuration()) histogram.Observe(absl::ToDoubleSeconds(duration));
}

// To what somebody else counts.
void SetCounter(Counter& counter, int64_t value) {
  counter.Increment(static_cast<double>(value) - counter.Value());
}

class PrometheusMetrics final : public RouterMetrics {
 public:
  explicit PrometheusMetrics(Registry* r)
      : requests_(Counters(r, "ferry_router_requests_total", "Ended requests")),
        rejected_(Counters(r, "ferry_router_rejected_total", "Requests refused before dispatch")),
        retries_(Counters(r, "ferry_router_retries_total", "Tries that failed and were repeated")),
        migrations_(Counters(r, "ferry_router_migrations_total",
                             "Outputs that had begun and went on at another decode worker")
                        .Add({})),
        breaker_opened_(Counters(r, "ferry_router_breaker_opened_total",
                                 "Times that a worker's failures kept requests from it")),
        cancelled_(Counters(r, "ferry_router_cancelled_total", "Requests cancelled by the client")),
        decisions_(Counters(r, "ferry_router_disagg_decisions_total",
                            "Where prompts are computed, and why")),
        prompt_tokens_(Counters(r, "ferry_router_prompt_tokens_total", "Prompt tokens").Add({})),
        output_tokens_(
            Counters(r, "ferry_router_generated_tokens_total", "Tokens sent to clients").Add({})),
        hit_tokens_(Counters(r, "ferry_router_prefix_hit_tokens_total",
                             "Prompt tokens that were not computed again")
                        .Add({})),
        stage_(Histograms(r, "ferry_router_stage_seconds", "Time in each stage of a request")),
        select_(Histograms(r, "ferry_router_select_seconds", "Time of one routing decision")
                    .Add({}, DecisionBuckets())),
        ttft_(Histograms(r, "ferry_router_ttft_seconds", "Arrival to first token sent")
                  .Add({}, LatencyBuckets())),
        itl_(Histograms(r, "ferry_router_itl_seconds", "Gap between token messages of a branch")
                 .Add({}, LatencyBuckets())),
        tpot_(Histograms(r, "ferry_router_tpot_seconds", "Time per output token after the first")
                  .Add({}, LatencyBuckets())),
        e2e_(Histograms(r, "ferry_router_e2e_seconds", "Arrival to end").Add({}, LatencyBuckets())),
        predicted_(
            Histograms(r, "ferry_router_predicted_ttft_error_ratio",
                       "Observed over predicted time to the first token")
                .Add({}, Histogram::BucketBoundaries{0.1, 0.25, 0.5, 0.8, 1, 1.25, 2, 4, 10})),
        queue_requests_(
            Gauges(r, "ferry_router_queue_requests", "Requests waiting for a worker").Add({})),
        queue_bytes_(Gauges(r, "ferry_router_queue_bytes", "Bytes of waiting requests").Add({})),
        running_(Gauges(r, "ferry_router_running_requests", "Requests not ended").Add({})),
        index_entries_(
            Gauges(r, "ferry_router_index_entries", "Announced (worker, block) pairs").Add({})),
        index_predicted_(
            Gauges(r, "ferry_router_index_predicted", "Predicted (worker, block) pairs").Add({})),
        index_bytes_(Gauges(r, "ferry_router_index_bytes", "Memory of the prefix index").Add({})),
        index_gaps_(
            Counters(r, "ferry_router_index_gaps_total", "Gaps seen in KV event streams").Add({})),
        index_snapshots_(
            Counters(r, "ferry_router_index_snapshots_total", "Snapshots taken in").Add({})),
        index_untrusted_(
            Gauges(r, "ferry_router_index_untrusted_workers", "Workers whose cache view is stale")
                .Add({})),
        index_foreign_(Gauges(r, "ferry_router_index_foreign_workers",
                              "Workers with another --hash_seed than the router's, whose cached "
                              "blocks cannot be found")
                           .Add({})),
        spans_exported_(Counters(r, "ferry_spans_exported_total",
                                 "Spans of requests that the collector has taken")
                            .Add({})),
        spans_dropped_(
            Counters(r, "ferry_spans_dropped_total",
                     "Spans of requests that the collector did not take, or not soon enough")
                .Add({})),
        worker_state_(Gauges(r, "ferry_router_worker_state", "1 for the state a worker is in")),
        breaker_state_(
            Gauges(r, "ferry_router_breaker_state", "1 for the state of a worker's breaker")),
        prefill_slowdown_(Gauges(r, "ferry_router_prefill_slowdown",
                                 "How much longer a worker computes prompts than it said at its "
                                 "start, as the routing cost has it")),
        tenant_requests_(Gauges(r, "ferry_router_tenant_requests",
                                "Requests by tenant that has limits of its own")),
        config_(Gauges(r, "ferry_config_seconds", "Configured times")) {}

  void RequestEnded(const Ended& ended) override {
    requests_.Add({{"model", ended.model}, {"route", ended.route}, {"outcome", ended.outcome}})
        .Increment();
    prompt_tokens_.Increment(static_cast<double>(ended.prompt_tokens));
    output_tokens_.Increment(static_cast<double>(ended.completion_tokens));
    hit_tokens_.Increment(static_cast<double>(ended.cached_tokens));
    Observe(ttft_, ended.ttft);
    Observe(tpot_, ended.tpot);
    Observe(e2e_, ended.total);
  }
  void ObserveStage(const std::string& stage, absl::Duration duration) override {
    Observe(stage_.Add({{"stage", stage}}, LatencyBuckets()), duration);
  }
  void ObserveSelect(absl::Duration duration) override { Observe(select_, duration); }
  void ObserveTokenGap(absl::Duration duration) override { Observe(itl_, duration); }
  void ObservePredictedTtftRatio(double ratio) override { predicted_.Observe(ratio); }
  void CountDecision(const std::string& decision, const std::string& reason) override {
    decisions_.Add({{"decision", decision}, {"reason", reason}}).Increment();
  }
  void CountRejected(const std::string& reason) override {
    rejected_.Add({{"reason", reason}}).Increment();
  }
  void CountRetry(const std::string& cause) override {
    retries_.Add({{"cause", cause}}).Increment();
  }
  void CountMigration() override { migrations_.Increment(); }
  void CountBreakerOpened(const std::string& worker) override {
    breaker_opened_.Add({{"worker", worker}}).Increment();
  }
  void CountCancelled(const std::string& phase) override {
    cancelled_.Add({{"phase", phase}}).Increment();
  }

  void SetQueue(int64_t requests, int64_t bytes) override {
    queue_requests_.Set(static_cast<double>(requests));
    queue_bytes_.Set(static_cast<double>(bytes));
  }
  void SetRunning(int64_t requests) override { running_.Set(static_cast<double>(requests)); }
  void SetSpans(int64_t exported, int64_t dropped) override {
    SetCounter(spans_exported_, exported);
    SetCounter(spans_dropped_, dropped);
  }
  void SetIndex(const Index& index) override {
    index_entries_.Set(static_cast<double>(index.entries));
    index_predicted_.Set(static_cast<double>(index.predicted));
    index_bytes_.Set(static_cast<double>(index.bytes));
    SetCounter(index_gaps_, index.gaps);
    SetCounter(index_snapshots_, index.snapshots);
    index_untrusted_.Set(static_cast<double>(index.untrusted_workers));
    index_foreign_.Set(static_cast<double>(index.foreign_workers));
  }
  void SetWorkerState(const std::string& worker, const std::string& role,
                      const std::string& state) override {
    ShowState(&worker_state_, worker, {{"worker", worker}, {"role", role}, {"state", state}});
  }
  void SetBreakerState(const std::string& worker, const std::string& state) override {
    ShowState(&breaker_state_, worker, {{"worker", worker}, {"state", state}});
  }
  void SetPrefillSlowdown(const std::string& worker, double slowdown) override {
    prefill_slowdown_.Add({{"worker", worker}}).Set(slowdown);
  }
  void SetTenant(const std::string& tenant, int64_t running, int64_t queued) override {
    tenant_requests_.Add({{"tenant", tenant}, {"state", "running"}})
        .Set(static_cast<double>(running));
    tenant_requests_.Add({{"tenant", tenant}, {"state", "queued"}})
        .Set(static_cast<double>(queued));
  }
  void ForgetWorker(const std::string& worker) override {
    std::lock_guard lock(mutex_);
    for (Family<Gauge>* family : {&worker_state_, &breaker_state_}) {
      const auto it = current_state_.find({family, worker});
      if (it == current_state_.end()) continue;
      family->Remove(it->second);
      current_state_.erase(it);
    }
    breaker_opened_.Remove(&breaker_opened_.Add({{"worker", worker}}));
    prefill_slowdown_.Remove(&prefill_slowdown_.Add({{"worker", worker}}));
  }
  void SetConfigSeconds(const std::string& name, absl::Duration value) override {
    config_.Add({{"name", name}}).Set(absl::ToDoubleSeconds(value));
  }

 private:
  // 1 for the state that `labels` name; the one that the worker had before disappears.
  void ShowState(Family<Gauge>* family, const std::string& worker,
                 const prometheus::Labels& labels) {
    std::lock_guard lock(mutex_);
    Gauge* const gauge = &family->Add(labels);
    Gauge*& current = current_state_[{family, worker}];
    if (current != nullptr && current != gauge) family->Remove(current);
    current = gauge;
    gauge->Set(1);
  }

  Family<Counter>& requests_;
  Family<Counter>& rejected_;
  Family<Counter>& retries_;
  Counter& migrations_;
  Family<Counter>& breaker_opened_;
  Family<Counter>& cancelled_;
  Family<Counter>& decisions_;
  Counter& prompt_tokens_;
  Counter& output_tokens_;
  Counter& hit_tokens_;
  Family<Histogram>& stage_;
  Histogram& select_;
  Histogram& ttft_;
  Histogram& itl_;
  Histogram& tpot_;
  Histogram& e2e_;
  Histogram& predicted_;
  Gauge& queue_requests_;
  Gauge& queue_bytes_;
  Gauge& running_;
  Gauge& index_entries_;
  Gauge& index_predicted_;
  Gauge& index_bytes_;
  Counter& index_gaps_;
  Counter& index_snapshots_;
  Gauge& index_untrusted_;
  Gauge& index_foreign_;
  Counter& spans_exported_;
  Counter& spans_dropped_;
  Family<Gauge>& worker_state_;
  Family<Gauge>& breaker_state_;
  Family<Gauge>& prefill_slowdown_;
  Family<Gauge>& tenant_requests_;
  Family<Gauge>& config_;
  std::mutex mutex_;  // guards current_state_
  std::map<std::pair<Family<Gauge>*, std::string>, Gauge*> current_state_;
};

}  // namespace

std::unique_ptr<RouterMetrics> RouterMetrics::Create(Registry* registry) {
  return std::make_unique<PrometheusMetrics>(registry);
}

}  // namespace router
