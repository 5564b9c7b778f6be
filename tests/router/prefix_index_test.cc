#include "router/prefix_index.h"

#include "gtest/gtest.h"
#include "tests/router/kv_frames.h"

namespace router {
namespace {

using Applied = PrefixIndex::Applied;

constexpr absl::Duration kStale = absl::Seconds(5);
constexpr absl::Duration kTtl = absl::Seconds(3);
const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1);

class PrefixIndexTest : public testing::Test {
 protected:
  PrefixIndex index_{{.stale_after = kStale, .predicted_ttl = kTtl, .max_predicted = 1000}};
};

TEST_F(PrefixIndexTest, FindsTheLongestPrefixOfEachWorker) {
  index_.StartWorker(0, "a", 100);
  index_.StartWorker(70, "b", 100);  // in the second word of the sets
  index_.Apply(0, Live("a", 1, {Stored(1), Stored(2)}), kStart);
  index_.Apply(70, Live("b", 1, {Stored(1), Stored(2), Stored(3), Stored(5)}), kStart);
  const std::vector<int32_t> matched = index_.Lookup(Chain({1, 2, 3, 4, 5}), kStart);
  EXPECT_EQ(matched[0], 2);
  EXPECT_EQ(matched[70], 3);
  EXPECT_EQ(matched[1], 0);
  EXPECT_EQ(index_.Lookup(Chain({1, 2, 3}), kStart)[70], 3) << "the whole chain";
  EXPECT_EQ(index_.num_entries(), 6u);
}

TEST_F(PrefixIndexTest, APrefixOfAModelWithStateEndsWhereAPromptCanGoOn) {
  const auto closed = [](int value) {
    Event event = Stored(value);
    event.resumable = false;
    return event;
  };
  index_.StartWorker(0, "a", 4, /*keeps_state=*/true);
  index_.StartWorker(1, "b", 100);
  index_.Apply(0, Live("a", 1, {closed(1), closed(2), closed(3), closed(4)}), kStart);
  index_.Apply(1, Live("b", 1, {Stored(1), Stored(2), Stored(3), Stored(4)}), kStart);
  const auto matched = [&](std::initializer_list<int> chain) {
    return index_.Lookup(Chain(chain), kStart)[0];
  };
  EXPECT_EQ(matched({1, 2, 3, 4}), 0);
  index_.Apply(0, Live("a", 2, {Stored(2), Stored(4)}), kStart);  // a full worker's block, again
  EXPECT_EQ(matched({1, 2, 3, 4, 5}), 4);
  EXPECT_EQ(matched({1, 2, 3}), 2);
  EXPECT_EQ(matched({1}), 0);
  index_.Apply(0, Live("a", 3, {closed(4), Removed(3)}), kStart);
  EXPECT_EQ(matched({1, 2, 3, 4}), 2);
  EXPECT_EQ(index_.Lookup(Chain({1, 2, 3, 4}), kStart)[1], 4) << "another worker's are its own";

  Frame snapshot = Live("a", 9, {closed(5), Stored(6)});
  snapshot.snapshot = snapshot.snapshot_end = true;
  index_.Apply(0, snapshot, kStart);
  EXPECT_EQ(matched({5, 6}), 2);
  EXPECT_EQ(matched({5}), 0);
}

TEST_F(PrefixIndexTest, AGapChangesNothingAndAsksForTheMissingFrame) {
  index_.StartWorker(0, "a", 100);
  EXPECT_EQ(index_.next_seq(0), 1u);
  EXPECT_EQ(index_.Apply(0, Live("a", 1, {Stored(1)}), kStart), Applied::kApplied);
  EXPECT_EQ(index_.Apply(0, Live("a", 3, {Removed(1)}), kStart), Applied::kGap);
  EXPECT_EQ(index_.next_seq(0), 2u);
  EXPECT_EQ(index_.Lookup(Chain({1}), kStart)[0], 1);
  EXPECT_EQ(index_.Apply(0, Heartbeat("a", 3), kStart), Applied::kGap) << "frames lost at the end";
  EXPECT_EQ(index_.num_gaps(), 2);
}

TEST_F(PrefixIndexTest, FramesSeenBeforeAndUnknownRemovalsChangeNothing) {
  index_.StartWorker(0, "a", 100);
  index_.Apply(0, Live("a", 1, {Stored(1), Removed(9)}), kStart);
  index_.Apply(0, Live("a", 2, {Stored(2)}), kStart);
  EXPECT_EQ(index_.Apply(0, Live("a", 1, {Removed(1)}), kStart), Applied::kApplied);
  EXPECT_EQ(index_.Lookup(Chain({1, 2}), kStart)[0], 2);
}

TEST_F(PrefixIndexTest, ASnapshotReplacesTheViewOnlyWhenItIsComplete) {
  index_.StartWorker(0, "a", 100);
  index_.Apply(0, Live("a", 1, {Stored(1), Stored(2)}), kStart);
  Frame begin = Live("a", 9, {Stored(2)});
  begin.snapshot = true;
  EXPECT_EQ(index_.Apply(0, begin, kStart), Applied::kApplied);
  EXPECT_EQ(index_.Lookup(Chain({1, 2}), kStart)[0], 2) << "half a snapshot is not believed";
  Frame end = Live("a", 9, {Stored(3)});
  end.snapshot = end.snapshot_end = true;
  index_.Apply(0, end, kStart);
  EXPECT_EQ(index_.Lookup(Chain({1}), kStart)[0], 0);
  EXPECT_EQ(index_.Lookup(Chain({2, 3}), kStart)[0], 2);
  EXPECT_EQ(index_.next_seq(0), 10u);
}

TEST_F(PrefixIndexTest, ASnapshotThatBrokeOffLeavesNothing) {
  index_.StartWorker(0, "a", 100);
  index_.Apply(0, Live("a", 1, {Stored(1)}), kStart);
  Frame half = Live("a", 9, {Stored(2), Stored(3)});
  half.snapshot = true;
  index_.Apply(0, half, kStart);
  // The stream was opened again.  The log reaches back after all:
  EXPECT_EQ(index_.Apply(0, Live("a", 2, {Removed(1), Stored(4)}), kStart), Applied::kApplied);
  EXPECT_EQ(index_.Lookup(Chain({1}), kStart)[0], 0);
  EXPECT_EQ(index_.Lookup(Chain({4}), kStart)[0], 1);
  EXPECT_EQ(index_.next_seq(0), 3u);
  // Or the next snapshot is another one:
  index_.Apply(0, half, kStart);
  Frame whole = Live("a", 12, {Stored(5)});
  whole.snapshot = whole.snapshot_end = true;
  index_.Apply(0, whole, kStart);
  EXPECT_EQ(index_.Lookup(Chain({2}), kStart)[0], 0) << "of the first half";
  EXPECT_EQ(index_.Lookup(Chain({5}), kStart)[0], 1);
  EXPECT_EQ(index_.num_entries(), 1u);
}

// A frame is as cheap whatever it is full of, and so are the lookups behind it.
TEST_F(PrefixIndexTest, AFrameFullOfClearingsIsOne) {
  const Event cleared = {.kind = Event::Kind::kCleared, .hash = {}};
  index_.StartWorker(0, "a", 3000);
  index_.Apply(0, Live("a", 1, {Stored(1), Stored(2)}), kStart);
  for (uint64_t seq = 2; seq < 50; ++seq) {
    std::vector<Event> events;
    for (int i = 0; i < 1000; ++i) {
      events.push_back(cleared);
      if (seq % 2 == 0) events.push_back(Stored(i));
    }
    events.push_back(Stored(static_cast<int>(seq)));
    index_.Apply(0, Live("a", seq, events), kStart);
    EXPECT_EQ(index_.Lookup(Chain({static_cast<int>(seq)}), kStart)[0], 1);
    EXPECT_EQ(index_.Lookup(Chain({static_cast<int>(seq) - 1}), kStart)[0], 0);
    EXPECT_LE(index_.num_entries(), 2u);
  }
  EXPECT_LE(index_.num_views(), 8u);
}

// What a worker had goes out of sight at once, out of memory little by little, and its place in the
// map is used again.
TEST_F(PrefixIndexTest, ManyLivesOfAWorkerTakeTheRoomOfAFew) {
  constexpr int kBlocks = 3000;
  const auto life = [&](int number, bool clear) {
    const std::string epoch = "life " + std::to_string(number);
    index_.StartWorker(0, epoch, kBlocks);
    std::vector<Event> events;
    for (int i = 0; i < kBlocks; ++i) events.push_back(Stored(i));
    index_.Apply(0, Live(epoch, 1, events), kStart);
    EXPECT_EQ(index_.Lookup(Chain({0, 1, 2}), kStart)[0], 3);
    if (!clear) return;
    Event cleared;
    cleared.kind = Event::Kind::kCleared;
    index_.Apply(0, Live(epoch, 2, {cleared, Stored(1)}), kStart);
    EXPECT_EQ(index_.num_entries(), 1u);
    EXPECT_GT(index_.num_retired(), 0u) << "nothing is left to be taken out later";
    EXPECT_EQ(index_.Lookup(Chain({0, 1}), kStart)[0], 0);
    EXPECT_EQ(index_.Lookup(Chain({1, 2}), kStart)[0], 1);
  };
  life(0, true);
  life(1, false);
  const size_t bytes = index_.approximate_bytes();
  for (int number = 2; number < 100; ++number) life(number, number % 2 == 0);
  EXPECT_LE(index_.approximate_bytes(), 2 * bytes);
  index_.DropWorker(0);
  EXPECT_EQ(index_.num_entries(), 0u);
  for (int i = 0; i < 100; ++i) index_.Lookup(Chain({0}), kStart);
  EXPECT_EQ(index_.num_retired(), 0u);
}

TEST_F(PrefixIndexTest, ANewEpochDropsEverythingOfTheOld) {
  index_.StartWorker(0, "a", 100);
  index_.Apply(0, Live("a", 1, {Stored(1)}), kStart);
  index_.Predict(0, Chain({2}), 1, kStart);
  index_.StartWorker(0, "b", 100);
  EXPECT_EQ(index_.num_entries(), 0u);
  EXPECT_EQ(index_.num_predicted(), 0u);
  EXPECT_EQ(index_.next_seq(0), 1u);
  EXPECT_EQ(index_.Apply(0, Live("a", 2, {Stored(7)}), kStart), Applied::kOtherEpoch);
  EXPECT_EQ(index_.Apply(0, Heartbeat("b", 0), kStart), Applied::kApplied);
  EXPECT_EQ(index_.Lookup(Chain({7}), kStart)[0], 0);
}

TEST_F(PrefixIndexTest, AStaleWorkerGetsNoCreditUntilItSpeaksAgain) {
  index_.StartWorker(0, "a", 100);
  index_.Apply(0, Live("a", 1, {Stored(1)}), kStart);
  EXPECT_EQ(index_.Lookup(Chain({1}), kStart + kStale)[0], 1);
  const absl::Time later = kStart + kStale + absl::Milliseconds(1);
  EXPECT_EQ(index_.Lookup(Chain({1}), later)[0], 0);
  EXPECT_EQ(index_.num_untrusted(later), 1);
  index_.Apply(0, Heartbeat("a", 1), later);
  EXPECT_EQ(index_.Lookup(Chain({1}), later)[0], 1);
}

TEST_F(PrefixIndexTest, PredictionsCountUntilTheyExpireOrAreConfirmed) {
  index_.StartWorker(0, "a", 100);
  index_.Apply(0, Heartbeat("a", 0), kStart);
  index_.Predict(0, Chain({1, 2}), 2, kStart);
  EXPECT_EQ(index_.Lookup(Chain({1, 2, 3}), kStart)[0], 2);
  index_.Apply(0, Live("a", 1, {Stored(1)}), kStart + absl::Seconds(1));
  EXPECT_EQ(index_.Lookup(Chain({1, 2}), kStart + kTtl)[0], 1) << "2 was never announced";
  EXPECT_EQ(index_.num_predicted(), 0u);
}

// Of a model with state only the last boundary before a prompt's end is foreseen.
TEST_F(PrefixIndexTest, APredictedPrefixOfAModelWithStateEndsAtItsSnapshot) {
  const auto closed = [](int value) {
    Event event = Stored(value);
    event.resumable = false;
    return event;
  };
  index_.StartWorker(0, "a", 100, /*keeps_state=*/true);
  index_.Apply(0, Heartbeat("a", 0), kStart);
  const auto matched = [&](std::initializer_list<int> chain, absl::Time now = kStart) {
    return index_.Lookup(Chain(chain), now)[0];
  };
  index_.Predict(0, Chain({1, 2, 3}), 2, kStart);  // the last token is that of block 3
  EXPECT_EQ(matched({1, 2, 3, 4}), 2);
  EXPECT_EQ(matched({1, 2}), 2);
  EXPECT_EQ(matched({1}), 0) << "before the snapshot";
  EXPECT_EQ(matched({1, 7}), 0);
  // A longer prompt with the same beginning takes nothing from it, a shorter one neither.
  index_.Predict(0, Chain({1, 2, 3, 4}), 4, kStart);
  index_.Predict(0, Chain({1}), 0, kStart);
  EXPECT_EQ(matched({1, 2, 9}), 2);
  EXPECT_EQ(matched({1, 2, 3, 4, 5}), 4);
  EXPECT_EQ(matched({1, 2, 3, 9}), 2);
  // The worker has told of the blocks, and not yet of the snapshot behind them.
  index_.Apply(0, Live("a", 1, {closed(1), closed(2), closed(3)}), kStart);
  EXPECT_EQ(matched({1, 2, 3}), 2);
  // When the predictions are over only what was told counts.
  const absl::Time later = kStart + kTtl;
  index_.Apply(0, Heartbeat("a", 1), later);
  EXPECT_EQ(matched({1, 2, 3, 4}, later), 0);
  EXPECT_EQ(index_.num_predicted(), 0u);
  // A known block without a snapshot will soon have one.
  index_.Predict(0, Chain({1, 2}), 2, later);
  EXPECT_EQ(matched({1, 2, 3}, later), 2);
  index_.Apply(0, Live("a", 2, {Stored(2)}), later);
  EXPECT_EQ(matched({1, 2, 3}, later + kTtl), 2);
}

TEST_F(PrefixIndexTest, IsBoundedByTheWorkersBlocksAndThePredictionLimit) {
  index_.StartWorker(0, "a", 3);
  std::vector<Event> many;
  for (int value = 0; value < 50; ++value) many.push_back(Stored(value));
  index_.Apply(0, Live("a", 1, many), kStart);
  EXPECT_EQ(index_.num_entries(), 3u);
  for (int round = 0; round < 50; ++round) {
    std::vector<BlockHash> chain;
    for (int i = 0; i < 100; ++i) chain.push_back(Hash(1000 + round * 100 + i));
    index_.Predict(0, chain, chain.size(), kStart);
  }
  EXPECT_LE(index_.num_predicted(), 1000u);
}

}  // namespace
}  // namespace router
