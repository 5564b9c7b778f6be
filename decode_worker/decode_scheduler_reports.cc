// What the scheduler tells of itself: snapshots, metrics, load, what kind of worker it is.

#include <algorithm>
#include <utility>
#include <vector>

#include "decode_worker/decode_scheduler.h"
#include "ferry/v1/worker.pb.h"

namespace decode_worker {

void DecodeScheduler::Publish() {
  Snapshot now;
  for (const auto& [serial, request] : requests_) {
    if (request->phase == Phase::kRunning) {
      ++now.running_requests;
    } else {
      ++now.waiting_requests;
    }
    const bool queued = request->phase == Phase::kQueued;
    if (!queued && request->phase != Phase::kRunning) continue;
    for (const std::unique_ptr<Branch>& branch : request->branches) {
      if (branch == nullptr || (branch->index > 0 && !branch->seated && queued)) continue;
      const int64_t known = static_cast<int64_t>(branch->seq.tokens.size());
      if (branch->state == BranchState::kPrefilling || (queued && branch->index == 0)) {
        now.waiting_tokens += std::max<int64_t>(0, known - branch->seq.num_computed);
      }
    }
  }
  const engine::BlockPool& pool = *runtime_->pool;
  now.blocks.free = pool.num_free();
  now.blocks.cached = pool.num_cached();
  now.blocks.reserved = receiver_.reserved().blocks;
  now.blocks.quarantined = receiver_.quarantined().blocks;
  now.blocks.active = pool.num_held() - now.blocks.reserved - now.blocks.quarantined;
  if (const engine::StateSlots* const slots = pool.state_slots(); slots != nullptr) {
    now.state_slots.free = slots->num_free();
    now.state_slots.cached = slots->num_snapshots();
    now.state_slots.reserved = receiver_.reserved().state_slots;
    now.state_slots.quarantined = receiver_.quarantined().state_slots;
    now.state_slots.active =
        slots->num_held() - now.state_slots.reserved - now.state_slots.quarantined;
    metrics_->SetStateSlots(now.state_slots, *slots);
  }
  now.batch = runner_.stats();
  std::vector<engine::BlockEvent> events = runtime_->pool->TakeEvents();
  if (!events.empty()) events_->Append(std::move(events));
  metrics_->SetBlocks(now.blocks);
  metrics_->SetRequests(now.running_requests, now.waiting_requests, now.waiting_tokens);
  metrics_->SetTransfersInFlight(receiver_.num_receiving());
  ReportBatch();
  {
    std::lock_guard lock(shared_mutex_);
    snapshot_ = now;
  }
  published_.notify_all();
}

void DecodeScheduler::ReportBatch() {
  const BatchRunner::Stats& now = runner_.stats();
  for (; reported_.preemptions < now.preemptions; ++reported_.preemptions) {
    metrics_->CountPreemption();
  }
  if (now.steps == reported_.steps) return;  // at most one step is collected between two reports
  const bool prefill = now.last_prefill_tokens > 0;
  const bool decode = now.last_decode_tokens > 0;
  metrics_->ObserveStep(prefill && decode ? worker::StepPhase::kMixed
                        : prefill         ? worker::StepPhase::kPrefill
                                          : worker::StepPhase::kDecode,
                        now.last_step_ms / 1e3, now.last_prefill_tokens + now.last_decode_tokens);
  reported_ = now;
}

DecodeScheduler::Snapshot DecodeScheduler::snapshot() const {
  std::lock_guard lock(shared_mutex_);
  return snapshot_;
}

bool DecodeScheduler::WaitForSnapshot(const std::function<bool(const Snapshot&)>& wanted,
                                      absl::Duration timeout) const {
  std::unique_lock lock(shared_mutex_);
  return published_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                             [&] { return wanted(snapshot_); });
}

absl::Status DecodeScheduler::health() const {
  std::lock_guard lock(shared_mutex_);
  return health_;
}

void DecodeScheduler::FillInfo(ferry::v1::WorkerInfo* info) const {
  worker::FillRuntimeInfo(*runtime_, info);
  info->set_role(options_.role_both ? ferry::v1::WORKER_ROLE_BOTH : ferry::v1::WORKER_ROLE_DECODE);
  info->set_state(draining_ ? ferry::v1::WORKER_STATE_DRAINING : ferry::v1::WORKER_STATE_SERVING);
  info->set_cancel_during_transfer(true);
  info->set_max_seqs(runtime_->engine->limits().max_seqs);
  // What a request may ask for is bounded by the pool too, so that "as much as fits" fits.
  const int64_t pool_tokens = int64_t{runtime_->pool->num_blocks() - 1} * runtime_->block_size();
  info->set_max_model_len(
      static_cast<uint32_t>(std::min<int64_t>(info->max_model_len(), pool_tokens)));
}

void DecodeScheduler::FillLoad(ferry::v1::LoadReport* report) const {
  const Snapshot now = snapshot();
  report->set_epoch(runtime_->epoch.ToBytes());
  report->set_state(draining_ ? ferry::v1::WORKER_STATE_DRAINING : ferry::v1::WORKER_STATE_SERVING);
  report->set_waiting_requests(now.waiting_requests);
  report->set_waiting_tokens(now.waiting_tokens);
  report->set_running_requests(now.running_requests);
  worker::FillBlockCounts(now.blocks, report->mutable_kv_blocks());
  worker::FillBlockCounts(now.state_slots, report->mutable_state_slots());
  report->set_step_ms(now.batch.step_ms);
}

worker::WorkerControl::Remaining DecodeScheduler::remaining() const {
  std::lock_guard lock(shared_mutex_);
  Remaining remaining;
  for (const auto& [id, count] : live_) remaining.requests += count;
  remaining.held_blocks =
      snapshot_.blocks.reserved + snapshot_.blocks.quarantined + snapshot_.state_slots.quarantined;
  return remaining;
}

}  // namespace decode_worker
