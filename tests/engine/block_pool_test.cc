#include "engine/block_pool.h"

#include <map>
#include <random>
#include <set>

#include "engine/slot_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engine {
namespace {

using ::block_hash::BlockHash;
using ::testing::ElementsAre;
using ::testing::SizeIs;

BlockHash Hash(int value) {
  BlockHash hash;
  hash.bytes[0] = static_cast<uint8_t>(value);
  return hash;
}

TEST(BlockPoolTest, BlockZeroIsNeverHandedOut) {
  BlockPool pool(4);
  EXPECT_THAT(*pool.Allocate(3), ElementsAre(1, 2, 3));
  EXPECT_EQ(pool.num_available(), 0);
}

TEST(BlockPoolTest, FailedAllocateTakesNothing) {
  BlockPool pool(3);
  const auto refused = pool.Allocate(3);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(), "need 3 cache blocks, 2 are free");
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(BlockPoolTest, AReleasedIndexedBlockIsCachedAndFoundAgain) {
  BlockPool pool(4);
  const std::vector<BlockId> blocks = *pool.Allocate(2);
  pool.Index(blocks[0], Hash(1), Hash(0));
  pool.Release(blocks);
  EXPECT_EQ(pool.num_cached(), 1);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.MatchPrefix({Hash(1), Hash(2)}), 1);
  EXPECT_THAT(pool.AcquirePrefix({Hash(1), Hash(2)}), ElementsAre(blocks[0]));
  EXPECT_EQ(pool.num_cached(), 0);
}

TEST(BlockPoolTest, EvictsTheLeastRecentlyReleasedAndChildrenBeforeParents) {
  BlockPool pool(5);
  const std::vector<BlockId> old_chain = *pool.Allocate(2);
  const std::vector<BlockId> new_chain = *pool.Allocate(2);
  pool.Index(old_chain[0], Hash(1), Hash(0));
  pool.Index(old_chain[1], Hash(2), Hash(1));
  pool.Index(new_chain[0], Hash(3), Hash(0));
  pool.Index(new_chain[1], Hash(4), Hash(3));
  pool.Release(old_chain);
  pool.Release(new_chain);
  pool.TakeEvents();
  EXPECT_THAT(*pool.Allocate(1), ElementsAre(old_chain[1]));
  EXPECT_EQ(pool.MatchPrefix({Hash(1), Hash(2)}), 1);
  const std::vector<BlockEvent> events = pool.TakeEvents();
  ASSERT_THAT(events, SizeIs(1));
  EXPECT_FALSE(events[0].stored);
  EXPECT_EQ(events[0].hash, Hash(2));
}

TEST(BlockPoolTest, ASecondBlockWithTheSameHashStaysPrivate) {
  BlockPool pool(4);
  const std::vector<BlockId> blocks = *pool.Allocate(2);
  pool.Index(blocks[0], Hash(1), Hash(0));
  pool.Index(blocks[1], Hash(1), Hash(0));
  EXPECT_THAT(pool.TakeEvents(), SizeIs(1));
  pool.Release(blocks);
  EXPECT_EQ(pool.num_cached(), 1);
  EXPECT_EQ(pool.num_free(), 2);
}

TEST(BlockPoolTest, ClearIndexFreesCachedBlocksAndKeepsHeldOnes) {
  BlockPool pool(4);
  const std::vector<BlockId> blocks = *pool.Allocate(2);
  pool.Index(blocks[0], Hash(1), Hash(0));
  pool.Index(blocks[1], Hash(2), Hash(1));
  pool.Release({blocks[1]});
  pool.ClearIndex();
  EXPECT_EQ(pool.num_cached(), 0);
  EXPECT_EQ(pool.num_held(), 1);
  pool.Release({blocks[0]});
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(BlockPoolTest, ASnapshotNamesParentsBeforeChildren) {
  BlockPool pool(20);
  const std::vector<BlockId> blocks = *pool.Allocate(10);
  for (int i = 0; i < 10; ++i) pool.Index(blocks[i], Hash(i + 1), Hash(i));
  std::set<BlockHash> seen = {Hash(0)};
  for (const BlockEvent& event : pool.IndexedBlocks()) {
    EXPECT_TRUE(seen.contains(event.parent));
    seen.insert(event.hash);
  }
  EXPECT_THAT(seen, SizeIs(11));
}

TEST(BlockPoolDeathTest, ReleasingAFreeBlockIsABug) {
  BlockPool pool(2);
  EXPECT_DEATH(pool.Release({1}), "block 1 is not held");
}

// Long random histories against a naive model: holders per block, and the index as events tell it.
TEST(BlockPoolTest, AgreesWithANaiveModelOverRandomHistories) {
  constexpr int kBlocks = 12;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    BlockPool pool(kBlocks);
    std::map<BlockId, int> holders;
    std::set<BlockHash> index;
    std::vector<std::vector<BlockId>> held;
    for (int step = 0; step < 2000; ++step) {
      int used = 0;
      for (const auto& [id, count] : holders) used += count > 0;
      switch (random() % 4) {
        case 0: {
          const int count = random() % 4;
          auto taken = pool.Allocate(count);
          ASSERT_EQ(taken.ok(), used + count <= kBlocks - 1);
          if (!taken.ok()) break;
          for (const BlockId id : *taken) ASSERT_EQ(holders[id]++, 0);
          held.push_back(*std::move(taken));
          break;
        }
        case 1: {
          if (held.empty()) break;
          const size_t pick = random() % held.size();
          for (const BlockId id : held[pick]) --holders[id];
          pool.Release(held[pick]);
          held.erase(held.begin() + pick);
          break;
        }
        case 2: {
          if (held.empty() || held.back().empty()) break;
          const int hash = 1 + random() % 30;
          pool.Index(held.back()[random() % held.back().size()], Hash(hash), Hash(hash - 1));
          break;
        }
        case 3: {
          const int first = 1 + random() % 30;
          const std::vector<BlockHash> chain = {Hash(first), Hash(first + 1)};
          const int expected =
              !index.contains(chain[0]) ? 0 : 1 + static_cast<int>(index.contains(chain[1]));
          ASSERT_EQ(pool.MatchPrefix(chain), expected);
          std::vector<BlockId> got = pool.AcquirePrefix(chain);
          ASSERT_THAT(got, SizeIs(expected));
          for (const BlockId id : got) ++holders[id];
          held.push_back(std::move(got));
          break;
        }
      }
      for (const BlockEvent& event : pool.TakeEvents()) {
        ASSERT_EQ(event.stored ? index.insert(event.hash).second : index.erase(event.hash) == 1,
                  true);
      }
      used = 0;
      for (const auto& [id, count] : holders) {
        ASSERT_EQ(pool.num_holders(id), count);
        used += count > 0;
      }
      ASSERT_EQ(pool.num_held(), used);
      ASSERT_EQ(pool.IndexedBlocks().size(), index.size());
    }
  }
}

TEST(SlotPoolTest, HandsOutEverySlotOnce) {
  SlotPool pool(2);
  EXPECT_EQ(*pool.Allocate(), 0);
  EXPECT_EQ(*pool.Allocate(), 1);
  EXPECT_EQ(pool.Allocate().status().code(), absl::StatusCode::kResourceExhausted);
  pool.Release(0);
  EXPECT_EQ(*pool.Allocate(), 0);
  EXPECT_DEATH(pool.Release(5), "slot 5 is not taken");
}

}  // namespace
}  // namespace engine
