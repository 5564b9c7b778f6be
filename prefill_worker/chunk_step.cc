#include "prefill_worker/chunk_step.h"

#include <algorithm>

namespace prefill_worker {

ChunkStep::ChunkStep(const model::StepLimits& limits, const engine::SnapshotPolicy& snapshots,
                     engine::BlockPool* pool, engine::SlotPool* penalty_slots)
    : snapshots_(snapshots),
      pool_(pool),
      penalty_slots_(penalty_slots),
      plan_(limits),
      builder_(snapshots.block_size, plan_) {}

bool ChunkStep::Build(int64_t step_id, absl::Span<PrefillRequest* const> requests,
                      int32_t chunk_tokens) {
  requests_.clear();
  rows_.clear();
  ends_.clear();
  pending_.clear();
  samples_.clear();
  builder_.Begin(step_id);
  int32_t budget = std::min(chunk_tokens, builder_.free_tokens());
  AddShort(requests, budget);
  const size_t num_short = requests_.size();
  for (PrefillRequest* request : requests) {
    const auto end = requests_.begin() + static_cast<ptrdiff_t>(num_short);
    if (std::find(requests_.begin(), end, request) == end) Add(*request, budget);
  }
  return !builder_.empty();
}

void ChunkStep::Add(PrefillRequest& request, int32_t& budget) {
  const int32_t before = budget;
  if (budget == 0 || builder_.free_seqs() == 0 || !AddRows(request, budget)) return;
  requests_.push_back(&request);
  rows_.push_back(before - budget);
  ends_.push_back(request.seq.num_computed);
  pending_.push_back(snapshots_.Take(request.seq, /*decoding=*/false, builder_, *pool_));
  ++request.steps_in_flight;
}

void ChunkStep::AddShort(absl::Span<PrefillRequest* const> requests, int32_t& budget) {
  const auto remaining = [](const PrefillRequest* request) {
    return request->num_tokens() - request->seq.num_computed;
  };
  const int32_t half = budget / 2;
  if (requests.size() < 2 || remaining(requests.front()) <= budget) return;
  short_.clear();
  for (PrefillRequest* request : requests.subspan(1)) {
    if (remaining(request) <= half) short_.push_back(request);
  }
  std::stable_sort(short_.begin(), short_.end(),
                   [&](const auto* a, const auto* b) { return remaining(a) < remaining(b); });
  int32_t room = half;
  for (PrefillRequest* request : short_) {
    if (remaining(request) <= room) Add(*request, room);
  }
  budget -= half - room;
}

bool ChunkStep::CanSample(const PrefillRequest& request, int32_t count) const {
  if (builder_.free_samples() < count) return false;
  return !request.seq.sampling.HasPenalties() ||
         (penalty_slots_->num_free() >= count &&
          builder_.free_history_tokens() >= int64_t{count} * request.num_tokens());
}

engine::Sequence& ChunkStep::PrepareBranch(PrefillRequest& request, engine::Sequence& seq) {
  seq.sampling.branch = static_cast<uint32_t>(request.next_branch++);
  seq.penalty_slot = -1;
  if (seq.sampling.HasPenalties()) {
    seq.penalty_slot = *penalty_slots_->Allocate();
    seq.penalty_reset_needed = true;
  }
  samples_.push_back({&request, seq.sampling.branch, seq.penalty_slot});
  return seq;
}

bool ChunkStep::AddRows(PrefillRequest& request, int32_t& budget) {
  engine::Sequence& seq = request.seq;
  if (request.next_branch == request.num_branches) return false;  // all launched
  // Where all are computed, the last row is computed again.
  const int32_t remaining = std::max(1, request.num_tokens() - seq.num_computed);
  const int32_t start = request.num_tokens() - remaining;
  const int32_t end = snapshots_.ChunkEnd(start, std::min(start + budget, request.num_tokens()),
                                          request.num_tokens());
  const bool keeps_state = seq.state_slot != engine::kNoSlot;
  const bool sample =
      end == request.num_tokens() && CanSample(request, keeps_state ? request.num_branches : 1);
  // A prompt's last row is computed only together with a sample.
  const int32_t rows = std::min(end - start, sample ? remaining : remaining - 1);
  if (rows == 0) return false;
  seq.num_computed = start;
  if (sample) PrepareBranch(request, seq);
  builder_.Add(seq, rows, /*absorbed=*/false, sample);
  while (sample && request.next_branch < request.num_branches && CanSample(request, 1)) {
    // The plan copies what it needs of a branch.
    engine::Sequence branch;
    branch.sampling = seq.sampling;
    branch.num_prompt_tokens = seq.num_prompt_tokens;
    if (seq.sampling.HasPenalties()) branch.tokens = seq.tokens;
    builder_.AddBranchSample(PrepareBranch(request, branch));
  }
  // The token is not this worker's to continue with.
  seq.pending_sample = -1;
  budget -= rows;
  return true;
}

void ChunkStep::Collected(const engine::StepResult& result) {
  for (size_t i = 0; i < requests_.size(); ++i) {
    --requests_[i]->steps_in_flight;
    requests_[i]->num_collected = std::max(requests_[i]->num_collected, ends_[i]);
    requests_[i]->prefill_ms += result.step_ms * rows_[i] / num_tokens();
  }
  for (size_t i = 0; i < samples_.size(); ++i) {
    const Sample& sample = samples_[i];
    sample.request->first_tokens.push_back(
        {sample.branch, sample.request->seq.sampling.num_logprobs, result.samples[i]});
    if (sample.penalty_slot >= 0) penalty_slots_->Release(sample.penalty_slot);
  }
  samples_.clear();
}

void ChunkStep::KeepSnapshots() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    snapshots_.Keep(requests_[i]->seq, pending_[i], *pool_);
  }
  if (pool_->state_slots() != nullptr) {
    pool_->state_slots()->Release(builder_.state_sources());
  }
  requests_.clear();
}

}  // namespace prefill_worker
