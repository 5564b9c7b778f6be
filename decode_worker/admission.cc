#include "decode_worker/admission.h"

#include <algorithm>

#include "engine/plan_builder.h"
#include "status/check.h"

namespace decode_worker {

Admission::Admission(const AdmissionLimits& limits, engine::BlockPool* pool,
                     const block_hash::BlockHasher* hasher)
    : limits_(limits), pool_(pool), hasher_(hasher), penalty_slots_(limits.num_penalty_slots) {}

int32_t Admission::Growth(const Branch& branch) const {
  const engine::Sequence& seq = branch.seq;
  const int32_t now = NumTokens(seq);
  // The last token is never written.
  const int32_t end = seq.num_prompt_tokens + seq.sampling.max_tokens - 1;
  const int32_t target = std::min(now + limits_.growth_tokens, end);
  // An idle branch is a newcomer, is receiving, or waits for its trunk: its blocks are counted
  // elsewhere.
  int32_t held = branch.state == BranchState::kIdle ? engine::BlocksFor(now, limits_.block_size)
                                                    : static_cast<int32_t>(seq.blocks.size());
  // A shared partial block is copied before it is written.
  const bool unborn_fork = branch.index > 0 && seq.blocks.empty();
  if (branch.tail_sharers != nullptr || (unborn_fork && now % limits_.block_size != 0)) --held;
  return std::max(0, engine::BlocksFor(target, limits_.block_size) - held);
}

std::optional<std::vector<engine::BlockId>> Admission::TryAdmit(Branch& branch,
                                                                engine::Continuation continuation) {
  engine::Sequence& seq = branch.seq;
  FERRY_CHECK(!branch.seated && seq.blocks.empty()) << "blocks=" << seq.blocks.size();
  const int32_t num_branches = 1 + static_cast<int32_t>(branch.forks.size());
  if (num_seated() + num_branches > limits_.max_seqs) return std::nullopt;
  const bool penalties = seq.sampling.HasPenalties();
  if (penalties && penalty_slots_.num_free() < num_branches) return std::nullopt;

  const int32_t block_size = limits_.block_size;
  const int32_t num_blocks = engine::BlocksFor(static_cast<int64_t>(seq.tokens.size()), block_size);
  int32_t room = 0;  // kept for others and for the newcomer's own growth
  if (!seated_.empty()) {
    for (const Branch* other : seated_) room += Growth(*other);
    room += Growth(branch);
    for (const Branch* fork : branch.forks) room += Growth(*fork);
  }
  const int32_t cached = engine::ReusableBlocks(seq, continuation, block_size, *hasher_, *pool_);
  // A hit may be a cached block, which is then not available any more: look before, check after.
  const int32_t num_fresh = num_blocks - cached;
  if (num_fresh + room > pool_->num_available()) return std::nullopt;
  std::vector<engine::Sequence*> forks;
  for (Branch* fork : branch.forks) forks.push_back(&fork->seq);
  if (!engine::TakePrefix(seq, forks, cached, continuation, block_size, *pool_).ok()) {
    return std::nullopt;
  }
  if (num_fresh + room > pool_->num_available()) {
    engine::ReleaseBlocks(seq, *pool_);
    for (engine::Sequence* fork : forks) engine::ReleaseBlocks(*fork, *pool_);
    return std::nullopt;
  }
  std::vector<engine::BlockId> fresh = *pool_->Allocate(num_fresh);

  const auto seat = [&](Branch& one) {
    one.seated = true;
    seated_.insert(&one);
    if (penalties) {
      one.seq.penalty_slot = *penalty_slots_.Allocate();
      one.seq.penalty_reset_needed = true;
    }
  };
  seat(branch);
  for (Branch* fork : branch.forks) seat(*fork);
  return fresh;
}

void Admission::Leave(Branch& branch) {
  if (!branch.seated) return;
  branch.seated = false;
  seated_.erase(&branch);
  if (branch.seq.penalty_slot >= 0) {
    // A launched step may still count into the slot; whoever gets it next resets it in a later
    // step.
    penalty_slots_.Release(branch.seq.penalty_slot);
    branch.seq.penalty_slot = -1;
    branch.seq.penalty_reset_needed = false;
  }
}

}  // namespace decode_worker
