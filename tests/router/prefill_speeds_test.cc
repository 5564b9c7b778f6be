#include "router/prefill_speeds.h"

#include <string>

#include "gtest/gtest.h"

namespace router {
namespace {

constexpr WorkerSlot kSlot = 3;
const std::string kEpoch = "first life";
constexpr absl::Duration kPrompt = absl::Milliseconds(100);  // predicted for each

class PrefillSpeedsTest : public ::testing::Test {
 protected:
  // One prompt after the other, each `ratio` times as long as predicted.
  void Compute(int prompts, double ratio) {
    for (int i = 0; i < prompts; ++i) {
      now_ += kPrompt * ratio;
      speeds_.Observe(kSlot, kEpoch, kPrompt, kPrompt * ratio, now_);
    }
  }
  double slowdown() const { return speeds_.slowdown(kSlot, kEpoch, now_); }

  absl::Time now_ = absl::UnixEpoch();
  PrefillSpeeds speeds_;
};

TEST_F(PrefillSpeedsTest, AWorkerOfWhichNothingIsKnownIsAsItSaid) { EXPECT_EQ(slowdown(), 1); }

TEST_F(PrefillSpeedsTest, AWorkerAsFastAsItSaidStaysSo) {
  Compute(100, 1);
  EXPECT_DOUBLE_EQ(slowdown(), 1);
}

TEST_F(PrefillSpeedsTest, ASlowWorkerIsNoticedWithinAFewPrompts) {
  Compute(3, 3);
  EXPECT_GT(slowdown(), 2.25);
  Compute(30, 3);
  EXPECT_NEAR(slowdown(), 3, 0.1);
}

TEST_F(PrefillSpeedsTest, AFastWorkerIsNoticedToo) {
  Compute(100, 0.5);
  EXPECT_NEAR(slowdown(), 0.5, 0.02);
}

TEST_F(PrefillSpeedsTest, AWorkerThatIsFastAgainIsRegained) {
  Compute(50, 3);
  Compute(300, 1);  // thirty seconds
  EXPECT_LT(slowdown(), 1.2);
}

TEST_F(PrefillSpeedsTest, AWorkerThatIsGivenNothingIsTriedAgain) {
  Compute(50, 4);
  EXPECT_GT(slowdown(), 3.8);
  now_ += absl::Minutes(1);
  EXPECT_LT(slowdown(), 1.3);
}

TEST_F(PrefillSpeedsTest, OneStandstillIsNoSlownessForLong) {
  Compute(100, 1);
  Compute(1, 600);  // a minute
  EXPECT_LT(slowdown(), PrefillSpeeds::kMost);
  Compute(10, 1);
  EXPECT_LT(slowdown(), 1.4);
}

TEST_F(PrefillSpeedsTest, TheSlowdownIsBoundedBothWays) {
  for (const double ratio : {100.0, 0.001}) {
    PrefillSpeeds speeds;
    for (int i = 0; i < 1000; ++i) speeds.Observe(kSlot, kEpoch, kPrompt, kPrompt * ratio, now_);
    const double bound = ratio > 1 ? PrefillSpeeds::kMost : 1 / PrefillSpeeds::kMost;
    EXPECT_NEAR(speeds.slowdown(kSlot, kEpoch, now_), bound, 0.01);
  }
}

TEST_F(PrefillSpeedsTest, ALongPromptSaysMoreThanAShortOne) {
  PrefillSpeeds brief;
  brief.Observe(kSlot, kEpoch, absl::Milliseconds(1), absl::Milliseconds(3), now_);
  EXPECT_LT(brief.slowdown(kSlot, kEpoch, now_), 1.05);
  PrefillSpeeds lengthy;
  lengthy.Observe(kSlot, kEpoch, absl::Seconds(1), absl::Seconds(3), now_);
  EXPECT_GT(lengthy.slowdown(kSlot, kEpoch, now_), 2.5);
}

TEST_F(PrefillSpeedsTest, AnotherEpochIsAnotherWorker) {
  Compute(50, 3);
  EXPECT_EQ(speeds_.slowdown(kSlot, "second life", now_), 1);
  EXPECT_EQ(speeds_.slowdown(kSlot + 1, kEpoch, now_), 1);
  speeds_.Observe(kSlot, "second life", kPrompt, kPrompt, now_);
  EXPECT_EQ(speeds_.slowdown(kSlot, "second life", now_), 1);
  EXPECT_EQ(slowdown(), 1);
}

TEST_F(PrefillSpeedsTest, NothingIsLearnedWithoutAPredictionOrATime) {
  speeds_.Observe(kSlot, kEpoch, absl::ZeroDuration(), absl::Seconds(1), now_);
  speeds_.Observe(kSlot, kEpoch, absl::Seconds(1), absl::ZeroDuration(), now_);
  EXPECT_EQ(slowdown(), 1);
}

TEST_F(PrefillSpeedsTest, OfTimesThatAreNoneNothingIsLearned) {
  Compute(1, 2);
  const double before = slowdown();
  for (const absl::Duration none :
       {absl::ZeroDuration(), -kPrompt, absl::InfiniteDuration(), -absl::InfiniteDuration()}) {
    speeds_.Observe(kSlot, kEpoch, none, kPrompt, now_);
    speeds_.Observe(kSlot, kEpoch, none, none, now_);
  }
  EXPECT_DOUBLE_EQ(slowdown(), before);
  speeds_.Observe(kSlot, kEpoch, kPrompt, absl::InfiniteDuration(), now_);  // it stood still
  EXPECT_GT(slowdown(), before);
  EXPECT_LT(slowdown(), PrefillSpeeds::kMost);
}

}  // namespace
}  // namespace router
