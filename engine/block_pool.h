// BlockPool: the fixed set of cache blocks that block tables point at, and the index of what they
// hold; for a model that keeps a state per sequence also its state slots and their snapshots.
//
// It manages ids and identities only; the bytes are CacheMemory's.  A block is free (nobody holds
// it, it means nothing), cached (nobody holds it, its content is known by hash, it may be evicted)
// or held. Sequences with a common prefix share a block.  Block 0 is reserved: never handed out.
// Without a snapshot behind it a prefix is of no use to a model with state: see RestorablePrefix.
//
// Invariant: num_free() + num_cached() + num_held() == num_blocks() - 1.
// Thread-compatible: the scheduler thread owns the pool and makes every call.

#ifndef ENGINE_BLOCK_POOL_H_
#define ENGINE_BLOCK_POOL_H_

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "block_hash/block_hash.h"
#include "engine/state_slots.h"

namespace engine {

using BlockId = int32_t;  // [1, num_blocks); 0 is reserved

// Blocks that hold `num_tokens` tokens, the last one perhaps in part.
inline int32_t BlocksFor(int64_t num_tokens, int32_t block_size) {
  return static_cast<int32_t>((num_tokens + block_size - 1) / block_size);
}

// What changed in the index, for WatchKvEvents.  In order.
struct BlockEvent {
  bool stored = false;  // else removed
  block_hash::BlockHash hash;
  block_hash::BlockHash parent;  // of a stored block; the chain's root for the first
  // Of a stored block: a sequence can go on behind it.  Of a model with state only while it has a
  // snapshot; a change is told by storing the block again.
  bool resumable = true;
};
class BlockPool final {
 public:
  // `num_state_slots`: 0 for a model without state.
  // REQUIRES: num_blocks >= 2 (block 0 included), num_state_slots 0 or >= 2 (slot 0 included).
  explicit BlockPool(int32_t num_blocks, int32_t num_state_slots = 0);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Takes `count` blocks, each with one holder: free ones first, then cached ones, least recently
  // released first (they leave the index).  All of them or none.
  // Errors: kResourceExhausted if fewer are free or cached.
  absl::StatusOr<std::vector<BlockId>> Allocate(int32_t count);

  // The longest run of indexed blocks along `chain`, each with one more holder.
  std::vector<BlockId> AcquirePrefix(absl::Span<const block_hash::BlockHash> chain);
  // How many blocks AcquirePrefix would return; changes nothing.
  int32_t MatchPrefix(absl::Span<const block_hash::BlockHash> chain) const;
  // How many of them a sequence can go on behind: those up to the last snapshot, or all if the
  // model keeps no state.
  int32_t RestorablePrefix(absl::Span<const block_hash::BlockHash> chain) const;

  // Adds a holder.  REQUIRES: every block is held.
  void Share(absl::Span<const BlockId> blocks);
  // Drops one holder of each.  A block without holders becomes cached if it is indexed, else free.
  // REQUIRES: every block is held.
  void Release(absl::Span<const BlockId> blocks);

  // Indexes a held, full block under its hash.  If another block has the hash already, that one
  // stays indexed and this one remains private.
  void Index(BlockId block, const block_hash::BlockHash& hash, const block_hash::BlockHash& parent);
  // The held slot holds the state behind the block `hash` and becomes its snapshot.  If that block
  // is not indexed (any more), or has a snapshot already, the slot is only released.
  void AddSnapshot(SlotId slot, const block_hash::BlockHash& hash);
  // Removes every indexed block from the index (cached ones become free), and every snapshot.
  void ClearIndex();
  // Null for a model without state.
  StateSlots* state_slots() const { return state_slots_.get(); }

  // Everything indexed, parents before children: a snapshot for WatchKvEvents.
  std::vector<BlockEvent> IndexedBlocks() const;
  // Events since the last call.
  std::vector<BlockEvent> TakeEvents();

  int32_t num_holders(BlockId block) const;
  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_cached() const { return static_cast<int32_t>(lru_.size()); }
  int32_t num_held() const { return num_blocks() - 1 - num_free() - num_cached(); }
  int32_t num_available() const { return num_free() + num_cached(); }

 private:
  struct Block {
    int32_t holders = 0;
    bool indexed = false;
    block_hash::BlockHash hash;
    block_hash::BlockHash parent;
    std::list<BlockId>::iterator lru;  // valid while cached
  };
  // Takes it out of the index, with its snapshot.
  void Forget(BlockId block);
  BlockEvent Stored(BlockId block) const;

  std::vector<Block> blocks_;  // by block id
  std::vector<BlockId> free_;  // a stack: last freed, first reused
  std::list<BlockId> lru_;     // cached blocks, least recently released first
  absl::flat_hash_map<block_hash::BlockHash, BlockId> index_;
  std::vector<BlockEvent> events_;
  std::unique_ptr<StateSlots> state_slots_;
};

}  // namespace engine

#endif  // ENGINE_BLOCK_POOL_H_
