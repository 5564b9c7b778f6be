#include "router/load_ledger.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace router {
namespace {

constexpr absl::Duration kRecentDecay = absl::Seconds(2);
constexpr int kReportsUntilVisible = 2;

}  // namespace

LoadLedger::Load& LoadLedger::Load::operator+=(const Load& other) {
  prefill_tokens += other.prefill_tokens;
  requests += other.requests;
  kv_blocks += other.kv_blocks;
  growth_blocks += other.growth_blocks;
  return *this;
}

LoadLedger::Load& LoadLedger::Load::operator-=(const Load& other) {
  prefill_tokens -= other.prefill_tokens;
  requests -= other.requests;
  kv_blocks -= other.kv_blocks;
  growth_blocks -= other.growth_blocks;
  return *this;
}

LoadLedger::Worker& LoadLedger::WorkerAt(WorkerSlot slot) {
  if (workers_.size() <= static_cast<size_t>(slot)) workers_.resize(slot + 1);
  return workers_[slot];
}

LoadLedger::ChargeId LoadLedger::Charge(WorkerSlot slot, const Load& load, absl::Time now) {
  Worker& worker = WorkerAt(slot);
  worker.load += load;
  worker.requests_in_flight += load.requests;
  if (load.requests > 0) {
    worker.recent = recent_assignments(slot, now) + 1;
    worker.recent_at = now;
  }
  const ChargeId id = next_id_++;
  charges_[id] = {.slot = slot,
                  .load = load,
                  .shown = {.prefill_tokens = load.prefill_tokens,
                            .requests = load.requests,
                            .kv_blocks = load.kv_blocks}};
  return id;
}

void LoadLedger::Commit(ChargeId id) {
  const auto it = charges_.find(id);
  if (it == charges_.end() || it->second.reports_until_visible >= 0) return;
  it->second.reports_until_visible = kReportsUntilVisible;
  workers_[it->second.slot].committed.push_back(id);
}

void LoadLedger::Release(ChargeId id) {
  const auto it = charges_.find(id);
  if (it == charges_.end()) return;
  const Entry& entry = it->second;
  Worker& worker = workers_[entry.slot];
  worker.load -= entry.load;
  worker.requests_in_flight -= entry.shown.requests;
  if (entry.reports_until_visible >= 0 && entry.reports_until_visible < kReportsUntilVisible) {
    worker.load -= entry.shown;
    worker.credits += entry.shown;
  }
  std::erase(worker.committed, id);
  charges_.erase(it);
}

void LoadLedger::OnReport(WorkerSlot slot) {
  Worker& worker = WorkerAt(slot);
  worker.load += std::exchange(worker.credits, Load());
  std::erase_if(worker.committed, [&](ChargeId id) {
    Entry& entry = charges_.at(id);
    if (--entry.reports_until_visible > 0) return false;
    worker.load -= entry.shown;
    entry.load -= entry.shown;
    return true;
  });
}

LoadLedger::Load LoadLedger::uncommitted(WorkerSlot slot) const {
  return slot < static_cast<WorkerSlot>(workers_.size()) ? workers_[slot].load : Load();
}

int32_t LoadLedger::requests_in_flight(WorkerSlot slot) const {
  return slot < static_cast<WorkerSlot>(workers_.size()) ? workers_[slot].requests_in_flight : 0;
}

double LoadLedger::recent_assignments(WorkerSlot slot, absl::Time now) const {
  if (slot >= static_cast<WorkerSlot>(workers_.size()) || workers_[slot].recent == 0) return 0;
  const Worker& worker = workers_[slot];
  return worker.recent * std::exp(-absl::FDivDuration(now - worker.recent_at, kRecentDecay));
}

}  // namespace router
