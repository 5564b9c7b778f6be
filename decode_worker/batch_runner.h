// BatchRunner: continuous batching on an asynchronous engine.
//
// It builds the plan of step N+1 while step N runs: a decode's input is "what step N sampled".  So
// the end of a branch is learned one step late, and the surplus row is thrown away.  Two plans
// alternate.  A plan has the decodes first, in the order of branch.h's GoesBefore, then chunks of
// local prefill.
//
// A branch that finds no block for its next row preempts the last one of that order, the youngest
// of the lowest priority: that one gives its blocks back and is computed again later, from its
// tokens, with the same random numbers.  The last one itself waits.
//
// The one rule for memory: a block or state slot returns to the pool only when no launched step
// reads or writes it.
//
// Owned by the scheduler thread.

#ifndef DECODE_WORKER_BATCH_RUNNER_H_
#define DECODE_WORKER_BATCH_RUNNER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "block_hash/block_hash.h"
#include "decode_worker/branch.h"
#include "engine/block_pool.h"
#include "engine/engine.h"
#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"
#include "model/step_plan.h"

namespace decode_worker {

class BatchRunner final {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // A step has sampled branch.seq.tokens.back().  May retire any branch.
    virtual void OnSample(Branch& branch, const kernels::SampleResult& sample) = 0;
    // The model's logits gave no token (kernels::kNoToken).  Must retire the branch.
    virtual void OnNoToken(Branch& branch) = 0;
    // The branch has left the batch without blocks; its tokens are whole.  Must not start a branch.
    virtual void OnPreempted(Branch& branch) = 0;
  };

  // Everything must outlive it.
  BatchRunner(engine::Engine* engine, engine::BlockPool* pool,
              const block_hash::BlockHasher* hasher, const engine::SnapshotPolicy& snapshots,
              int32_t chunk_tokens, Listener* listener);

  // The branch enters the batch.  kPrefilling: it has blocks for its known tokens and no pending
  // one. kDecoding: all its known tokens but the last are computed.
  void Start(Branch& branch, BranchState state);

  // The branch leaves for good; it and its blocks go when no launched step uses them.
  void Retire(std::unique_ptr<Branch> branch);

  // Launches the next step if there is anything to compute, and collects the oldest step if two are
  // in flight or nothing was launched.  False: there was nothing to do. Errors: the engine is
  // broken.
  absl::StatusOr<bool> Step();

  struct Stats {
    int64_t steps = 0;
    int64_t preemptions = 0;
    int64_t surplus_rows = 0;   // computed for a branch that had ended
    double step_ms = 0;         // moving average
    double decode_step_ms = 0;  // moving average of those without chunks; 0: there was none
    double last_step_ms = 0;
    int32_t last_prefill_tokens = 0;
    int32_t last_decode_tokens = 0;
  };
  const Stats& stats() const { return stats_; }

 private:
  // What a launched step holds.
  struct LaunchedStep {
    engine::StepHandle handle = 0;
    int64_t step_id = 0;
    struct Use {
      Branch* branch;
      int32_t num_written;  // tokens of it that are in the cache after this step; 0: a sample only
      int32_t sample;       // index, or -1
      engine::PendingSnapshot snapshot = {};
      int32_t prefill_tokens = 0;
    };
    std::vector<Use> uses;
    std::vector<engine::BlockId> release_after;       // sources of copy-on-write
    std::vector<engine::SlotId> release_slots_after;  // sources of copies of a state
    int32_t prefill_tokens = 0;
    int32_t decode_tokens = 0;
  };

  LaunchedStep Build();
  void AddForkedStates(LaunchedStep& step);
  void AddDecodes(LaunchedStep& step);
  void AddChunks(LaunchedStep& step);
  void AddChunk(LaunchedStep& step, Branch& branch, int32_t num_tokens, bool absorbed);
  // Makes the block of the branch's next row present and private.  False: not in this step.
  bool PrepareRow(LaunchedStep& step, Branch& branch);
  // True if a block may have become free for `branch`; false: it has to wait.
  bool MakeRoom(const LaunchedStep& step, const Branch& branch);
  void Preempt(Branch& branch);
  absl::Status CollectOldest();
  void CountTime(const LaunchedStep& step, double step_ms);
  void DropUnused();

  engine::Engine* const engine_;
  engine::BlockPool* const pool_;
  const block_hash::BlockHasher* const hasher_;
  const engine::SnapshotPolicy snapshots_;
  const int32_t block_size_;  // tokens
  const int32_t chunk_tokens_;
  Listener* const listener_;

  std::array<std::unique_ptr<model::StepPlan>, 2> plans_;  // of even and odd steps
  std::array<std::unique_ptr<engine::PlanBuilder>, 2> builders_;
  engine::PlanBuilder* builder_ = nullptr;  // of the plan being built
  int64_t next_step_id_ = 0;
  std::deque<LaunchedStep> launched_;

  std::vector<Branch*> active_;  // prefilling and decoding, by GoesBefore
  std::vector<Branch*> preempting_;
  std::vector<std::unique_ptr<Branch>> retired_;  // used by a launched step
  Stats stats_;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_BATCH_RUNNER_H_
