#include "prefill_worker/pacing.h"

#include <gtest/gtest.h>

namespace prefill_worker {
namespace {

Pacing AtSpeed(double tokens_per_s) {
  return Pacing(/*chunk_tokens=*/512, /*block_size=*/64, tokens_per_s, absl::Seconds(60));
}

TEST(PacingTest, UnknownSpeedTakesWholeChunksAndReservesAtOnce) {
  EXPECT_EQ(AtSpeed(0).StepTokens(), 512);
  EXPECT_TRUE(AtSpeed(0).MayReserve(1 << 20));
}

TEST(PacingTest, AStepTakesASecondAtMostButABlockAtLeast) {
  EXPECT_EQ(AtSpeed(10'000).StepTokens(), 512);
  EXPECT_EQ(AtSpeed(300).StepTokens(), 300);
  EXPECT_EQ(AtSpeed(10).StepTokens(), 64);
}

TEST(PacingTest, ReservesWhenTheRestFitsTheWholeTransfersTime) {
  EXPECT_TRUE(AtSpeed(100).MayReserve(1'500));
  EXPECT_FALSE(AtSpeed(100).MayReserve(1'501));
  EXPECT_TRUE(AtSpeed(0.1).MayReserve(0));  // all computed
}

TEST(PacingTest, LearnsFromStepsAndIgnoresSmallOnes) {
  Pacing pacing = AtSpeed(0);
  pacing.Observe(1, 1);
  EXPECT_EQ(pacing.StepTokens(), 512);
  pacing.Observe(128, 1);
  EXPECT_EQ(pacing.StepTokens(), 128);
  for (int i = 0; i < 50; ++i) pacing.Observe(256, 1);
  EXPECT_GE(pacing.StepTokens(), 255);
}

}  // namespace
}  // namespace prefill_worker
