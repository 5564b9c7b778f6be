#include "worker/worker_metrics.h"

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "ferry/v1/worker.pb.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "status/grpc_status.h"
#include "worker/worker_runtime.h"

namespace worker {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;
using prometheus::Histogram;

using CounterFamily = prometheus::Family<prometheus::Counter>;
using GaugeFamily = prometheus::Family<prometheus::Gauge>;
using HistogramFamily = prometheus::Family<Histogram>;

const Histogram::BucketBoundaries& SecondsBuckets() {
  static const auto* buckets = new Histogram::BucketBoundaries{
      0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60};
  return *buckets;
}

// 4^k.
Histogram::BucketBoundaries Powers(double first, int count) {
  Histogram::BucketBoundaries buckets;
  for (int i = 0; i < count; ++i, first *= 4) buckets.push_back(first);
  return buckets;
}

const char* PhaseName(StepPhase phase) {
  switch (phase) {
    case StepPhase::kPrefill:
      return "prefill";
    case StepPhase::kDecode:
      return "decode";
    case StepPhase::kMixed:
      return "mixed";
  }
  return "";
}

// How the bytes got to a link of this name (Transport::LinkName).
const char* PathOf(const std::string& link) {
  if (absl::EndsWith(link, "+shared")) return "shared";
  if (absl::EndsWith(link, "+staged")) return "staged";
  return absl::StrContains(link, "cuda_ipc") ? "device" : "host";
}

}  // namespace

struct WorkerMetrics::Impl {
  std::shared_ptr<prometheus::Registry> registry;

  GaugeFamily& Gauge(const char* name, const char* help) {
    return BuildGauge().Name(name).Help(help).Register(*registry);
  }
  CounterFamily& Counter(const char* name, const char* help) {
    return BuildCounter().Name(name).Help(help).Register(*registry);
  }
  HistogramFamily& Family(const char* name, const char* help) {
    return BuildHistogram().Name(name).Help(help).Register(*registry);
  }

  explicit Impl(std::shared_ptr<prometheus::Registry> r) : registry(std::move(r)) {}

  GaugeFamily& blocks = Gauge("ferry_kv_blocks", "cache blocks by use; the sum is constant");
  prometheus::Gauge& free = blocks.Add({{"state", "free"}});
  prometheus::Gauge& cached = blocks.Add({{"state", "cached"}});
  prometheus::Gauge& active = blocks.Add({{"state", "active"}});
  prometheus::Gauge& reserved = blocks.Add({{"state", "reserved"}});
  prometheus::Gauge& held = blocks.Add({{"state", "held"}});
  prometheus::Gauge& quarantined = blocks.Add({{"state", "quarantined"}});
  // Of a model that keeps a state per sequence.
  GaugeFamily* state_slots = nullptr;
  prometheus::Counter* snapshots_taken = nullptr;
  prometheus::Counter* snapshots_dropped = nullptr;
  prometheus::Gauge& running = Gauge("ferry_requests_running", "requests being worked on").Add({});
  prometheus::Gauge& waiting = Gauge("ferry_requests_waiting", "requests in the queue").Add({});
  prometheus::Gauge& waiting_tokens =
      Gauge("ferry_waiting_tokens", "prompt tokens that are yet to be computed").Add({});
  prometheus::Gauge& leases = Gauge("ferry_leases", "requests whose blocks are held").Add({});
  prometheus::Gauge& inflight = Gauge("ferry_transfer_inflight", "transfers under way").Add({});
  prometheus::Counter& lease_expired =
      Counter("ferry_lease_expired_total", "held blocks given up unrenewed").Add({});
  HistogramFamily& step_seconds = Family("ferry_step_seconds", "time of an engine step");
  HistogramFamily& batch_tokens = Family("ferry_batch_tokens", "new tokens of an engine step");
  Histogram& transfer_seconds =
      Family("ferry_transfer_seconds", "first block sent to last block confirmed")
          .Add({}, SecondsBuckets());
  Histogram& transfer_bytes =
      Family("ferry_transfer_bytes", "bytes of a transfer").Add({}, Powers(4096, 12));
  CounterFamily& group_bytes =
      Counter("ferry_transfer_group_bytes_total", "bytes of confirmed transfers by what they are");
  CounterFamily& link_bytes =
      Counter("ferry_transfer_link_bytes_total",
              "bytes of transfers sent, by the kind of link and the way to it");
  CounterFamily& transfer_failures =
      Counter("ferry_transfer_failures_total", "transfers that failed, by status");
  CounterFamily& handshakes = Counter("ferry_handshake_total", "handshakes by result");
  CounterFamily& late_events =
      Counter("ferry_late_events_total", "messages for requests that are not on record");
  CounterFamily& requests = Counter("ferry_requests_total", "requests ended, by status");
  CounterFamily& prompt_tokens =
      Counter("ferry_prompt_tokens_total", "prompt tokens by where they came from");
  prometheus::Counter& computed = prompt_tokens.Add({{"source", "computed"}});
  prometheus::Counter& from_cache = prompt_tokens.Add({{"source", "cached"}});
  prometheus::Counter& transferred = prompt_tokens.Add({{"source", "transferred"}});
  prometheus::Counter& generated =
      Counter("ferry_generated_tokens_total", "tokens sampled for requests").Add({});
  prometheus::Counter& preemptions =
      Counter("ferry_preemptions_total", "sequences that lost their blocks").Add({});
};

