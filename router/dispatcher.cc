#include "router/dispatcher.h"

#include <algorithm>
#include <utility>

namespace router {
namespace {

// How often the queue is looked at when nothing else wakes it: back-offs and the grace period end.
constexpr absl::Duration kPumpInterval = absl::Milliseconds(50);

}  // namespace

Dispatcher::Dispatcher(const Options& options, EventLoop* loop, WorkerRegistry* registry,
                       PrefixIndex* index, LoadLedger* ledger, CircuitBreakers* breakers,
                       RouterMetrics* metrics)
    : options_(options),
      loop_(loop),
      registry_(registry),
      index_(index),
      ledger_(ledger),
      breakers_(breakers),
      metrics_(metrics),
      hasher_(options.hash_seed),
      queue_(options.queue) {}

Dispatcher::~Dispatcher() { loop_->CancelTimer(timer_); }

void Dispatcher::Return(Waiting* waiting) {
  queue_.Return(&waiting->entry);
  waiting_[&waiting->entry] = waiting;
  waiting->unplaceable_since_ = absl::InfiniteFuture();
  waiting->entry.not_before = absl::InfinitePast();
  SchedulePump();
}

void Dispatcher::Leave(Waiting* waiting) {
  if (!queue_.Leave(&waiting->entry)) return;
  waiting_.erase(&waiting->entry);
  SchedulePump();  // it may have stood in somebody's way
}

void Dispatcher::Ended(Waiting* waiting) {
  queue_.Ended(&waiting->entry);
  waiting_.erase(&waiting->entry);
  SchedulePump();  // it may have stood in somebody's way, or had its tenant's last seat
}

void Dispatcher::Release(LoadLedger::ChargeId charge) {
  if (charge == 0) return;
  ledger_->Release(charge);
  SchedulePump();
}

void Dispatcher::SchedulePump() {
  if (pump_scheduled_ || queue_.num_requests() == 0) return;
  pump_scheduled_ = true;
  loop_->After(absl::ZeroDuration(), [this] {
    pump_scheduled_ = false;
    Pump();
  });
}

const std::vector<block_hash::BlockHash>& Dispatcher::Chain(Waiting* waiting, int32_t block_size) {
  std::vector<block_hash::BlockHash>& chain = waiting->chains_[block_size];
  const std::vector<int32_t>& tokens = waiting->request->tokens;
  if (chain.size() < tokens.size() / block_size) {  // not yet, or tokens have been added
    chain = hasher_.Chain(hasher_.Root(waiting->request->cache_namespace), tokens, block_size);
  }
  return chain;
}

Decision Dispatcher::Decide(Waiting* waiting, std::vector<WorkerView>* views, absl::Time now,
                            bool* backing_off) {
  const PreparedRequest& request = *waiting->request;
  const RequestView view = request.view();
  absl::flat_hash_map<int32_t, std::vector<int32_t>> matches;  // by block size, then slot
  // First without the workers that have failed this request; then with them, after their back-off,
  // where their role has nobody else; then with all of them after their back-off.  Workers whose
  // breaker is open come last, and only for a request that nobody else could ever serve.
  enum Pass { kNoneAvoided, kWhereNeeded, kAll, kBroken };
  const bool last_resort = IsLastResort(*waiting, now);
  bool some_broken = false;
  bool some_avoided = false;
  bool some_backing_off = false;
  bool other_prefill = false;
  bool other_decode = false;
  Decision decision;
  for (const Pass pass : {kNoneAvoided, kWhereNeeded, kAll, kBroken}) {
    if (pass == kBroken && !(some_broken && last_resort)) break;
    views->clear();
    int32_t held_view = -1;
    for (WorkerSlot slot = 0; slot < registry_->num_workers(); ++slot) {
      const WorkerLink& link = registry_->link(slot);
      const bool holds = slot == waiting->held_at;
      if (!registry_->Serves(link, *request.model) && !holds) continue;
      if (!holds && !breakers_->Admits(slot, link.facts().epoch, now)) {
        some_broken = true;
        if (pass != kBroken) continue;
      }
      const bool is_prefill = link.facts().role == LinkRole::kPrefill;
      bool& other = is_prefill ? other_prefill : other_decode;
      const auto avoided = waiting->avoid.find(std::pair(slot, link.facts().epoch));
      if (avoided != waiting->avoid.end() && !holds) {
        some_avoided = true;
        some_backing_off |= avoided->second > now;
        if (pass == kNoneAvoided || avoided->second > now || (pass == kWhereNeeded && other)) {
          continue;
        }
      } else {
        other = true;
      }
      const int32_t block_size = link.facts().block_size;
      auto [match, is_new] = matches.try_emplace(block_size);
      if (is_new) {
        const auto reusable =
            absl::MakeConstSpan(Chain(waiting, block_size)).first(ReusableBlocks(view, block_size));
        match->second = index_->Lookup(reusable, now);
      }
      const int32_t blocks =
          slot < static_cast<WorkerSlot>(match->second.size()) ? match->second[slot] : 0;
      if (holds) held_view = static_cast<int32_t>(views->size());
      views->push_back(registry_->View(link, blocks, now));
    }
    const auto blocked = [&](int32_t p, int32_t d) {
      return !registry_->pairs().fits((*views)[p].slot, (*views)[d].slot);
    };
    decision =
        waiting->held_at >= 0
            ? ChooseDecodeForHeld(options_.policy, view, *views, held_view, blocked, &policy_state_)
            : Choose(options_.policy, view, *views, blocked, &policy_state_);
    if (decision.feasibility == Feasibility::kNow) break;
    if (!some_avoided && !(some_broken && last_resort)) break;
  }
  const bool never = decision.feasibility == Feasibility::kNever;
  *backing_off = some_backing_off && never;
  waiting->only_broken_ = some_broken && never && !last_resort;
  return decision;
}

void Dispatcher::BeginAtBreakers(const Waiting& waiting, const Placement& placement,
                                 absl::Time now) {
  for (const WorkerSlot slot : {placement.prefill, placement.decode}) {
    if (slot < 0 || slot == waiting.held_at) continue;
    breakers_->Begin(slot, registry_->link(slot).facts().epoch, waiting.entry.arrival, now);
  }
}

void Dispatcher::Pump() {
  const absl::Time now = EventLoop::Now();
  std::vector<std::pair<Waiting*, Placement>> placed;
  std::vector<std::pair<Waiting*, absl::Status>> given_up;
  std::vector<WorkerView> views;
  absl::flat_hash_map<std::string, int64_t> taken_tokens;  // by model
  queue_.ForEach(now, [&](AdmissionQueue::Entry* entry) {
    Waiting* const waiting = waiting_.at(entry);
    const absl::Time started = EventLoop::Now();
    bool backing_off = false;
    const Decision decision = Decide(waiting, &views, now, &backing_off);
    metrics_->ObserveSelect(EventLoop::Now() - started);
    switch (decision.feasibility) {
      case Feasibility::kNow:
        if (absl::Status late = CheckTtft(*waiting, decision.choice, views, now); !late.ok()) {
          given_up.emplace_back(waiting, std::move(late));
          waiting_.erase(entry);
          return AdmissionQueue::Visit::kRefused;
        }
        taken_tokens[entry->model] += entry->tokens;
        placed.emplace_back(waiting, MakePlacement(
                                         waiting->request->view(), decision.choice, views,
                                         /*held=*/waiting->held_at >= 0,
                                         [&](int32_t block_size) {
                                           return absl::MakeConstSpan(Chain(waiting, block_size));
                                         },
                                         ledger_, index_, now));
        BeginAtBreakers(*waiting, placed.back().second, now);
        waiting_.erase(entry);
        return AdmissionQueue::Visit::kTaken;
      case Feasibility::kLater:
        waiting->unplaceable_since_ = absl::InfiniteFuture();
        // A request that needs no prefill worker takes nothing from one that waits for it.
        return decision.decode_has_room ? AdmissionQueue::Visit::kSkip
                                        : AdmissionQueue::Visit::kNoRoom;
      case Feasibility::kNever:
        break;
    }
    // However many wait for a worker to come (back), they do not stand in the way of those that can
    // be served: each is looked at in its turn.
    entry->not_before =
        now + kPumpInterval * (1 + queue_.num_requests() / AdmissionQueue::kMaxSkips);
    if (backing_off) return AdmissionQueue::Visit::kAway;
    waiting->unplaceable_since_ = std::min(waiting->unplaceable_since_, now);
    if (waiting->only_broken_ || MayBePlaceableYet(*waiting, now)) {
      return AdmissionQueue::Visit::kAway;
    }
    given_up.emplace_back(waiting, Unplaceable(*waiting));
    waiting_.erase(entry);
    return AdmissionQueue::Visit::kRefused;
  });
  for (const auto& [model, tokens] : taken_tokens) {
    estimates_[model].OnTaken(tokens, queue_.has_line(model), now);
  }
  // Only now, because whoever is told may come back to the queue.
  for (const auto& [waiting, placement] : placed) waiting->OnPlaced(placement);
  for (const auto& [waiting, status] : given_up) waiting->OnUnplaceable(status);

  if (queue_.num_requests() > 0 && timer_ == 0) {
    timer_ = loop_->After(kPumpInterval, [this] {
      timer_ = 0;
      Pump();
    });
  }
}

}  // namespace router
