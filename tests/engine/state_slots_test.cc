#include "engine/state_slots.h"

#include <algorithm>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "engine/block_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engine {
namespace {

using ::block_hash::BlockHash;
using ::testing::ElementsAre;

BlockHash Hash(int value) {
  BlockHash hash;
  hash.bytes[0] = static_cast<uint8_t>(value);
  hash.bytes[1] = static_cast<uint8_t>(value >> 8);
  return hash;
}

class StateSlotsTest : public testing::Test {
 protected:
  StateSlots Make(int32_t usable) {
    return StateSlots(usable + 1, [this](const BlockHash& hash) { dropped_.push_back(hash); });
  }
  std::vector<BlockHash> dropped_;
};

TEST_F(StateSlotsTest, HandsOutEverySlotOnceAndNeverTheZeroSlot) {
  StateSlots slots = Make(2);
  EXPECT_EQ(*slots.Allocate(), 1);
  EXPECT_EQ(*slots.Allocate(), 2);
  const auto refused = slots.Allocate();
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(), "all 2 state slots are taken");
  slots.Release(1);
  EXPECT_EQ(*slots.Allocate(), 1);
  slots.Hold(kZeroSlot);
  slots.Release(kZeroSlot);
  EXPECT_EQ(slots.num_held(), 2);
}

TEST_F(StateSlotsTest, ASlotReturnsWithItsLastHolder) {
  StateSlots slots = Make(1);
  const SlotId slot = *slots.Allocate();
  slots.Hold(slot);
  slots.Release(slot);
  EXPECT_EQ(slots.num_free(), 0);
  slots.Release(slot);
  EXPECT_EQ(slots.num_free(), 1);
  EXPECT_DEATH(slots.Release(slot), "slot 1 is not held");
}

TEST_F(StateSlotsTest, TheSnapshotUsedLongestAgoMakesRoomFirst) {
  StateSlots slots = Make(3);
  for (const int block : {1, 2, 3}) slots.AddSnapshot(*slots.Allocate(), Hash(block));
  EXPECT_EQ(slots.num_snapshots(), 3);
  slots.Release(slots.AcquireSnapshot(Hash(1)));  // used: now the youngest
  const SlotId two = *slots.Allocate();
  EXPECT_THAT(dropped_, ElementsAre(Hash(2)));
  EXPECT_FALSE(slots.HasSnapshot(Hash(2)));
  EXPECT_TRUE(slots.HasSnapshot(Hash(1)));
  slots.Release(two);
  ASSERT_TRUE(slots.Allocate().ok());  // a free one comes before any snapshot
  EXPECT_THAT(dropped_, ElementsAre(Hash(2)));
  EXPECT_EQ(slots.snapshots_dropped(), 1);
  EXPECT_EQ(slots.snapshots_taken(), 3);
}

TEST_F(StateSlotsTest, AHeldSnapshotIsNotDroppedForRoom) {
  StateSlots slots = Make(1);
  slots.AddSnapshot(*slots.Allocate(), Hash(1));
  const SlotId held = slots.AcquireSnapshot(Hash(1));
  EXPECT_EQ(slots.num_available(), 0);
  EXPECT_FALSE(slots.Allocate().ok());
  // Its block has gone: it is a snapshot no more, but its reader keeps the slot.
  slots.DropSnapshot(Hash(1));
  EXPECT_FALSE(slots.HasSnapshot(Hash(1)));
  EXPECT_FALSE(slots.Allocate().ok());
  slots.Release(held);
  EXPECT_EQ(*slots.Allocate(), held);
}

TEST_F(StateSlotsTest, AnAdoptedSnapshotIsItsHoldersAlone) {
  StateSlots slots = Make(1);
  slots.AddSnapshot(*slots.Allocate(), Hash(1));
  const SlotId own = slots.AcquireSnapshot(Hash(1));
  slots.Adopt(own);
  EXPECT_THAT(dropped_, ElementsAre(Hash(1)));
  EXPECT_EQ(slots.num_held(), 1);
  slots.Release(own);
  EXPECT_EQ(slots.num_free(), 1);
}

// BlockPool and its slots: what may be reused, and what is told.
class SnapshotPoolTest : public testing::Test {
 protected:
  // A chain of held, indexed blocks 1 .. length; block i has hash base + i.
  std::vector<BlockId> Chain(int32_t length, int base) {
    const std::vector<BlockId> blocks = *pool_.Allocate(length);
    for (int32_t i = 0; i < length; ++i) {
      pool_.Index(blocks[i], Hash(base + i + 1), i == 0 ? Hash(0) : Hash(base + i));
    }
    return blocks;
  }
  static std::vector<BlockHash> Hashes(int32_t length, int base) {
    std::vector<BlockHash> hashes;
    for (int32_t i = 0; i < length; ++i) hashes.push_back(Hash(base + i + 1));
    return hashes;
  }
  void Snapshot(int block) { pool_.AddSnapshot(*pool_.state_slots()->Allocate(), Hash(block)); }
  // "1 2* -3": block 1 stored, block 2 stored and resumable, block 3 removed.
  std::string Told() {
    std::string out;
    for (const BlockEvent& event : pool_.TakeEvents()) {
      absl::StrAppend(&out, out.empty() ? "" : " ", event.stored ? "" : "-", event.hash.bytes[0],
                      event.stored && event.resumable ? "*" : "");
    }
    return out;
  }

  BlockPool pool_{8, 4};  // 7 blocks, 3 slots
};

