#include "engine/restorable_prefixes.h"

#include <utility>

#include "status/check.h"

namespace engine {

void RestorablePrefixes::BlockIndexed(const block_hash::BlockHash& hash,
                                      const block_hash::BlockHash& parent) {
  Node& node = nodes_[hash];
  node.indexed = true;
  node.parent = parent;
  Update(hash);
}

void RestorablePrefixes::BlockRemoved(const block_hash::BlockHash& hash) {
  Node& node = nodes_.at(hash);
  node.indexed = false;
  node.snapshot = false;
  Update(hash);
}

void RestorablePrefixes::SnapshotAdded(const block_hash::BlockHash& hash) {
  Node& node = nodes_.at(hash);
  FERRY_CHECK(node.indexed) << block_hash::ToHex(hash);
  node.snapshot = true;
  Update(hash);
}

void RestorablePrefixes::SnapshotDropped(const block_hash::BlockHash& hash) {
  nodes_.at(hash).snapshot = false;
  Update(hash);
}

void RestorablePrefixes::Update(block_hash::BlockHash hash) {
  std::vector<BlockEvent> changes;  // from the block towards the root
  while (true) {
    const auto found = nodes_.find(hash);
    Node& node = found->second;
    const bool tell = node.indexed && (node.snapshot || node.told_children > 0);
    const bool changed = tell != node.told;
    const block_hash::BlockHash parent = node.parent;
    node.told = tell;
    if (!node.indexed && node.told_children == 0) nodes_.erase(found);
    if (!changed) break;
    changes.push_back(
        {.stored = tell, .hash = hash, .parent = tell ? parent : block_hash::BlockHash{}});
    // The root is a parent without a node of its own until it has children.
    nodes_[parent].told_children += tell ? 1 : -1;
    hash = parent;
  }
  if (changes.empty()) return;
  // One walk only tells or only takes back.
  if (changes.front().stored) {
    events_.insert(events_.end(), changes.rbegin(), changes.rend());
  } else {
    events_.insert(events_.end(), changes.begin(), changes.end());
  }
}

std::vector<BlockEvent> RestorablePrefixes::TakeEvents() { return std::exchange(events_, {}); }

}  // namespace engine
