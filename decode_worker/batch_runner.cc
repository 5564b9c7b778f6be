#include "decode_worker/batch_runner.h"

#include <algorithm>
#include <utility>

#include "status/check.h"
#include "status/status_macros.h"

namespace decode_worker {
namespace {

// A chunk of a few tokens over a long prefix is attended in absorbed form: decompressing the prefix
// for so few rows costs more than the longer dot products (break-even is near 170 rows for V2's
// sizes).
constexpr int32_t kMaxAbsorbedChunk = 16;
constexpr int32_t kMinPrefixPerAbsorbedToken = 8;

constexpr double kStepMsWeight = 0.1;  // of the newest step in the moving average

bool AttendAbsorbed(int32_t num_tokens, int32_t num_computed) {
  return num_tokens <= kMaxAbsorbedChunk && num_computed >= num_tokens * kMinPrefixPerAbsorbedToken;
}

bool Erase(std::vector<Branch*>& list, const Branch* branch) {
  const auto it = std::find(list.begin(), list.end(), branch);
  if (it == list.end()) return false;
  list.erase(it);
  return true;
}

}  // namespace

BatchRunner::BatchRunner(engine::Engine* engine, engine::BlockPool* pool,
                         const block_hash::BlockHasher* hasher,
                         const engine::SnapshotPolicy& snapshots, int32_t chunk_tokens,
                         Listener* listener)
    : engine_(engine),
      pool_(pool),
      hasher_(hasher),
      snapshots_(snapshots),
      block_size_(engine->cache_layout().spec().block_size),
      chunk_tokens_(chunk_tokens),
      listener_(listener) {
  for (int i = 0; i < 2; ++i) {
    plans_[i] = std::make_unique<model::StepPlan>(engine->limits());
    builders_[i] = std::make_unique<engine::PlanBuilder>(block_size_, *plans_[i]);
  }
}

void BatchRunner::Start(Branch& branch, BranchState state) {
  FERRY_CHECK(state == BranchState::kPrefilling || state == BranchState::kDecoding)
      << "state=" << static_cast<int>(state);
  branch.state = state;
  const auto at =
      std::upper_bound(active_.begin(), active_.end(), &branch,
                       [](const Branch* a, const Branch* b) { return GoesBefore(*a, *b); });
  active_.insert(at, &branch);
}

void BatchRunner::Retire(std::unique_ptr<Branch> branch) {
  if (!Erase(active_, branch.get())) Erase(preempting_, branch.get());
  branch->state = BranchState::kRetired;
  branch->forks.clear();  // each is retired by itself
  LeaveTail(*branch);
  if (branch->in_flight > 0) {
    retired_.push_back(std::move(branch));
  } else {
    DropBlocks(*branch, *pool_);
  }
}

absl::StatusOr<bool> BatchRunner::Step() {
  bool launched = false;
  if (launched_.size() < 2) {
    LaunchedStep step = Build();
    if (!builder_->empty()) {
      ASSIGN_OR_RETURN(step.handle, engine_->Launch(builder_->plan()));
      launched_.push_back(std::move(step));
      ++next_step_id_;
      launched = true;
    }
  }
  if (launched_.size() == 2 || (launched_.size() == 1 && !launched)) {
    RETURN_IF_ERROR(CollectOldest());
    return true;
  }
  return launched;
}

BatchRunner::LaunchedStep BatchRunner::Build() {
  LaunchedStep step;
  step.step_id = next_step_id_;
  builder_ = builders_[next_step_id_ % 2].get();
  builder_->Begin(next_step_id_);
  AddForkedStates(step);
  AddDecodes(step);
  AddChunks(step);
  step.release_slots_after = builder_->state_sources();
  return step;
}

void BatchRunner::AddForkedStates(LaunchedStep& step) {
  // Before the trunk's next row, which this plan may hold, whether or not the fork gets one.
  for (Branch* branch : active_) {
    if (branch->index == 0 || branch->seq.state_source == engine::kNoSlot) continue;
    builder_->PrepareState(branch->seq);
    step.uses.push_back({branch, 0, -1});
    ++branch->in_flight;
  }
}

void BatchRunner::AddDecodes(LaunchedStep& step) {
  // By index: preemption takes branches from the end of the list.
  for (size_t i = 0; i < active_.size(); ++i) {
    Branch& branch = *active_[i];
    if (branch.state != BranchState::kDecoding || AtMaxTokens(branch.seq)) continue;
    if (builder_->free_absorbed_tokens() < 1 || builder_->free_seqs() < 1 ||
        builder_->free_samples() < 1) {
      break;
    }
    if (branch.seq.penalty_reset_needed &&
        builder_->free_history_tokens() < static_cast<int32_t>(branch.seq.tokens.size())) {
      continue;
    }
    if (!PrepareRow(step, branch)) continue;
    const int32_t sample = builder_->Add(branch.seq, 1, /*absorbed=*/true, /*sample=*/true);
    step.uses.push_back({&branch, branch.seq.num_computed, sample,
                         snapshots_.Take(branch.seq, /*decoding=*/true, *builder_, *pool_)});
    ++branch.in_flight;
    ++step.decode_tokens;
  }
}

void BatchRunner::AddChunks(LaunchedStep& step) {
  struct Chunk {
    Branch* branch;
    int32_t num_tokens;
    bool absorbed;
  };
  std::vector<Chunk> chunks;
  int32_t tokens = std::min(builder_->free_tokens(), chunk_tokens_);
  int32_t absorbed_tokens = builder_->free_absorbed_tokens();
  int32_t seqs = builder_->free_seqs();
  int32_t samples = builder_->free_samples();
  int32_t history = builder_->free_history_tokens();
  for (Branch* branch : active_) {
    if (branch->state != BranchState::kPrefilling) continue;
    if (tokens == 0 || seqs == 0) break;
    const engine::Sequence& seq = branch->seq;
    const int32_t known = static_cast<int32_t>(seq.tokens.size());
    const int32_t end =
        snapshots_.ChunkEnd(seq.num_computed, std::min(seq.num_computed + tokens, known), known);
    const int32_t num_tokens = end - seq.num_computed;
    if (end == known) {
      const int32_t num_branches = 1 + static_cast<int32_t>(branch->forks.size());
      const int32_t reset_tokens = seq.penalty_reset_needed ? num_branches * known : 0;
      if (num_branches > samples || reset_tokens > history) continue;
      samples -= num_branches;
      history -= reset_tokens;
    }
    const bool absorbed =
        AttendAbsorbed(num_tokens, seq.num_computed) && num_tokens <= absorbed_tokens;
    if (absorbed) absorbed_tokens -= num_tokens;
    tokens -= num_tokens;
    --seqs;
    chunks.push_back({branch, num_tokens, absorbed});
  }
  for (const Chunk& chunk : chunks) {
    if (chunk.absorbed) AddChunk(step, *chunk.branch, chunk.num_tokens, true);
  }
  for (const Chunk& chunk : chunks) {
    if (!chunk.absorbed) AddChunk(step, *chunk.branch, chunk.num_tokens, false);
  }
}

void BatchRunner::AddChunk(LaunchedStep& step, Branch& branch, int32_t num_tokens, bool absorbed) {
  engine::Sequence& seq = branch.seq;
  const bool last = seq.num_computed + num_tokens == static_cast<int32_t>(seq.tokens.size());
  const int32_t sample = builder_->Add(seq, num_tokens, absorbed, /*sample=*/last);
  step.uses.push_back({&branch, seq.num_computed, sample,
                       snapshots_.Take(seq, /*decoding=*/false, *builder_, *pool_), num_tokens});
  ++branch.in_flight;
  step.prefill_tokens += num_tokens;
  if (!last) return;
  branch.state = BranchState::kDecoding;
  for (Branch* fork : ForkBranches(branch, block_size_, *pool_)) {
    const int32_t fork_sample = builder_->AddBranchSample(fork->seq);
    step.uses.push_back({fork, 0, fork_sample});
    ++fork->in_flight;
    Start(*fork, BranchState::kDecoding);
  }
}

bool BatchRunner::PrepareRow(LaunchedStep& step, Branch& branch) {
  engine::Sequence& seq = branch.seq;
  if (branch.tail_sharers != nullptr) {
    if (*branch.tail_sharers > 1) {
      const model::StepPlan& plan = builder_->plan();
      if (plan.counts().num_copies == plan.limits().max_copies) return false;
      absl::StatusOr<std::vector<engine::BlockId>> own = pool_->Allocate(1);
      while (!own.ok()) {
        if (!MakeRoom(step, branch)) return false;
        own = pool_->Allocate(1);
      }
      // Others who shared it may have gone while room was made; the copy is right all the same.
      builder_->AddCopy(seq.blocks.back(), own->front());
      step.release_after.push_back(seq.blocks.back());
      seq.blocks.back() = own->front();
    }
    LeaveTail(branch);
    return true;  // the tail is partial: it has room for the row
  }
  while (!engine::GrowBlocks(seq, seq.num_computed + 1, block_size_, *pool_).ok()) {
    if (!MakeRoom(step, branch)) return false;
  }
  return true;
}

bool BatchRunner::MakeRoom(const LaunchedStep& step, const Branch& branch) {
  // Blocks are on their way back already: they come when a step is collected.
  bool returning = !preempting_.empty() || !retired_.empty() || !step.release_after.empty();
  for (const LaunchedStep& launched : launched_) returning |= !launched.release_after.empty();
  if (returning) return false;
  Branch& last = *active_.back();
  if (&last == &branch) return false;
  Preempt(last);
  return last.in_flight == 0;
}

void BatchRunner::Preempt(Branch& branch) {
  ++stats_.preemptions;
  Erase(active_, &branch);
  branch.state = BranchState::kPreempting;
  if (branch.in_flight > 0) {
    preempting_.push_back(&branch);
    return;
  }
  DropBlocks(branch, *pool_);
  branch.state = BranchState::kIdle;
  listener_->OnPreempted(branch);
}

absl::Status BatchRunner::CollectOldest() {
  LaunchedStep step = std::move(launched_.front());
  launched_.pop_front();
  ASSIGN_OR_RETURN(const engine::StepResult result, engine_->Collect(step.handle));
  CountTime(step, result.step_ms);

  // Index before anyone may retire: what this step wrote is good for others too.
  for (const LaunchedStep::Use& use : step.uses) {
    if (use.branch->state == BranchState::kRetired || use.num_written == 0) {
      if (use.snapshot.slot != engine::kNoSlot) pool_->state_slots()->Release(use.snapshot.slot);
      continue;
    }
    engine::IndexFullBlocks(use.branch->seq, use.num_written, block_size_, *hasher_, *pool_);
    snapshots_.Keep(use.branch->seq, use.snapshot, *pool_);
  }
  for (const LaunchedStep::Use& use : step.uses) {
    if (use.sample < 0) continue;
    if (use.branch->state == BranchState::kRetired) {
      ++stats_.surplus_rows;
      continue;
    }
    const kernels::SampleResult& sample = result.samples[use.sample];
    if (sample.token_id == kernels::kNoToken) {
      listener_->OnNoToken(*use.branch);
      continue;
    }
    engine::AcceptToken(use.branch->seq, step.step_id, sample.token_id);
    listener_->OnSample(*use.branch, sample);
  }
  for (const LaunchedStep::Use& use : step.uses) --use.branch->in_flight;
  pool_->Release(step.release_after);
  if (pool_->state_slots() != nullptr) pool_->state_slots()->Release(step.release_slots_after);
  DropUnused();
  return absl::OkStatus();
}

void BatchRunner::CountTime(const LaunchedStep& step, double step_ms) {
  const auto average = [step_ms](double* value) {
    *value = *value == 0 ? step_ms : (1 - kStepMsWeight) * *value + kStepMsWeight * step_ms;
  };
  ++stats_.steps;
  average(&stats_.step_ms);
  stats_.last_step_ms = step_ms;
  stats_.last_prefill_tokens = step.prefill_tokens;
  stats_.last_decode_tokens = step.decode_tokens;
  if (step.prefill_tokens == 0) return average(&stats_.decode_step_ms);
  const double decoding_ms = step.decode_tokens > 0 ? stats_.decode_step_ms : 0;
  const double chunks_ms = std::max(0.0, step_ms - decoding_ms);
  for (const LaunchedStep::Use& use : step.uses) {
    use.branch->prefill_ms += chunks_ms * use.prefill_tokens / step.prefill_tokens;
  }
}

void BatchRunner::DropUnused() {
  for (size_t i = 0; i < retired_.size();) {
    if (retired_[i]->in_flight > 0) {
      ++i;
      continue;
    }
    DropBlocks(*retired_[i], *pool_);
    retired_[i] = std::move(retired_.back());
    retired_.pop_back();
  }
  for (size_t i = 0; i < preempting_.size();) {
    Branch& branch = *preempting_[i];
    if (branch.in_flight > 0) {
      ++i;
      continue;
    }
    preempting_.erase(preempting_.begin() + static_cast<int64_t>(i));
    DropBlocks(branch, *pool_);
    branch.state = BranchState::kIdle;
    listener_->OnPreempted(branch);
  }
}

}  // namespace decode_worker
