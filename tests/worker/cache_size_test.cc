#include "worker/cache_size.h"

#include <gtest/gtest.h>

#include <limits>

namespace worker {
namespace {

constexpr int64_t kBlock = 1000;
constexpr int64_t kSlot = 15500;

WorkerOptions Options(int64_t cache_bytes) {
  WorkerOptions options;
  options.cache_bytes = cache_bytes;
  options.engine.limits.max_seqs = 4;
  return options;
}

TEST(CacheSizeTest, WithoutStateAllMemoryIsBlocks) {
  const auto size = CacheSize::For(Options(10500), kBlock, 0);
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(size->num_blocks, 10);
  EXPECT_EQ(size->num_state_slots, 0);
  EXPECT_EQ(size->snapshot_blocks, 0);
  EXPECT_EQ(CacheSize::For(Options(1999), kBlock, 0).status().message(),
            "--cache_bytes: 1999 bytes hold 0 blocks of 1000 bytes, 1 to 2147483646 are possible");
}

TEST(CacheSizeTest, SlotsTakeWhatSequencesAndSnapshotsNeedButNotMoreThanHalf) {
  // 500 blocks in a half, a snapshot every 16: 4 + 32 slots would be 558000 bytes.
  auto size = CacheSize::For(Options(1000 * kBlock), kBlock, kSlot);
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(size->snapshot_blocks, 16);
  EXPECT_EQ(size->num_state_slots, 500000 / kSlot);  // slot 0 included
  EXPECT_EQ(size->num_blocks, (1000000 - 32 * kSlot) / kBlock);
  // Small slots: as many as are of use, the rest is blocks.
  size = CacheSize::For(Options(1000 * kBlock), kBlock, 100);
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(size->snapshot_blocks, 1);
  EXPECT_EQ(size->num_state_slots, 1 + 4 + 500);
  EXPECT_EQ(size->num_blocks, (1000000 - 505 * 100) / kBlock);
  for (const int64_t slot : {int64_t{8}, int64_t{100}, kSlot, int64_t{200000}}) {
    size = CacheSize::For(Options(1000 * kBlock), kBlock, slot);
    ASSERT_TRUE(size.ok()) << size.status();
    EXPECT_LE(size->num_blocks * kBlock + size->num_state_slots * slot, 1000 * kBlock);
    EXPECT_GE(size->num_blocks * kBlock, 499 * kBlock);
  }
}

TEST(CacheSizeTest, WhatCannotBeIsToldByItsFlag) {
  WorkerOptions options = Options(10500);
  options.num_blocks = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(CacheSize::For(options, kBlock, 0).status().message(),
            "--num_blocks: 2147483647 is more than 2147483646");
  options.num_blocks = 0;
  options.num_state_slots = 7;
  EXPECT_EQ(CacheSize::For(options, kBlock, 0).status().message(),
            "--num_state_slots: 7 is given, but this model keeps no state per sequence: leave the "
            "flag out");
  options.num_blocks = std::numeric_limits<int32_t>::max() - 1;
  options.num_state_slots = 0;
  options.snapshot_blocks = 1;
  EXPECT_EQ(
      CacheSize::For(options, kBlock, kSlot).status().message(),
      "--num_blocks: 2147483646 blocks with a snapshot every 1 want 2147483650 state slots, at "
      "most 2147483646 are possible");
}

TEST(CacheSizeTest, FlagsWin) {
  WorkerOptions options = Options(1000 * kBlock);
  options.num_blocks = 70;
  auto size = CacheSize::For(options, kBlock, kSlot);
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(size->num_blocks, 71);
  EXPECT_EQ(size->num_state_slots, 1 + 4 + 5);  // sequences, and 70 blocks by 16
  options.num_state_slots = 3;
  options.snapshot_blocks = 2;
  size = CacheSize::For(options, kBlock, kSlot);
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(size->num_blocks, 71);
  EXPECT_EQ(size->num_state_slots, 4);
  EXPECT_EQ(size->snapshot_blocks, 2);
  options.num_blocks = 0;
  size = CacheSize::For(options, kBlock, kSlot);
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(size->num_blocks, (1000000 - 4 * kSlot) / kBlock);
}

TEST(CacheSizeTest, TooLittleIsSaidWithItsSizes) {
  EXPECT_EQ(CacheSize::For(Options(40000), kBlock, kSlot).status().message(),
            "--cache_bytes: 40000 bytes hold 0 state slots of 15500 bytes in their half, 1 to "
            "2147483646 are possible");
  WorkerOptions options = Options(63000);
  options.num_state_slots = 3;
  EXPECT_EQ(CacheSize::For(options, kBlock, kSlot).status().message(),
            "--cache_bytes: 63000 bytes hold 0 blocks of 1000 bytes beside 3 state slots of 15500, "
            "1 to 2147483646 are possible");
}

}  // namespace
}  // namespace worker
