// ChunkStep: one step of the prefill worker: which rows of which requests, what they sample, and
// what is learned when it has been collected.
//
// A step takes up to `chunk_tokens` new rows, first come first served, over as many requests as
// that needs.  Only a prompt that takes several steps leaves half of each to others which end in
// that step, the shortest first: they do not wait for all of it, and it takes at most twice as
// long.  A request's last chunk samples its first tokens, one a branch; branches that do not
// fit (samples, penalty slots, history) are sampled in a further step that computes the last row
// again.  A model with state cannot compute a row twice: there all branches are sampled in one
// step.
//
// Owned by the scheduler thread.

#ifndef PREFILL_WORKER_CHUNK_STEP_H_
#define PREFILL_WORKER_CHUNK_STEP_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/engine.h"
#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"
#include "engine/slot_pool.h"
#include "model/step_plan.h"
#include "prefill_worker/prefill_request.h"

namespace prefill_worker {

class ChunkStep final {
 public:
  // `pool` and `penalty_slots` must outlive it.
  ChunkStep(const model::StepLimits& limits, const engine::SnapshotPolicy& snapshots,
            engine::BlockPool* pool, engine::SlotPool* penalty_slots);

  // Plans rows of `requests`, in order, and advances their num_computed and next_branch.
  // False if there is nothing to compute.  REQUIRES: not in flight.
  bool Build(int64_t step_id, absl::Span<PrefillRequest* const> requests, int32_t chunk_tokens);

  const model::StepPlan& plan() const { return plan_; }
  // Requests with rows in this step; each counts it in steps_in_flight.
  const std::vector<PrefillRequest*>& requests() const { return requests_; }
  int32_t num_tokens() const { return plan_.counts().num_tokens; }

  // Takes the step's results into its requests, those that are ending included.
  void Collected(const engine::StepResult& result);
  // After Collected, when the new blocks are indexed: what the step's snapshots hold may be used.
  // Forgets the requests.
  void KeepSnapshots();

  engine::StepHandle handle = 0;

 private:
  struct Sample {
    PrefillRequest* request;
    uint32_t branch;
    int32_t penalty_slot;  // -1: none
  };
  // Whether the request's next `count` branches can be sampled in this step.
  bool CanSample(const PrefillRequest& request, int32_t count) const;
  engine::Sequence& PrepareBranch(PrefillRequest& request, engine::Sequence& seq);
  bool AddRows(PrefillRequest& request, int32_t& budget);
  void Add(PrefillRequest& request, int32_t& budget);
  void AddShort(absl::Span<PrefillRequest* const> requests, int32_t& budget);

  const engine::SnapshotPolicy snapshots_;
  engine::BlockPool* const pool_;
  engine::SlotPool* const penalty_slots_;
  model::StepPlan plan_;
  engine::PlanBuilder builder_;
  std::vector<PrefillRequest*> requests_;
  std::vector<int32_t> rows_;                     // of this step, beside requests_
  std::vector<int32_t> ends_;                     // num_computed after this step, beside requests_
  std::vector<engine::PendingSnapshot> pending_;  // beside requests_
  std::vector<Sample> samples_;                   // by sample index
  std::vector<PrefillRequest*> short_;            // scratch of AddShort
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_CHUNK_STEP_H_
