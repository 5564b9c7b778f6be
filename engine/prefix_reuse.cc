#include "engine/prefix_reuse.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "status/check.h"

namespace engine {
namespace {

int32_t LastBoundary(int32_t num_known, int32_t block_size) {
  return (num_known - 1) / block_size * block_size;
}

}  // namespace

int32_t ReusableBlocks(Sequence& seq, Continuation continuation, int32_t block_size,
                       const block_hash::BlockHasher& hasher, const BlockPool& pool) {
  const absl::Span<const int32_t> tokens(seq.tokens);
  const auto num_tokens = static_cast<int32_t>(tokens.size());
  while (static_cast<int32_t>(seq.hashes.size()) < num_tokens / block_size) {
    const auto i = static_cast<int32_t>(seq.hashes.size());
    seq.hashes.push_back(hasher.Next(i == 0 ? seq.root : seq.hashes[i - 1],
                                     tokens.subspan(i * block_size, block_size)));
  }
  const auto chain = absl::MakeConstSpan(seq.hashes)
                         .first(static_cast<size_t>(LastBoundary(num_tokens, block_size)) /
                                static_cast<size_t>(block_size));
  return continuation == Continuation::kReceived ? pool.MatchPrefix(chain)
                                                 : pool.RestorablePrefix(chain);
}

absl::Status TakePrefix(Sequence& seq, absl::Span<Sequence* const> forks, int32_t num_blocks,
                        Continuation continuation, int32_t block_size, BlockPool& pool) {
  FERRY_CHECK(seq.blocks.empty() && seq.state_slot == kNoSlot) << "blocks=" << seq.blocks.size();
  if (StateSlots* const slots = pool.state_slots(); slots != nullptr) {
    const int32_t wanted = 1 + static_cast<int32_t>(forks.size());
    if (slots->num_available() < wanted) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "need ", wanted, " state slots, ", slots->num_available(), " are free or snapshots"));
    }
    SlotId source = kNoSlot;
    if (continuation == Continuation::kComputed) {
      source = num_blocks == 0 ? kZeroSlot : slots->AcquireSnapshot(seq.hashes[num_blocks - 1]);
    }
    for (Sequence* fork : forks) fork->state_slot = *slots->Allocate();
    if (absl::StatusOr<SlotId> own = slots->Allocate(); own.ok()) {
      seq.state_slot = *own;
      seq.state_source = source;
    } else {
      // The snapshot was the last slot to be had: it would have been dropped for any other.
      slots->Adopt(source);
      seq.state_slot = source;
    }
  }
  seq.blocks = pool.AcquirePrefix(absl::MakeConstSpan(seq.hashes).first(num_blocks));
  seq.num_indexed = num_blocks;
  seq.num_computed = num_blocks * block_size;
  return absl::OkStatus();
}

void ForkState(const Sequence& trunk, Sequence& fork, BlockPool& pool) {
  if (pool.state_slots() == nullptr) return;
  FERRY_CHECK(trunk.state_source == kNoSlot) << "the trunk has not started";
  pool.state_slots()->Hold(trunk.state_slot);
  fork.state_source = trunk.state_slot;
}

int32_t SnapshotPolicy::ChunkEnd(int32_t start, int32_t end, int32_t num_known) const {
  if (every_blocks == 0) return end;
  const int64_t period = int64_t{every_blocks} * block_size;
  const int64_t next = (start / period + 1) * period;
  const int32_t last = LastBoundary(num_known, block_size);
  if (last > start) end = std::min(end, last);
  return static_cast<int32_t>(std::min<int64_t>(end, next));
}

PendingSnapshot SnapshotPolicy::Take(const Sequence& seq, bool decoding, PlanBuilder& builder,
                                     BlockPool& pool) const {
  const int32_t num_tokens = seq.num_computed;
  if (every_blocks == 0 || num_tokens % block_size != 0) return {};
  const bool periodic = num_tokens % (int64_t{every_blocks} * block_size) == 0;
  const bool last = num_tokens == LastBoundary(static_cast<int32_t>(seq.tokens.size()), block_size);
  if (!periodic && !last && !decoding) return {};
  const auto block = static_cast<size_t>(num_tokens / block_size - 1);
  // The hash of a block that has just been decoded is not known yet: Keep looks again.
  if (block < seq.hashes.size() && pool.state_slots()->HasSnapshot(seq.hashes[block])) return {};
  const absl::StatusOr<SlotId> slot = pool.state_slots()->Allocate();
  if (!slot.ok()) return {};  // running sequences come first
  builder.AddSnapshot(*slot);
  return {.slot = *slot, .num_tokens = num_tokens, .newest = decoding && !periodic};
}

void SnapshotPolicy::Keep(Sequence& seq, const PendingSnapshot& pending, BlockPool& pool) const {
  if (pending.slot == kNoSlot) return;
  const block_hash::BlockHash& hash = seq.hashes.at(pending.num_tokens / block_size - 1);
  const bool known = pool.state_slots()->HasSnapshot(hash);
  pool.AddSnapshot(pending.slot, hash);
  if (!pool.state_slots()->HasSnapshot(hash)) return;  // its block is not cached
  if (seq.newest_snapshot.has_value() && *seq.newest_snapshot != hash) {
    pool.state_slots()->DropSnapshot(*seq.newest_snapshot);
  }
  seq.newest_snapshot.reset();
  if (pending.newest && !known) seq.newest_snapshot = hash;
}

}  // namespace engine
