#include "router/router.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "status/public_message.h"

namespace router {
namespace {

constexpr absl::Duration kGaugeInterval = absl::Seconds(1);
constexpr absl::Duration kLastCallbacks = absl::Seconds(10);

Policy PolicyOf(const std::string& name) {
  if (name == "least_load") return Policy::kLeastLoad;
  return name == "round_robin" ? Policy::kRoundRobin : Policy::kCost;
}

}  // namespace

Router::Router(const RouterOptions& options, std::vector<std::unique_ptr<ModelAssets>> models,
               prometheus::Registry* metrics)
    : default_deadline_(options.default_deadline),
      name_period_(options.dns_refresh),
      trace_ratio_(options.trace_ratio),
      models_(std::move(models)),
      metrics_(RouterMetrics::Create(metrics)),
      worker_calls_(std::make_shared<OutstandingCalls>()),
      client_calls_(std::make_shared<OutstandingCalls>()),
      index_({.stale_after = 5 * options.heartbeat}),
      breakers_({.failures = options.breaker_failures, .open_for = options.breaker_open}) {
  WorkerRegistry::Options registry_options = {.addresses = {},
                                              .names = {},
                                              .tls = options.tls,
                                              .heartbeat = options.heartbeat,
                                              .cancel_ack = options.cancel_ack,
                                              .hash_seed = options.hash_seed,
                                              .local_prefill_tokens = options.local_prefill_tokens};
  for (const std::string& text : options.workers) {
    WorkerName name = *ParseWorkerName(text);  // checked by Validate
    if (name.kind == WorkerName::Kind::kAddress) {
      registry_options.addresses.push_back(text);
    } else {
      registry_options.names.push_back(text);
      names_.push_back(std::move(name));
    }
  }
  registry_ = std::make_unique<WorkerRegistry>(registry_options, &models_, &loop_, worker_calls_,
                                               &index_, &ledger_);
  const Dispatcher::Options dispatcher_options = {
      .queue = {.max_requests = options.max_queue,
                .max_bytes = options.max_queue_bytes,
                .ageing = options.priority_ageing,
                .tenant = {.max_running = options.tenant_max_running,
                           .max_queued = options.tenant_max_queued,
                           .max_rate = options.tenant_max_rate},
                .tenants = *ParseTenantLimits(options.tenant_limits)},
      .policy = {.policy = PolicyOf(options.policy),
                 .local_prefill_tokens = options.local_prefill_tokens,
                 .kv_watermark = options.kv_watermark},
      .hash_seed = options.hash_seed,
      .grace = 2 * options.heartbeat,
      .worker_wait = options.worker_wait,
      .max_ttft = options.max_ttft};
  dispatcher_ = std::make_unique<Dispatcher>(dispatcher_options, &loop_, registry_.get(), &index_,
                                             &ledger_, &breakers_, metrics_.get());
  if (!options.otlp_endpoint.empty()) {
    auto spans = tracing::SpanExporter::Create({.endpoint = options.otlp_endpoint,
                                                .service_name = "ferry-router",
                                                .service_version = service::kVersion});
    if (spans.ok()) {
      spans_ = *std::move(spans);
    } else {  // requests go on without
      spdlog::error("no spans cause={}", service::LogValue(std::string(spans.status().message())));
    }
  }
  generation_context_ = {.loop = &loop_,
                         .registry = registry_.get(),
                         .dispatcher = dispatcher_.get(),
                         .ledger = &ledger_,
                         .breakers = &breakers_,
                         .metrics = metrics_.get(),
                         .spans = spans_.get(),
                         .max_attempts = options.max_attempts,
                         .max_migrations = options.max_migrations,
                         .accept_limit = options.accept_limit,
                         .stream_idle = options.stream_idle};
  for (const auto& [name, duration] : options.durations()) {
    metrics_->SetConfigSeconds(name, duration);
  }
}

Router::~Router() { Stop(); }

void Router::Start(std::function<void(bool)> on_ready) {
  loop_.Run([this, &on_ready] {
    on_ready_ = std::move(on_ready);
    registry_->Start([this] { OnWorkersChanged(); },
                     [this](WorkerSlot slot, const std::string& epoch, const absl::Status& cause) {
                       OnWorkerLost(slot, epoch, cause);
                     });
    WriteGauges();
  });
  name_watch_ = std::make_unique<NameWatch>(
      names_, name_period_, [this](size_t name, NameWatch::Found found) {
        loop_.Post([this, name, found = std::move(found)] { registry_->SetFound(name, found); });
      });
}

absl::Status Router::Submit(int64_t number, PreparedRequest request,
                            std::shared_ptr<ClientStream> client) {
  if (!running_ids_.emplace(request.request_id, number).second) {
    return absl::AlreadyExistsError(
        absl::StrCat("request_id ", request.request_id, " belongs to a running request"));
  }
  auto generation =
      std::make_unique<Generation>(generation_context_, std::move(request), number,
                                   std::move(client), [this, number](Generation* ended) {
                                     running_ids_.erase(ended->request_id());
                                     // Not at once: it may be one of its own functions that ended
                                     // it.
                                     loop_.Post([this, number] { generations_.erase(number); });
                                   });
  Generation* const started = generation.get();
  generations_.emplace(number, std::move(generation));
  started->Start();
  return absl::OkStatus();
}

bool Router::IsOpen(int64_t number) const {
  const auto it = generations_.find(number);
  return it != generations_.end() && !it->second->has_ended();
}

void Router::OnClientGone(int64_t number) {
  const auto it = generations_.find(number);
  if (it != generations_.end()) it->second->OnClientGone();
}

void Router::OnClientDrained(int64_t number) {
  const auto it = generations_.find(number);
  if (it != generations_.end()) it->second->OnClientDrained();
}

bool Router::IsReady() const { return !draining_ && registry_->ServesAny(); }

absl::Status Router::CheckReady() const {
  if (draining_) return absl::UnavailableError("the router is draining");
  std::vector<std::string> whys, public_whys;
  for (const auto& model : models_.all()) {
    const absl::Status served = registry_->CheckServed(*model);
    if (served.ok()) return served;
    whys.emplace_back(served.message());
    public_whys.push_back(status::PublicMessage(served));
  }
  return status::WithPublicMessage(absl::UnavailableError(absl::StrJoin(whys, "; ")),
                                   absl::StrJoin(public_whys, "; "));
}

void Router::OnWorkersChanged() {
  dispatcher_->SchedulePump();
  if (IsReady() == ready_) return;
  ready_ = !ready_;
  if (ready_) {
    spdlog::info("ready");
  } else {
    spdlog::warn("not ready cause={}", service::LogValue(std::string(CheckReady().message())));
  }
  if (on_ready_ != nullptr) on_ready_(ready_);
}

void Router::OnWorkerLost(WorkerSlot slot, const std::string& epoch, const absl::Status& cause) {
  // Ending and retrying change the map only later.
  for (auto& [number, generation] : generations_) generation->OnWorkerLost(slot, epoch, cause);
}

void Router::RemoveLeftWorkers() {
  const auto needed = [this](WorkerSlot slot) {
    return std::any_of(generations_.begin(), generations_.end(),
                       [slot](const auto& entry) { return entry.second->Needs(slot); });
  };
  for (const std::string& worker : registry_->RemoveLeft(needed)) metrics_->ForgetWorker(worker);
}

void Router::WriteGauges() {
  RemoveLeftWorkers();
  const absl::Time now = EventLoop::Now();
  metrics_->SetQueue(dispatcher_->queue().num_requests(), dispatcher_->queue().num_bytes());
  metrics_->SetRunning(static_cast<int64_t>(generations_.size()));
  if (spans_ != nullptr) metrics_->SetSpans(spans_->num_exported(), spans_->num_dropped());
  metrics_->SetIndex({.entries = static_cast<int64_t>(index_.num_entries()),
                      .predicted = static_cast<int64_t>(index_.num_predicted()),
                      .bytes = static_cast<int64_t>(index_.approximate_bytes()),
                      .gaps = index_.num_gaps(),
                      .snapshots = index_.num_snapshots(),
                      .untrusted_workers = index_.num_untrusted(now),
                      .foreign_workers = registry_->NumForeign()});
  for (WorkerSlot slot = 0; slot < registry_->num_workers(); ++slot) {
    const WorkerLink& link = registry_->link(slot);
    if (link.state() == LinkState::kGone) continue;
    metrics_->SetWorkerState(link.address(), LinkRoleName(link.facts().role),
                             LinkStateName(link.state()));
    metrics_->SetPrefillSlowdown(link.address(), registry_->prefill_slowdown(link, now));
    metrics_->SetBreakerState(link.address(),
                              BreakerStateName(breakers_.state(slot, link.facts().epoch, now)));
  }
  for (const AdmissionQueue::TenantUse& tenant : dispatcher_->queue().UseByTenant()) {
    metrics_->SetTenant(tenant.name, tenant.running, tenant.queued);
  }
  loop_.After(kGaugeInterval, [this] { WriteGauges(); });
}

void Router::AbortAll(const absl::Status& status) {
  loop_.Run([this, &status] {
    for (auto& [number, generation] : generations_) generation->Abort(status);
  });
}

void Router::Stop() {
  if (std::exchange(stopped_, true)) return;
  name_watch_.reset();
  AbortAll(absl::UnavailableError("the router is shutting down"));
  loop_.Run([this] {
    registry_->Stop();
    on_ready_ = nullptr;
  });
  if (!worker_calls_->WaitForNone(kLastCallbacks)) {
    spdlog::warn("calls to workers have not ended");
  }
  // What was posted by the last callbacks runs before the loop ends.
  loop_.Stop();
}

}  // namespace router
