#include "router/dispatcher.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "status/check.h"
#include "status/grpc_status.h"

namespace router {
namespace {

// How often the queue is looked at when nothing else wakes it: back-offs and the grace period end.
constexpr absl::Duration kPumpInterval = absl::Milliseconds(50);
// Sentences about workers in one error; with many workers they all say the same.
constexpr size_t kMaxReasons = 3;

std::string Joined(std::vector<std::string> sentences) {
  const size_t more = sentences.size() - std::min(sentences.size(), kMaxReasons);
  sentences.resize(sentences.size() - more);
  if (more > 0) sentences.push_back(absl::StrCat(more, " more like these"));
  return absl::StrJoin(sentences, "; ");
}

}  // namespace

Dispatcher::Dispatcher(const Options& options, EventLoop* loop, WorkerRegistry* registry,
                       PrefixIndex* index, LoadLedger* ledger, RouterMetrics* metrics)
    : options_(options),
      loop_(loop),
      registry_(registry),
      index_(index),
      ledger_(ledger),
      metrics_(metrics),
      hasher_(options.hash_seed),
      queue_(options.queue) {}

Dispatcher::~Dispatcher() { loop_->CancelTimer(timer_); }

absl::Status Dispatcher::Enter(Waiting* waiting) {
  if (absl::Status status = queue_.Enter(&waiting->entry); !status.ok()) return status;
  waiting_[&waiting->entry] = waiting;
  SchedulePump();
  return absl::OkStatus();
}

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
  // where their role has nobody else; then with all of them after their back-off.
  enum Pass { kNoneAvoided, kWhereNeeded, kAll };
  bool some_avoided = false;
  bool some_backing_off = false;
  bool other_prefill = false;
  bool other_decode = false;
  Decision decision;
  for (const Pass pass : {kNoneAvoided, kWhereNeeded, kAll}) {
    views->clear();
    int32_t held_view = -1;
    for (WorkerSlot slot = 0; slot < registry_->num_workers(); ++slot) {
      const WorkerLink& link = registry_->link(slot);
      const bool holds = slot == waiting->held_at;
      if (!registry_->Serves(link, *request.model) && !holds) continue;
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
    if (decision.feasibility == Feasibility::kNow || !some_avoided) return decision;
  }
  *backing_off = some_backing_off && decision.feasibility == Feasibility::kNever;
  return decision;
}

int64_t Dispatcher::LargestCache(const ModelAssets& model) const {
  int64_t largest = 0;
  for (WorkerSlot slot = 0; slot < registry_->num_workers(); ++slot) {
    if (registry_->link(slot).state() == LinkState::kGone) continue;
    const WorkerFacts& facts = registry_->link(slot).facts();
    if (facts.epoch.empty()) return std::numeric_limits<int64_t>::max();
    if (facts.model != model.name || facts.role == LinkRole::kPrefill) continue;
    largest = std::max(largest, int64_t{facts.num_blocks} * facts.block_size);
  }
  return largest;
}

bool Dispatcher::MayBePlaceableYet(const Waiting& waiting, absl::Time now) const {
  const int64_t largest = LargestCache(*waiting.request->model);
  if (largest > 0 && static_cast<int64_t>(waiting.request->tokens.size()) >= largest) return false;
  const absl::Duration wait = registry_->AllServe() ? options_.grace : options_.worker_wait;
  return now - waiting.unplaceable_since_ < wait;
}

absl::Status Dispatcher::Unplaceable(const Waiting& waiting) const {
  const ModelAssets& model = *waiting.request->model;
  const WorkerRegistry::Ready ready = registry_->ReadyWorkers(model);
  const auto tokens = static_cast<int64_t>(waiting.request->tokens.size());
  const int64_t largest = LargestCache(model);
  if (largest > 0 && tokens >= largest) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prompt has ", tokens, " tokens: the largest cache of a worker holds ", largest));
  }
  if (ready.decode == 0) {
    std::vector<std::string> reasons = registry_->UnusedWorkers();
    for (std::string& one : registry_->Unreachable()) reasons.push_back(std::move(one));
    const std::vector<std::string> served = registry_->ReadyModels();
    return absl::UnavailableError(absl::StrCat(
        "no decode worker serves model ", model.name,
        " now; models served now: ", served.empty() ? "none" : absl::StrJoin(served, ", "),
        reasons.empty() ? "" : "; ", Joined(reasons)));
  }
  const std::vector<std::string> misfits = registry_->Misfits(model);
  std::string message = absl::StrCat(
      "no pair of workers can serve a prompt of ", tokens, " tokens for model ", model.name,
      " now: ", ready.decode, " decode workers, ", ready.prefill, " that prefill any length");
  if (misfits.empty()) return absl::UnavailableError(message);
  absl::StrAppend(&message, "; ", Joined(misfits));
  if (ready.prefill > 0) return absl::UnavailableError(message);
  // Only a restart of a worker mends that.
  return status::WithReason(absl::FailedPreconditionError(message), status::kIncompatible);
}

void Dispatcher::Pump() {
  const absl::Time now = EventLoop::Now();
  std::vector<std::pair<Waiting*, Placement>> placed;
  std::vector<std::pair<Waiting*, absl::Status>> given_up;
  std::vector<WorkerView> views;
  queue_.ForEach(now, [&](AdmissionQueue::Entry* entry) {
    Waiting* const waiting = waiting_.at(entry);
    const absl::Time started = EventLoop::Now();
    bool backing_off = false;
    const Decision decision = Decide(waiting, &views, now, &backing_off);
    metrics_->ObserveSelect(EventLoop::Now() - started);
    switch (decision.feasibility) {
      case Feasibility::kNow:
        placed.emplace_back(waiting, MakePlacement(
                                         waiting->request->view(), decision.choice, views,
                                         /*held=*/waiting->held_at >= 0,
                                         [&](int32_t block_size) {
                                           return absl::MakeConstSpan(Chain(waiting, block_size));
                                         },
                                         ledger_, index_, now));
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
    if (backing_off) return AdmissionQueue::Visit::kSkip;
    waiting->unplaceable_since_ = std::min(waiting->unplaceable_since_, now);
    if (MayBePlaceableYet(*waiting, now)) return AdmissionQueue::Visit::kSkip;
    given_up.emplace_back(waiting, Unplaceable(*waiting));
    waiting_.erase(entry);
    return AdmissionQueue::Visit::kTaken;
  });
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