TEST_F(SnapshotPoolTest, APrefixIsRestorableUpToItsLastSnapshot) {
  Chain(4, 0);
  EXPECT_EQ(pool_.MatchPrefix(Hashes(4, 0)), 4);
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(4, 0)), 0);
  Snapshot(2);
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(4, 0)), 2);
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(2, 0)), 2);
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(1, 0)), 0);
  Snapshot(4);
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(4, 0)), 4);
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(3, 0)), 2);  // a prompt that ends between snapshots
}

TEST_F(SnapshotPoolTest, WhereASequenceCanGoOnIsTold) {
  Chain(3, 0);
  EXPECT_EQ(Told(), "1 2 3");
  Snapshot(2);
  EXPECT_EQ(Told(), "2*");
  pool_.state_slots()->DropSnapshot(Hash(2));
  EXPECT_EQ(Told(), "2");
  BlockPool stateless(4);
  stateless.Index((*stateless.Allocate(1))[0], Hash(1), Hash(0));
  EXPECT_TRUE(stateless.TakeEvents()[0].resumable);
}

TEST_F(SnapshotPoolTest, ASnapshotGoesWithItsBlockAndItsBlockStaysWithoutIt) {
  const std::vector<BlockId> blocks = Chain(3, 0);
  Snapshot(3);
  Told();
  pool_.Release(blocks);
  const std::vector<BlockId> five = *pool_.Allocate(5);  // evicts block 3
  EXPECT_FALSE(pool_.state_slots()->HasSnapshot(Hash(3)));
  EXPECT_EQ(pool_.state_slots()->num_free(), 3);
  EXPECT_EQ(Told(), "-3");
  EXPECT_EQ(pool_.MatchPrefix(Hashes(3, 0)), 2);
  Snapshot(2);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(pool_.state_slots()->Allocate().ok());  // drops it
  EXPECT_EQ(Told(), "2* 2");
  EXPECT_EQ(pool_.MatchPrefix(Hashes(3, 0)), 2);
  EXPECT_EQ(pool_.num_cached(), 2);
}

TEST_F(SnapshotPoolTest, ASnapshotOfAnUnindexedOrSnappedBlockIsOnlyReleased) {
  Snapshot(9);
  EXPECT_EQ(pool_.state_slots()->num_free(), 3);
  Chain(1, 0);
  Snapshot(1);
  Snapshot(1);
  EXPECT_EQ(pool_.state_slots()->num_free(), 2);
  EXPECT_EQ(pool_.state_slots()->num_snapshots(), 1);
}

TEST_F(SnapshotPoolTest, AChainThatLosesAMiddleBlockIsNotRestorableBehindIt) {
  // Another sequence's private copy of block 2 may keep block 3 held while block 2 is evicted.
  const std::vector<BlockId> blocks = Chain(3, 0);
  Snapshot(1);
  Snapshot(3);
  pool_.Release({blocks[1]});
  pool_.Release({blocks[0]});
  const std::vector<BlockId> rest = *pool_.Allocate(5);  // the four free ones, and block 2
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(3, 0)), 1);
  pool_.Index(rest[0], Hash(2), Hash(1));
  EXPECT_EQ(pool_.RestorablePrefix(Hashes(3, 0)), 3);
  pool_.ClearIndex();
  EXPECT_EQ(pool_.state_slots()->num_free(), 3);
}

// What is told, applied to a map, always is exactly what is indexed and has a snapshot.
TEST(SnapshotEventsTest, LongHistoriesTellExactlyWhatIsThere) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  BlockPool pool(20, 8);
  // A tree of 40 possible blocks: block i's parent is i / 2; 0 is the root.
  const auto parent = [](int i) { return i / 2; };
  std::map<int, BlockId> held;
  std::map<int, bool> told;  // resumable, by block
  for (int step = 0; step < 4000; ++step) {
    const int block = 1 + static_cast<int>(random() % 40);
    switch (random() % 4) {
      case 0:
      case 1:
        if (!held.contains(block)) {
          const auto taken = pool.Allocate(1);
          if (!taken.ok()) break;
          held[block] = taken->front();
          pool.Index(held[block], Hash(block), Hash(parent(block)));
        }
        break;
      case 2:
        if (!held.empty()) {
          const auto it = std::next(held.begin(), static_cast<int64_t>(random() % held.size()));
          pool.Release({it->second});
          held.erase(it);
        }
        break;
      case 3:
        if (const auto slot = pool.state_slots()->Allocate(); slot.ok()) {
          pool.AddSnapshot(*slot, Hash(block));
        }
        break;
    }
    for (const BlockEvent& event : pool.TakeEvents()) {
      const int hash = event.hash.bytes[0];
      if (event.stored) {
        told[hash] = event.resumable;
      } else {
        ASSERT_EQ(told.erase(hash), 1u) << "block " << hash;
      }
    }
    std::map<int, bool> there;
    for (const BlockEvent& event : pool.IndexedBlocks()) {
      there[event.hash.bytes[0]] = event.resumable;
    }
    ASSERT_EQ(told, there);
    for (int i = 1; i <= 40; ++i) {
      const bool resumable = there.contains(i) && there[i];
      ASSERT_EQ(pool.state_slots()->HasSnapshot(Hash(i)), resumable) << "block " << i;
    }
    const StateSlots& slots = *pool.state_slots();
    ASSERT_EQ(slots.num_free() + slots.num_snapshots() + slots.num_held(), 7);
    ASSERT_EQ(slots.num_held(), 0);
  }
}

}  // namespace
}  // namespace engine