WorkerMetrics::WorkerMetrics(std::shared_ptr<prometheus::Registry> registry,
                             const WorkerRuntime& runtime)
    : impl_(std::make_unique<Impl>(std::move(registry))) {
  impl_->Gauge("ferry_build_info", "1; what runs here is in the labels")
      .Add({{"version", service::kVersion},
            {"model", runtime.model_name},
            {"fingerprint", absl::BytesToHexString(runtime.layout_fingerprint)}})
      .Set(1);
  auto& links = impl_->Gauge("ferry_data_links", "1 for every kind of data link of this worker");
  for (const std::string& kind : runtime.options.link_kinds()) links.Add({{"link", kind}}).Set(1);
  auto& config = impl_->Gauge("ferry_config_seconds", "configured time limits");
  for (const auto& [name, duration] : runtime.options.timeouts()) {
    config.Add({{"name", name}}).Set(absl::ToDoubleSeconds(duration));
  }
}

WorkerMetrics::~WorkerMetrics() = default;

void WorkerMetrics::SetStateSlots(const BlockCounts& counts, const engine::StateSlots& slots) {
  Impl& impl = *impl_;
  if (impl.state_slots == nullptr) {
    impl.state_slots = &impl.Gauge("ferry_state_slots", "state slots by use; the sum is constant");
    CounterFamily& snapshots =
        impl.Counter("ferry_state_snapshots_total", "snapshots of sequences' state");
    impl.snapshots_taken = &snapshots.Add({{"event", "taken"}});
    impl.snapshots_dropped = &snapshots.Add({{"event", "dropped"}});
  }
  const std::pair<const char*, int32_t> states[] = {
      {"free", counts.free},     {"snapshot", counts.cached},
      {"active", counts.active}, {"reserved", counts.reserved},
      {"held", counts.held},     {"quarantined", counts.quarantined}};
  for (const auto& [state, count] : states) {
    impl.state_slots->Add({{"state", state}}).Set(count);
  }
  impl.snapshots_taken->Increment(static_cast<double>(slots.snapshots_taken()) -
                                  impl.snapshots_taken->Value());
  impl.snapshots_dropped->Increment(static_cast<double>(slots.snapshots_dropped()) -
                                    impl.snapshots_dropped->Value());
}

void WorkerMetrics::SetBlocks(const BlockCounts& counts) {
  impl_->free.Set(counts.free);
  impl_->cached.Set(counts.cached);
  impl_->active.Set(counts.active);
  impl_->reserved.Set(counts.reserved);
  impl_->held.Set(counts.held);
  impl_->quarantined.Set(counts.quarantined);
}

void WorkerMetrics::SetRequests(int32_t running, int32_t waiting, uint64_t waiting_tokens) {
  impl_->running.Set(running);
  impl_->waiting.Set(waiting);
  impl_->waiting_tokens.Set(static_cast<double>(waiting_tokens));
}

void WorkerMetrics::SetLeases(int32_t held) { impl_->leases.Set(held); }
void WorkerMetrics::CountLeaseExpired() { impl_->lease_expired.Increment(); }

void WorkerMetrics::ObserveStep(StepPhase phase, double seconds, int32_t tokens) {
  const prometheus::Labels labels = {{"phase", PhaseName(phase)}};
  impl_->step_seconds.Add(labels, SecondsBuckets()).Observe(seconds);
  impl_->batch_tokens.Add(labels, Powers(1, 8)).Observe(tokens);
}

void WorkerMetrics::ObserveTransfer(absl::Duration duration, uint64_t bytes,
                                    const std::vector<model::GroupBytes>& groups) {
  impl_->transfer_seconds.Observe(absl::ToDoubleSeconds(duration));
  impl_->transfer_bytes.Observe(static_cast<double>(bytes));
  for (const model::GroupBytes& group : groups) {
    const auto add = [&](const char* kind, uint64_t count) {
      impl_->group_bytes.Add({{"group", group.name}, {"kind", kind}})
          .Increment(static_cast<double>(count));
    };
    add("useful", group.useful);
    add("padding", group.padding);
  }
}

void WorkerMetrics::CountLinkBytes(const std::string& link, uint64_t bytes) {
  impl_->link_bytes.Add({{"link", link.substr(0, link.find('/'))}, {"path", PathOf(link)}})
      .Increment(static_cast<double>(bytes));
}

void WorkerMetrics::CountTransferFailure(const absl::Status& why) {
  impl_->transfer_failures.Add({{"reason", status::CodeName(why.code())}}).Increment();
}

void WorkerMetrics::SetTransfersInFlight(int32_t count) { impl_->inflight.Set(count); }

void WorkerMetrics::CountHandshake(const absl::Status& result) {
  impl_->handshakes.Add({{"result", status::CodeName(result.code())}}).Increment();
}

void WorkerMetrics::CountLateEvent(const std::string& kind) {
  impl_->late_events.Add({{"kind", kind}}).Increment();
}

void WorkerMetrics::CountRequest(const absl::Status& result) {
  impl_->requests.Add({{"status", status::CodeName(result.code())}}).Increment();
}

void WorkerMetrics::CountPromptTokens(int32_t computed, int32_t cached, int32_t transferred) {
  impl_->computed.Increment(computed);
  impl_->from_cache.Increment(cached);
  impl_->transferred.Increment(transferred);
}

void WorkerMetrics::CountGeneratedTokens(int32_t count) { impl_->generated.Increment(count); }
void WorkerMetrics::CountPreemption() { impl_->preemptions.Increment(); }

void FillBlockCounts(const BlockCounts& counts, ferry::v1::KvBlockCounts* out) {
  out->set_free(counts.free);
  out->set_cached(counts.cached);
  out->set_active(counts.active);
  out->set_reserved(counts.reserved);
  out->set_held(counts.held);
  out->set_quarantined(counts.quarantined);
}

}  // namespace worker
