#include "engine/block_pool.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "status/check.h"

namespace engine {

BlockPool::BlockPool(int32_t num_blocks, int32_t num_state_slots) : blocks_(num_blocks) {
  FERRY_CHECK(num_blocks >= 2) << "num_blocks=" << num_blocks;
  free_.reserve(num_blocks - 1);
  for (BlockId id = num_blocks - 1; id >= 1; --id) free_.push_back(id);  // 1 is handed out first
  if (num_state_slots == 0) return;
  state_slots_ =
      std::make_unique<StateSlots>(num_state_slots, [this](const block_hash::BlockHash& hash) {
        const auto found = index_.find(hash);
        if (found != index_.end()) events_.push_back(Stored(found->second));
      });
}

void BlockPool::Forget(BlockId id) {
  Block& block = blocks_[id];
  block.indexed = false;
  index_.erase(block.hash);
  if (state_slots_ != nullptr) state_slots_->DropSnapshot(block.hash);
  events_.push_back({.stored = false, .hash = block.hash, .parent = {}});
}

BlockEvent BlockPool::Stored(BlockId id) const {
  const Block& block = blocks_[id];
  return {.stored = true,
          .hash = block.hash,
          .parent = block.parent,
          .resumable = state_slots_ == nullptr || state_slots_->HasSnapshot(block.hash)};
}

absl::StatusOr<std::vector<BlockId>> BlockPool::Allocate(int32_t count) {
  if (count > num_available()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("need ", count, " cache blocks, ", num_available(), " are free"));
  }
  std::vector<BlockId> taken;
  taken.reserve(count);
  while (static_cast<int32_t>(taken.size()) < count) {
    BlockId id;
    if (!free_.empty()) {
      id = free_.back();
      free_.pop_back();
    } else {
      id = lru_.front();
      lru_.pop_front();
      Forget(id);
    }
    blocks_[id].holders = 1;
    taken.push_back(id);
  }
  return taken;
}

int32_t BlockPool::MatchPrefix(absl::Span<const block_hash::BlockHash> chain) const {
  int32_t matched = 0;
  for (const block_hash::BlockHash& hash : chain) {
    if (!index_.contains(hash)) break;
    ++matched;
  }
  return matched;
}

int32_t BlockPool::RestorablePrefix(absl::Span<const block_hash::BlockHash> chain) const {
  int32_t restorable = MatchPrefix(chain);
  if (state_slots_ == nullptr) return restorable;
  while (restorable > 0 && !state_slots_->HasSnapshot(chain[restorable - 1])) --restorable;
  return restorable;
}

std::vector<BlockId> BlockPool::AcquirePrefix(absl::Span<const block_hash::BlockHash> chain) {
  std::vector<BlockId> acquired;
  for (const block_hash::BlockHash& hash : chain) {
    const auto found = index_.find(hash);
    if (found == index_.end()) break;
    Block& block = blocks_[found->second];
    if (block.holders++ == 0) lru_.erase(block.lru);
    acquired.push_back(found->second);
  }
  return acquired;
}

void BlockPool::Share(absl::Span<const BlockId> blocks) {
  for (const BlockId id : blocks) {
    FERRY_CHECK(num_holders(id) > 0) << "block " << id << " is not held";
    ++blocks_[id].holders;
  }
}

void BlockPool::Release(absl::Span<const BlockId> blocks) {
  // From the chain's end: its last block becomes the least recently used of the chain, so that
  // eviction takes children before their parents.
  for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
    FERRY_CHECK(num_holders(*it) > 0) << "block " << *it << " is not held";
    Block& block = blocks_[*it];
    if (--block.holders > 0) continue;
    if (block.indexed) {
      block.lru = lru_.insert(lru_.end(), *it);
    } else {
      free_.push_back(*it);
    }
  }
}

void BlockPool::Index(BlockId id, const block_hash::BlockHash& hash,
                      const block_hash::BlockHash& parent) {
  FERRY_CHECK(num_holders(id) > 0) << "block " << id << " is not held";
  Block& block = blocks_[id];
  if (block.indexed || !index_.emplace(hash, id).second) return;
  block.indexed = true;
  block.hash = hash;
  block.parent = parent;
  events_.push_back(Stored(id));
}

void BlockPool::AddSnapshot(SlotId slot, const block_hash::BlockHash& hash) {
  const auto found = index_.find(hash);
  if (found == index_.end() || state_slots_->HasSnapshot(hash)) {
    return state_slots_->Release(slot);
  }
  state_slots_->AddSnapshot(slot, hash);
  events_.push_back(Stored(found->second));
}

void BlockPool::ClearIndex() {
  for (const auto& [hash, id] : std::exchange(index_, {})) {
    Forget(id);
    if (blocks_[id].holders == 0) free_.push_back(id);
  }
  lru_.clear();
}

std::vector<BlockEvent> BlockPool::IndexedBlocks() const {
  // Depth first along parents, so that a parent comes before its children.
  std::vector<BlockEvent> out;
  out.reserve(index_.size());
  absl::flat_hash_map<block_hash::BlockHash, bool> emitted;
  for (const auto& [hash, id] : index_) {
    std::vector<BlockId> path;
    block_hash::BlockHash at = hash;
    for (auto it = index_.find(at); it != index_.end() && !emitted.contains(at);
         it = index_.find(at)) {
      emitted[at] = true;
      path.push_back(it->second);
      at = blocks_[it->second].parent;
    }
    for (auto it = path.rbegin(); it != path.rend(); ++it) {
      out.push_back(Stored(*it));
    }
  }
  return out;
}

std::vector<BlockEvent> BlockPool::TakeEvents() { return std::exchange(events_, {}); }

int32_t BlockPool::num_holders(BlockId id) const {
  FERRY_CHECK(id >= 1 && id < num_blocks()) << "block " << id << " of " << num_blocks();
  return blocks_[id].holders;
}

}  // namespace engine
