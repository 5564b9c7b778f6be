// SimulatedWorker: what a prefill or decode worker does with time and blocks, without computing
// anything.  ClusterSimulation owns the clock.

#ifndef TESTS_FAKES_SIMULATED_WORKER_H_
#define TESTS_FAKES_SIMULATED_WORKER_H_

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "block_hash/block_hash.h"
#include "router/prefix_index.h"
#include "router/worker_view.h"

namespace router {

struct WorkerModel {
  WorkerFacts facts;         // what it says of itself
  double admitted_load = 1;  // the share of its load that its reports tell
};

// A worker of 2000 blocks of 64 tokens; V3-like speeds.
WorkerModel PrefillModel();
WorkerModel DecodeModel();

class SimulatedWorker final {
 public:
  using Chain = std::vector<block_hash::BlockHash>;

  struct Prompt {  // to compute
    int request = 0;
    int32_t tokens = 0;
    std::shared_ptr<const Chain> chain;
  };
  struct Sequence {  // that decodes
    int request = 0;
    int32_t left = 0;  // tokens to come
    int32_t blocks = 0;
  };

  SimulatedWorker(WorkerSlot slot, const WorkerModel& model);

  const WorkerModel& model() const { return model_; }
  WorkerSlot slot() const { return slot_; }
  WorkerLoad Load() const;  // as it reports it

  // Leading blocks of the prompt in the cache; at most those before its last token.
  int32_t Cached(const Prompt& prompt) const;
  // Seconds to compute the prompt over what is cached now.
  absl::Duration ComputeTime(const Prompt& prompt) const;
  absl::Duration StepTime() const;
  // Puts the blocks of a computed or received prompt into the cache; the least lately used go.
  void Store(const Chain& chain);
  // Events since the last frame; empty: none.
  std::vector<PrefixIndex::Event> TakeEvents();
  uint64_t NextSeq() { return ++seq_; }
  std::string epoch() const;

  std::deque<Prompt> prompts;       // the first one is being computed
  std::vector<Sequence> sequences;  // decoding
  std::deque<Sequence> arriving;    // join at the next step
  bool stepping = false;
  bool draining = false;
  double slowness = 1;  // it takes so many times as long as it says
  int32_t assigned = 0;

 private:
  const WorkerSlot slot_;
  const WorkerModel model_;
  std::list<block_hash::BlockHash> lru_;  // the oldest first
  absl::flat_hash_map<block_hash::BlockHash, std::list<block_hash::BlockHash>::iterator> cached_;
  std::vector<PrefixIndex::Event> events_;
  uint64_t seq_ = 0;
};

}  // namespace router

#endif  // TESTS_FAKES_SIMULATED_WORKER_H_
