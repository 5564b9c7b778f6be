// Sequence: one token timeline inside an engine: its tokens, how far they are computed, its blocks
// and its state slot.
//
// With an asynchronous engine the newest token may be known to the device only: then
// `pending_sample` names the sample of the last launched step that will be it.
//
// Plain data; owned by a scheduler.  Whoever reserves, releases: engine/plan_builder.h has the one
// function that grows a sequence's blocks and ReleaseBlocks gives everything back.

#ifndef ENGINE_SEQUENCE_H_
#define ENGINE_SEQUENCE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "block_hash/block_hash.h"
#include "engine/block_pool.h"
#include "engine/state_slots.h"
#include "kernels/head_and_sample.h"

namespace engine {

struct SamplingOptions {
  float temperature = 1;
  int32_t top_k = 0;  // 0: all
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  uint64_t seed = 0;
  uint32_t branch = 0;
  int32_t max_tokens = 1;
  int32_t min_tokens = 0;
  std::vector<int32_t> stop_token_ids;  // EOS ids included unless ignored; at most kMaxBannedTokens
  int32_t num_logprobs = -1;            // -1: none

  bool HasPenalties() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
};

struct Sequence {
  SamplingOptions sampling;
  std::vector<int32_t> tokens;  // known tokens: prompt, then output
  int32_t num_prompt_tokens = 0;
  int32_t num_computed = 0;     // tokens whose latents launched steps write (or have written)
  int32_t pending_sample = -1;  // >= 0: the newest token is that sample of step pending_step
  int64_t pending_step = -1;
  std::vector<BlockId> blocks;  // block i holds tokens [i * block_size, (i+1) * block_size)
  std::vector<block_hash::BlockHash> hashes;  // of the full blocks known so far
  block_hash::BlockHash root;                 // of its hash chain
  int32_t num_indexed = 0;        // blocks already given to BlockPool::Index (or taken from it)
  SlotId state_slot = kNoSlot;    // where its state lives, of a model that keeps one
  SlotId state_source = kNoSlot;  // held for it: the next step copies it to state_slot first
  std::optional<block_hash::BlockHash> newest_snapshot;  // to be replaced by the next one
  int32_t penalty_slot = -1;
  bool penalty_reset_needed = false;  // the slot's counts must be set in the next step

  int32_t num_output_tokens() const {
    return static_cast<int32_t>(tokens.size()) - num_prompt_tokens;
  }
};

}  // namespace engine

#endif  // ENGINE_SEQUENCE_H_
