// How a sequence starts from what the pool already has, and where it leaves state for others.
//
// A model without state goes on behind any cached block.  A model with state also needs the state
// behind that block, so sequences leave snapshots of theirs at some block boundaries while they are
// computed: every `every_blocks` blocks, at the last boundary before a prompt's last token, and
// while decoding at the newest boundary (the next turn of a conversation goes on from there).
//
// Functions on a scheduler's sequences and pool: thread-compatible.

#ifndef ENGINE_PREFIX_REUSE_H_
#define ENGINE_PREFIX_REUSE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "block_hash/block_hash.h"
#include "engine/block_pool.h"
#include "engine/plan_builder.h"
#include "engine/sequence.h"

namespace engine {

// Whether the tokens behind a cached prefix are computed here, or their blocks and state come from
// another worker: then no snapshot is needed.
enum class Continuation : uint8_t { kComputed, kReceived };

// How many cached blocks `seq` may start with: never that of the last known token, which is always
// computed because its row gives the next token.  Completes seq.hashes; changes nothing else.
int32_t ReusableBlocks(Sequence& seq, Continuation continuation, int32_t block_size,
                       const block_hash::BlockHasher& hasher, const BlockPool& pool);

// Starts `seq` with its first `num_blocks` blocks, which ReusableBlocks has just named.  Of a model
// with state, `seq` and each of `forks` also get a state slot; seq's continues from the snapshot
// behind the prefix, from nothing, or (kReceived) from what is received into it.  All or none.
// Errors: kResourceExhausted if too few slots are free or hold snapshots: the caller waits.
// REQUIRES: `seq` holds nothing.
absl::Status TakePrefix(Sequence& seq, absl::Span<Sequence* const> forks, int32_t num_blocks,
                        Continuation continuation, int32_t block_size, BlockPool& pool);

// The fork continues from the trunk's state as it is when the next plan is run.
void ForkState(const Sequence& trunk, Sequence& fork, BlockPool& pool);

// A snapshot that a plan makes: after its step `slot` holds the state behind `num_tokens` tokens.
struct PendingSnapshot {
  SlotId slot = kNoSlot;  // none
  int32_t num_tokens = 0;
  bool newest = false;  // only the newest of a decoding sequence: the next one replaces it
};

// Where snapshots are taken.
struct SnapshotPolicy {
  int32_t block_size = 64;   // tokens
  int32_t every_blocks = 0;  // 0: nowhere, the model keeps no state

  // Where a chunk of a sequence with `num_known` tokens ends that starts at `start` and could end
  // at `end`: not beyond the next place where a snapshot is wanted, because a state can be kept
  // only as a chunk leaves it.
  int32_t ChunkEnd(int32_t start, int32_t end, int32_t num_known) const;

  // Adds a snapshot of `seq`, which `builder` has just been given, if one is wanted there and a
  // slot is to be had.  `decoding`: its rows reach everything that is known of it.
  PendingSnapshot Take(const Sequence& seq, bool decoding, PlanBuilder& builder,
                       BlockPool& pool) const;

  // The step has been collected and the blocks of `seq` are indexed: the pending snapshot, if there
  // is one, becomes a snapshot.
  void Keep(Sequence& seq, const PendingSnapshot& pending, BlockPool& pool) const;
};

}  // namespace engine

#endif  // ENGINE_PREFIX_REUSE_H_
