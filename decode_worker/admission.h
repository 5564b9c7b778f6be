// Admission: who may enter the batch, and with which blocks.
//
// Counts seats (sequences of a step), state slots and penalty slots of everything that runs or is
// being received, and keeps room for what it will still write: a newcomer gets its blocks only if
// the seated branches can grow by `growth_tokens` each (or to their ends).  That is a forecast, not
// a promise: when it was too optimistic a branch is preempted (batch_runner.h).
//
// Owned by the scheduler thread.

#ifndef DECODE_WORKER_ADMISSION_H_
#define DECODE_WORKER_ADMISSION_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "block_hash/block_hash.h"
#include "decode_worker/branch.h"
#include "engine/block_pool.h"
#include "engine/prefix_reuse.h"
#include "engine/slot_pool.h"

namespace decode_worker {

struct AdmissionLimits {
  int32_t block_size = 64;  // tokens
  int32_t max_seqs = 64;
  int32_t num_penalty_slots = 64;
  int32_t growth_tokens = 512;  // kept free for each seated branch
};

class Admission final {
 public:
  // `pool` and `hasher` must outlive it.
  Admission(const AdmissionLimits& limits, engine::BlockPool* pool,
            const block_hash::BlockHasher* hasher);

  // Seats the branch and its forks.  branch.seq.blocks then holds the blocks that the pool already
  // has of its tokens (at most those of all but the last token) and from which `continuation` can
  // go on, num_computed counts their tokens; the returned fresh blocks are for the rest.  Each has
  // a state slot if the model keeps a state.  Nothing changes if there is no room now.
  // REQUIRES: the branch is not seated and has no blocks.
  std::optional<std::vector<engine::BlockId>> TryAdmit(Branch& branch,
                                                       engine::Continuation continuation);

  // Takes the seat and the penalty slot back; blocks and state slot go with DropBlocks.  A branch
  // that is not seated: nothing.
  void Leave(Branch& branch);

  int32_t num_seated() const { return static_cast<int32_t>(seated_.size()); }

 private:
  // Blocks that a seated branch may still ask for.
  int32_t Growth(const Branch& branch) const;

  const AdmissionLimits limits_;
  engine::BlockPool* const pool_;
  const block_hash::BlockHasher* const hasher_;
  engine::SlotPool penalty_slots_;
  absl::flat_hash_set<const Branch*> seated_;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_ADMISSION_H_
