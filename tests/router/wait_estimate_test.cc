#include "router/wait_estimate.h"

#include "gtest/gtest.h"

namespace router {
namespace {

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1);

TEST(WaitEstimateTest, NothingIsForeseenBeforeAnythingWaited) {
  WaitEstimate estimate;
  EXPECT_EQ(estimate.Wait(1000), absl::ZeroDuration());
  // An idle queue is not a slow one.
  for (int i = 0; i < 10; ++i) {
    estimate.OnTaken(100, /*others_wait=*/false, kStart + absl::Seconds(100 * i));
  }
  EXPECT_EQ(estimate.Wait(1000), absl::ZeroDuration());
}

TEST(WaitEstimateTest, TheQueuesSpeedIsThatOfTheTimesInWhichOthersWaited) {
  WaitEstimate estimate;
  estimate.OnTaken(100, true, kStart);
  for (int i = 1; i <= 20; ++i) estimate.OnTaken(50, true, kStart + 0.1 * i * absl::Seconds(1));
  EXPECT_NEAR(absl::ToDoubleSeconds(estimate.Wait(1000)), 2.0, 0.1);
  // Then it becomes slower: what is newer counts more.
  for (int i = 1; i <= 60; ++i) estimate.OnTaken(50, true, kStart + absl::Seconds(2 + i));
  EXPECT_NEAR(absl::ToDoubleSeconds(estimate.Wait(1000)), 20.0, 2.0);
}

TEST(WaitEstimateTest, PredictionsAreCorrectedWithinAFactorOfTwo) {
  WaitEstimate estimate;
  EXPECT_EQ(estimate.Corrected(absl::Seconds(1)), absl::Seconds(1));
  for (int i = 0; i < 50; ++i) estimate.OnFirstToken(absl::Seconds(1), absl::Seconds(10));
  EXPECT_NEAR(absl::ToDoubleSeconds(estimate.Corrected(absl::Seconds(1))), 2.0, 0.01);
  EXPECT_NEAR(absl::ToDoubleSeconds(estimate.FirstToken()), 10.0, 0.01);
  for (int i = 0; i < 50; ++i) estimate.OnFirstToken(absl::ZeroDuration(), absl::Seconds(1));
  EXPECT_NEAR(absl::ToDoubleSeconds(estimate.FirstToken()), 1.0, 0.01);
  EXPECT_NEAR(absl::ToDoubleSeconds(estimate.Corrected(absl::Seconds(1))), 2.0, 0.01);
}

}  // namespace
}  // namespace router
