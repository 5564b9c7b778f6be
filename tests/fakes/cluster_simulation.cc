#include "tests/fakes/cluster_simulation.h"

#include <algorithm>
#include <utility>

#include "status/check.h"

namespace router {
namespace {

// Of the cache from a prefill worker, as the policy assumes it: while the prompt is computed its
// blocks travel, and the last chunk after it.
constexpr double kTransferBytesPerSecond = 2e9;
constexpr int32_t kLastChunkTokens = 512;
constexpr absl::Duration kTransferStart = absl::Milliseconds(1);

// Neighbouring seeds of a linear generator give neighbouring numbers.
uint32_t Scattered(uint64_t seed) {
  return static_cast<uint32_t>((seed * 0x9E3779B97F4A7C15ull) >> 32);
}

bool NothingBlocked(int32_t, int32_t) { return false; }

}  // namespace

ClusterSimulation::ClusterSimulation(const Options& options,
                                     const std::vector<WorkerModel>& workers)
    : options_(options) {
  for (int i = 0; i < options.num_routers; ++i) {
    routers_.push_back(std::make_unique<Router>(Scattered(options.seed + i)));
  }
  for (const WorkerModel& model : workers) {
    workers_.push_back(
        std::make_unique<SimulatedWorker>(static_cast<WorkerSlot>(workers_.size()), model));
    Join(workers_.back()->slot());
  }
}

ClusterSimulation::~ClusterSimulation() = default;

void ClusterSimulation::At(absl::Time time, std::function<void()> action) {
  events_.push({std::max(time, now_), next_event_++, std::move(action)});
}

int ClusterSimulation::Submit(SimulatedRequest request) {
  const int id = static_cast<int>(requests_.size());
  const int router = request.router;
  At(request.arrival, [this, id, router] {
    routers_[router]->waiting.push_back(id);
    Pump(router);
  });
  requests_.push_back(std::move(request));
  outcomes_.emplace_back();
  placements_.emplace_back();
  return id;
}

WorkerSlot ClusterSimulation::AddWorker(absl::Time time, const WorkerModel& model) {
  const auto slot = static_cast<WorkerSlot>(workers_.size());
  workers_.push_back(std::make_unique<SimulatedWorker>(slot, model));
  workers_.back()->draining = true;  // not there yet
  At(time, [this, slot] {
    workers_[slot]->draining = false;
    Join(slot);
  });
  return slot;
}

void ClusterSimulation::SetSlowness(absl::Time time, WorkerSlot slot, double slowness) {
  At(time, [this, slot, slowness] { workers_[slot]->slowness = slowness; });
}

void ClusterSimulation::Drain(absl::Time time, WorkerSlot slot) {
  At(time, [this, slot] { workers_[slot]->draining = true; });
}

void ClusterSimulation::Join(WorkerSlot slot) {
  const SimulatedWorker& worker = *workers_[slot];
  for (const auto& router : routers_) {
    router->index.StartWorker(slot, worker.epoch(), worker.model().facts.num_blocks);
    router->loads.resize(std::max<size_t>(router->loads.size(), slot + 1));
  }
  Report(slot);
}

void ClusterSimulation::Run() {
  const int all = static_cast<int>(requests_.size());
  while (num_done_ < all && !events_.empty()) {
    Event event = events_.top();
    events_.pop();
    now_ = event.time;
    event.action();
  }
}

// A load report and the heartbeat of the event stream, to every router.
void ClusterSimulation::Report(WorkerSlot slot) {
  Publish(slot);
  for (size_t i = 0; i < routers_.size(); ++i) {
    routers_[i]->loads[slot] = workers_[slot]->Load();
    routers_[i]->ledger.OnReport(slot);
    Pump(static_cast<int>(i));
  }
  At(now_ + options_.report_period, [this, slot] { Report(slot); });
}

void ClusterSimulation::Publish(WorkerSlot slot) {
  SimulatedWorker& worker = *workers_[slot];
  auto frame = std::make_shared<PrefixIndex::Frame>();
  frame->epoch = worker.epoch();
  frame->events = worker.TakeEvents();
  frame->seq = worker.NextSeq();
  At(now_ + options_.event_delay, [this, slot, frame] {
    for (const auto& router : routers_) {
      const auto applied = router->index.Apply(slot, *frame, now_);
      FERRY_CHECK(applied == PrefixIndex::Applied::kApplied) << "frame " << frame->seq;
    }
  });
}

void ClusterSimulation::Pump(int router) {
  std::deque<int> waiting = std::exchange(routers_[router]->waiting, {});
  for (const int id : waiting) {
    if (!TryPlace(router, id)) routers_[router]->waiting.push_back(id);
  }
}

std::vector<WorkerView> ClusterSimulation::Views(Router& router, const SimulatedRequest& request) {
  std::vector<WorkerView> views;
  const std::vector<int32_t> cached = router.index.Lookup(*request.chain, now_);
  for (const auto& worker : workers_) {
    if (worker->draining) continue;
    const WorkerSlot slot = worker->slot();
    const WorkerFacts& facts = worker->model().facts;
    const int32_t most = (request.prompt_tokens - 1) / facts.block_size;
    const int32_t blocks = slot < static_cast<WorkerSlot>(cached.size()) ? cached[slot] : 0;
    views.push_back(MakeView(slot, facts, router.loads[slot],
                             options_.charge ? router.ledger.uncommitted(slot) : LoadLedger::Load(),
                             options_.charge ? router.ledger.requests_in_flight(slot) : 0,
                             std::min(blocks, most),
                             options_.charge ? router.ledger.recent_assignments(slot, now_) : 0,
                             router.speeds.slowdown(slot, worker->epoch(), now_)));
  }
  return views;
}

bool ClusterSimulation::TryPlace(int number, int id) {
  Router& router = *routers_[number];
  const SimulatedRequest& request = requests_[id];
  const std::vector<WorkerView> views = Views(router, request);
  const RequestView view = {.prompt_tokens = request.prompt_tokens,
                            .max_tokens = request.output_tokens,
                            .total_tokens = request.prompt_tokens + request.output_tokens};
  const Decision decision = Choose(options_.policy, view, views, NothingBlocked, &router.state);
  if (decision.feasibility != Feasibility::kNow) return false;
  const Placement placement = MakePlacement(
      view, decision.choice, views, /*held=*/false,
      [&](int32_t) { return absl::MakeConstSpan(*request.chain); }, &router.ledger, &router.index,
      now_);
  Forward(id, placement);
  return true;
}

void ClusterSimulation::Forward(int id, const Placement& placement) {
  SimulatedOutcome& outcome = outcomes_[id];
  outcome.prefill = placement.prefill;
  outcome.decode = placement.decode;
  ++workers_[placement.decode]->assigned;
  if (!placement.local()) ++workers_[placement.prefill]->assigned;
  SimulatedWorker& computes = *workers_[placement.local() ? placement.decode : placement.prefill];
  LoadLedger& ledger = routers_[requests_[id].router]->ledger;
  ledger.Commit(placement.prefill_charge);
  ledger.Commit(placement.decode_charge);
  ledger.Commit(placement.decode_cache_charge);
  placements_[id] = placement;
  computes.prompts.push_back({id, requests_[id].prompt_tokens, requests_[id].chain});
  if (computes.prompts.size() == 1) StartPrompt(computes.slot());
}

void ClusterSimulation::StartPrompt(WorkerSlot slot) {
  const SimulatedWorker& worker = *workers_[slot];
  const SimulatedWorker::Prompt& prompt = worker.prompts.front();
  const int32_t cached = worker.Cached(prompt) * worker.model().facts.block_size;
  outcomes_[prompt.request].reused_tokens = cached;
  const absl::Duration takes = worker.ComputeTime(prompt);
  if (options_.observe_speed) {
    At(now_ + takes, [this, slot, router = requests_[prompt.request].router, cached, takes,
                      computed = prompt.tokens - cached] {
      const SimulatedWorker& worker = *workers_[slot];
      routers_[router]->speeds.Observe(slot, worker.epoch(),
                                       StatedPrefillTime(worker.model().facts, computed, cached),
                                       takes, now_);
    });
  }
  At(now_ + takes, [this, slot] { OnComputed(slot); });
}

void ClusterSimulation::OnComputed(WorkerSlot slot) {
  SimulatedWorker& worker = *workers_[slot];
  const SimulatedWorker::Prompt prompt = std::move(worker.prompts.front());
  worker.prompts.pop_front();
  worker.Store(*prompt.chain);
  Publish(slot);
  if (!worker.prompts.empty()) StartPrompt(slot);
  const int id = prompt.request;
  const Placement& placement = placements_[id];
  if (placement.local()) {
    Decode(id);
    return;
  }
  const SimulatedWorker& decode = *workers_[placement.decode];
  const WorkerFacts& facts = decode.model().facts;
  const int32_t tokens =
      std::min(kLastChunkTokens, prompt.tokens - decode.Cached(prompt) * facts.block_size);
  const double bytes = static_cast<double>(tokens) * facts.block_bytes / facts.block_size;
  At(now_ + kTransferStart + absl::Seconds(bytes / kTransferBytesPerSecond),
     [this, id] { Decode(id); });
  routers_[requests_[id].router]->ledger.Release(placement.prefill_charge);
  Pump(requests_[id].router);
}

void ClusterSimulation::Decode(int id) {
  SimulatedWorker& worker = *workers_[placements_[id].decode];
  const SimulatedRequest& request = requests_[id];
  outcomes_[id].first_token = now_;
  worker.Store(*request.chain);
  Publish(worker.slot());
  const int32_t blocks =
      BlocksFor(request.prompt_tokens + request.output_tokens, worker.model().facts.block_size);
  worker.arriving.push_back({id, request.output_tokens - 1, blocks});
  if (!worker.stepping) StartStep(worker.slot());
}

void ClusterSimulation::StartStep(WorkerSlot slot) {
  SimulatedWorker& worker = *workers_[slot];
  worker.sequences.insert(worker.sequences.end(), worker.arriving.begin(), worker.arriving.end());
  worker.arriving.clear();
  std::erase_if(worker.sequences, [this](const SimulatedWorker::Sequence& sequence) {
    if (sequence.left > 0) return false;
    End(sequence.request);
    return true;
  });
  worker.stepping = !worker.sequences.empty();
  if (!worker.stepping) return;
  At(now_ + worker.StepTime(), [this, slot] {
    for (SimulatedWorker::Sequence& sequence : workers_[slot]->sequences) --sequence.left;
    StartStep(slot);
  });
}

void ClusterSimulation::End(int id) {
  outcomes_[id].done = true;
  outcomes_[id].end = now_;
  ++num_done_;
  const int router = requests_[id].router;
  routers_[router]->ledger.Release(placements_[id].decode_charge);
  routers_[router]->ledger.Release(placements_[id].decode_cache_charge);
  At(now_, [this, router] { Pump(router); });
}

double ClusterSimulation::TtftMs(int id) const {
  return absl::ToDoubleMilliseconds(outcomes_[id].first_token - requests_[id].arrival);
}

int32_t ClusterSimulation::num_assigned(WorkerSlot slot) const { return workers_[slot]->assigned; }

double ClusterSimulation::hit_rate() const {
  double reused = 0, prompts = 0;
  for (size_t id = 0; id < requests_.size(); ++id) {
    reused += outcomes_[id].reused_tokens;
    prompts += requests_[id].prompt_tokens;
  }
  return reused / prompts;
}

}  // namespace router
