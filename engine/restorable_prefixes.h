// RestorablePrefixes: what a worker may say it has cached when its model keeps a state per
// sequence.  A block alone is no use there: a prompt can go on only behind a block with a snapshot.
// So a block is told as stored while it lies on a chain of indexed blocks that leads to a snapshot,
// and as removed when it does so no more.
//
// Thread-compatible: BlockPool owns it.

#ifndef ENGINE_RESTORABLE_PREFIXES_H_
#define ENGINE_RESTORABLE_PREFIXES_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "block_hash/block_hash.h"
#include "engine/block_event.h"

namespace engine {

class RestorablePrefixes final {
 public:
  void BlockIndexed(const block_hash::BlockHash& hash, const block_hash::BlockHash& parent);
  void BlockRemoved(const block_hash::BlockHash& hash);
  // REQUIRES: the block is indexed.
  void SnapshotAdded(const block_hash::BlockHash& hash);
  void SnapshotDropped(const block_hash::BlockHash& hash);

  // What changed since the last call, parents stored before their children, removed after them.
  std::vector<BlockEvent> TakeEvents();

 private:
  struct Node {
    bool indexed = false;
    bool snapshot = false;
    bool told = false;             // as stored
    int32_t told_children = 0;     // outlives the block: it may be indexed again
    block_hash::BlockHash parent;  // while indexed
  };
  // Brings `told` of the block and of its ancestors up to date.
  void Update(block_hash::BlockHash hash);

  absl::flat_hash_map<block_hash::BlockHash, Node> nodes_;  // indexed, or with told children
  std::vector<BlockEvent> events_;
};

}  // namespace engine

#endif  // ENGINE_RESTORABLE_PREFIXES_H_
