#include "worker/kv_event_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace worker {
namespace {

block_hash::BlockHash Hash(uint32_t n) {
  block_hash::BlockHash hash;
  for (int i = 0; i < 4; ++i) hash.bytes[i] = static_cast<uint8_t>(n >> (8 * i));
  return hash;
}

engine::BlockEvent Stored(uint32_t n, uint32_t parent) {
  return {.stored = true, .hash = Hash(n), .parent = Hash(parent)};
}
engine::BlockEvent Removed(uint32_t n) { return {.stored = false, .hash = Hash(n), .parent = {}}; }

// What a router knows after reading frames, and up to which one.
struct Reader {
  std::map<block_hash::BlockHash, block_hash::BlockHash> known;
  uint64_t next_seq = 0;

  void Read(const KvEventLog& log) {
    for (const KvEventLog::Frame& frame : log.Read(next_seq)) {
      if (frame.snapshot) {
        known.clear();
      } else if (next_seq > 0) {
        EXPECT_EQ(frame.seq, next_seq);
      }
      for (const engine::BlockEvent& event : frame.events) {
        if (event.stored) {
          known[event.hash] = event.parent;
        } else {
          known.erase(event.hash);
        }
      }
      next_seq = frame.seq + 1;
    }
  }
};

TEST(KvEventLogTest, FramesAreNumberedFromOneAndReplayed) {
  KvEventLog log;
  EXPECT_TRUE(log.Read(0).empty());
  log.Append({});
  EXPECT_EQ(log.last_seq(), 0u);
  log.Append({Stored(1, 0)});
  log.Append({Stored(2, 1), Removed(1)});
  const auto frames = log.Read(1);
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0].seq, 1u);
  EXPECT_EQ(frames[1].seq, 2u);
  EXPECT_EQ(frames[1].events.size(), 2u);
  EXPECT_FALSE(frames[1].snapshot);
  EXPECT_EQ(log.Read(2).size(), 1u);
  EXPECT_TRUE(log.Read(3).empty());
}

TEST(KvEventLogTest, WhatTheRingHasLostComesAsASnapshot) {
  KvEventLog log(/*ring_frames=*/2);
  for (uint32_t n = 1; n <= 4; ++n) log.Append({Stored(n, n - 1)});
  log.Append({Removed(4)});
  const auto frames = log.Read(1);
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_TRUE(frames[0].snapshot);
  EXPECT_EQ(frames[0].seq, 5u);
  EXPECT_EQ(frames[0].events.size(), 3u);
  EXPECT_EQ(log.Read(4).size(), 2u);  // still in the ring
}

// A small cache whose blocks come and go for ever.
TEST(KvEventLogTest, TheRingHoldsNoMoreThanIsWorthReplaying) {
  KvEventLog log;
  uint32_t n = 0;
  const auto churn = [&](size_t blocks, size_t frames) {
    for (size_t i = 0; i < frames; ++i) {
      ++n;
      log.Append({Stored(n, 0)});
      if (n > blocks) log.Append({Removed(n - blocks)});
    }
  };
  churn(/*blocks=*/50, 20'000);
  constexpr uint64_t kLeast = KvEventLog::kLeastReplayed;
  EXPECT_EQ(log.Read(log.last_seq() - kLeast + 1).size(), kLeast);
  const auto beyond = log.Read(log.last_seq() - kLeast);
  ASSERT_EQ(beyond.size(), 1u);
  EXPECT_TRUE(beyond[0].snapshot);
  EXPECT_EQ(beyond[0].events.size(), 50u);
  // Where a snapshot is larger, so is the ring.
  log.Append({Stored(0, 0)});
  for (uint32_t i = 0; i < 3000; ++i) log.Append({Stored(1'000'000 + i, 0)});
  EXPECT_EQ(log.Read(log.last_seq() - 2999).size(), 3000u);
}

TEST(KvEventLogTest, ANumberFromTheFutureGetsTheWholeTruth) {
  KvEventLog log;
  log.Append({Stored(1, 0)});
  const auto frames = log.Read(10);
  ASSERT_EQ(frames.size(), 1u);
  EXPECT_TRUE(frames[0].snapshot);
  EXPECT_EQ(frames[0].seq, 1u);
}

TEST(KvEventLogTest, SnapshotHasParentsBeforeChildrenAlsoWhenTheParentCameBackLater) {
  KvEventLog log(/*ring_frames=*/1);
  log.Append({Stored(1, 0), Stored(2, 1), Stored(3, 2)});
  log.Append({Removed(1)});
  log.Append({Stored(1, 0)});
  const auto frames = log.Read(1);
  ASSERT_EQ(frames.size(), 1u);
  std::vector<block_hash::BlockHash> order;
  for (const auto& event : frames[0].events) order.push_back(event.hash);
  EXPECT_THAT(order, testing::ElementsAre(Hash(1), Hash(2), Hash(3)));
}

TEST(KvEventLogTest, SubscribersAreWokenUntilTheyLeave) {
  KvEventLog log;
  int woken = 0;
  const int64_t id = log.Subscribe([&] {
    ++woken;
    EXPECT_EQ(log.Read(log.last_seq()).size(), 1u);  // reading is allowed
  });
  log.Append({Stored(1, 0)});
  log.Append({});
  log.Unsubscribe(id);
  log.Append({Stored(2, 1)});
  EXPECT_EQ(woken, 1);
}

// Readers of every laziness agree with a plain map over a long random history.
TEST(KvEventLogTest, EveryReaderEndsWithTheSameSet) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  KvEventLog log(/*ring_frames=*/16);
  std::map<block_hash::BlockHash, block_hash::BlockHash> truth;
  Reader readers[4];
  const int periods[4] = {1, 7, 20, 100};
  for (int step = 1; step <= 1000; ++step) {
    std::vector<engine::BlockEvent> events;
    for (int i = random() % 4; i > 0; --i) {
      const uint32_t n = 1 + random() % 50;
      const uint32_t parent = random() % n;
      events.push_back(random() % 3 == 0 ? Removed(n) : Stored(n, parent));
      if (events.back().stored) {
        truth[events.back().hash] = events.back().parent;
      } else {
        truth.erase(events.back().hash);
      }
    }
    log.Append(std::move(events));
    for (int i = 0; i < 4; ++i) {
      if (step % periods[i] != 0) continue;
      readers[i].Read(log);
      ASSERT_EQ(readers[i].known, truth) << "reader " << i << " at step " << step;
    }
  }
}

}  // namespace
}  // namespace worker
