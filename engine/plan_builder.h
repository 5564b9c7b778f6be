// PlanBuilder: packs rows of several sequences into a StepPlan, and remembers what is in it.
//
// Absorbed sequences are added before ragged ones.  Adding advances Sequence::num_computed and sets
// pending_sample: after Launch the sequence's newest token is "what this step samples".
//
// Thread-compatible.

#ifndef ENGINE_PLAN_BUILDER_H_
#define ENGINE_PLAN_BUILDER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/sequence.h"
#include "model/cache_spec.h"
#include "model/step_plan.h"

namespace engine {

// Gives `seq` blocks for its first `num_tokens` tokens.  All or none.
// Errors: kResourceExhausted: the caller waits, preempts, or refuses.
absl::Status GrowBlocks(Sequence& seq, int32_t num_tokens, int32_t block_size, BlockPool& pool);

// Indexes the blocks of `seq` that are full of computed, known tokens and not indexed yet.
// Call it only for tokens whose step has been collected: `num_written` of them.
void IndexFullBlocks(Sequence& seq, int32_t num_written, int32_t block_size,
                     const block_hash::BlockHasher& hasher, BlockPool& pool);

// Appends the token that step `step_id` sampled for `seq`.  REQUIRES: it is not kernels::kNoToken.
void AcceptToken(Sequence& seq, int64_t step_id, int32_t token);
// kInternal: the sample behind `num_tokens` tokens is kernels::kNoToken.
absl::Status NoTokenError(int32_t num_tokens);

// Gives back every block, and the state slot.  REQUIRES: no launched step still writes them.
void ReleaseBlocks(Sequence& seq, BlockPool& pool);

class PlanBuilder final {
 public:
  // `plan` and its limits must outlive the builder.
  PlanBuilder(int32_t block_size, model::StepPlan& plan);

  // Starts a plan.
  void Begin(int64_t step_id);

  // Rows, sequences and samples still free.
  int32_t free_tokens() const;
  int32_t free_seqs() const;
  int32_t free_samples() const;
  int32_t free_absorbed_tokens() const;
  int32_t free_history_tokens()
      const;  // a sample whose penalty slot needs a reset takes tokens.size()

  // Adds the next `num_tokens` uncomputed tokens of `seq`; with `sample`, the token after the last
  // of them is sampled (REQUIRES: they reach the newest token).  A pending token is taken from the
  // previous step's samples: REQUIRES pending_step to be this step's id - 1.  Returns the sample's
  // index or -1. `absorbed`: attended in absorbed form (decode, or a short chunk over a long
  // prefix). `logits`: full logits of every row added are wanted. REQUIRES: capacity (see above),
  // blocks for every row, absorbed sequences first, num_tokens >= 1.
  int32_t Add(Sequence& seq, int32_t num_tokens, bool absorbed, bool sample, bool logits = false);

  // A further sample from the last row of the sequence added last (branches of n > 1), drawn with
  // `branch`'s sampling options.  Sets branch.pending_sample.  Returns the sample's index.
  int32_t AddBranchSample(Sequence& branch);

  // Copies block `src` to `dst` before the step's other work.  REQUIRES: capacity.
  void AddCopy(BlockId src, BlockId dst);

  // Fills the sequence's state slot from its state_source, if it has one, before the step's other
  // work.  Add does it too: call it first where rows of this plan advance what is to be copied.
  void PrepareState(Sequence& seq);
  // Copies the state of the sequence added last, after its rows, to `slot`.
  void AddSnapshot(SlotId slot);
  // The sources of PrepareState, each with the holder it had for its sequence: to be released when
  // the step has been collected.
  const std::vector<SlotId>& state_sources() const { return state_sources_; }

  bool empty() const;
  model::StepPlan& plan() { return plan_; }

 private:
  int32_t AddSample(Sequence& seq, int32_t row);

  const int32_t block_size_;
  model::StepPlan& plan_;
  std::vector<SlotId> state_sources_;
};

}  // namespace engine

#endif  // ENGINE_PLAN_BUILDER_H_
