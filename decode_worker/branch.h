// Branch: one token timeline of a request inside the scheduler: its engine::Sequence and where it
// stands.
//
// A request with n > 1 starts as one trunk that carries the prompt.  When the first tokens are
// sampled the other branches fork from it: they share its full blocks for good, and its partial
// last block until they write (copy-on-write).  A state slot is written with every row: each branch
// has its own from admission on, and it is filled at the fork.
//
// Plain data, owned by the scheduler thread.

#ifndef DECODE_WORKER_BRANCH_H_
#define DECODE_WORKER_BRANCH_H_

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "decode_worker/request.h"
#include "engine/block_pool.h"
#include "engine/sequence.h"

namespace decode_worker {

enum class BranchState : uint8_t {
  kIdle,        // queued, receiving, or not forked yet: in no plan
  kPrefilling,  // in the batch; its known tokens are not all computed
  kDecoding,    // in the batch; one row a step
  kPreempting,  // gives its blocks back as soon as no launched step uses them
  kRetired,     // its request needs it no more; kept until no launched step uses it
};

struct Branch {
  int32_t priority = 0;  // of its request
  uint64_t serial = 0;   // of its request: lower is older
  int32_t index = 0;     // 0: the trunk
  engine::Sequence seq;
  BranchState state = BranchState::kIdle;
  double prefill_ms = 0;  // of steps' time, without that of decoding, its chunks' share by tokens
  int32_t in_flight = 0;  // launched, uncollected steps that read or write its blocks or slot
  bool seated = false;    // counts against the batch's size (admission.h)
  std::vector<Branch*> forks;  // of a trunk that has not forked yet
  // Not null while the partial last block is shared: how many share it.
  std::shared_ptr<int32_t> tail_sharers;
};

// Who keeps its blocks when they are short: the higher priority first, then the older request;
// branches of a request in order.
inline bool GoesBefore(const Branch& a, const Branch& b) {
  return std::tuple(-int64_t{a.priority}, a.serial, a.index) <
         std::tuple(-int64_t{b.priority}, b.serial, b.index);
}

// Tokens of the timeline, the one that a launched step is sampling included.
inline int32_t NumTokens(const engine::Sequence& seq) {
  return static_cast<int32_t>(seq.tokens.size()) + (seq.pending_sample >= 0 ? 1 : 0);
}

// Whether the timeline needs no further sample: max_tokens are there or on their way.
inline bool AtMaxTokens(const engine::Sequence& seq) {
  return NumTokens(seq) - seq.num_prompt_tokens >= seq.sampling.max_tokens;
}

// Why the newest known token is the last one, or kNone.
FinishReason FinishOf(const engine::Sequence& seq);

// Makes the forks of `trunk`, whose known tokens are computed (or will be by the plan being built),
// equal to it but for sampling options and penalty slot.  Returns them; trunk.forks is empty
// afterwards.
std::vector<Branch*> ForkBranches(Branch& trunk, int32_t block_size, engine::BlockPool& pool);

// Forgets that the last block is shared.  Its reference is kept or released by the caller.
void LeaveTail(Branch& branch);

// Gives every block and the state slot back, also the slots of forks that are still to come, and
// forgets what was computed; tokens stay.
// REQUIRES: in_flight == 0.
void DropBlocks(Branch& branch, engine::BlockPool& pool);

}  // namespace decode_worker

#endif  // DECODE_WORKER_BRANCH_H_
