#include "router/circuit_breakers.h"

#include "gtest/gtest.h"

namespace router {
namespace {

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1);
constexpr WorkerSlot kWorker = 2;
const char kEpoch[] = "first life";

class CircuitBreakersTest : public testing::Test {
 protected:
  BreakerState State(absl::Time now) const { return breakers_.state(kWorker, kEpoch, now); }
  // Each call a little later than the one before.
  bool Fail(int64_t request, absl::Time now) {
    const absl::Time began = now + absl::Nanoseconds(2 * ++num_failures_);
    breakers_.Begin(kWorker, kEpoch, request, began);
    return breakers_.Failed(kWorker, kEpoch, request, began, began + absl::Nanoseconds(1));
  }
  void Open() {
    for (int64_t request = 1; request <= 3; ++request) Fail(request, kStart);
    ASSERT_EQ(State(kStart + absl::Seconds(4)), BreakerState::kOpen);
  }

  CircuitBreakers breakers_{{.failures = 3, .open_for = absl::Seconds(5)}};
  int64_t num_failures_ = 0;
  const absl::Time after_ = kStart + absl::Seconds(6);
};

TEST_F(CircuitBreakersTest, OpensAtSoManyFailuresInARow) {
  EXPECT_FALSE(Fail(1, kStart));
  EXPECT_FALSE(Fail(2, kStart));
  EXPECT_TRUE(breakers_.Admits(kWorker, kEpoch, kStart));
  EXPECT_TRUE(Fail(3, kStart));
  EXPECT_EQ(State(kStart), BreakerState::kOpen);
  EXPECT_FALSE(breakers_.Admits(kWorker, kEpoch, kStart));
  EXPECT_TRUE(breakers_.Admits(kWorker - 1, kEpoch, kStart)) << "another worker";
}

TEST_F(CircuitBreakersTest, ASuccessBetweenThemStartsTheCountAgain) {
  Fail(1, kStart);
  Fail(2, kStart);
  breakers_.Begin(kWorker, kEpoch, 3, kStart);
  breakers_.Completed(kWorker, kEpoch, 3);
  EXPECT_FALSE(Fail(4, kStart));
  EXPECT_FALSE(Fail(5, kStart));
  EXPECT_TRUE(Fail(6, kStart));
}

TEST_F(CircuitBreakersTest, OneRequestAloneOpensNothing) {
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(Fail(7, kStart));
  EXPECT_EQ(State(kStart), BreakerState::kClosed);
}

// A worker's death, or a fence, fails all that is under way there at once.
TEST_F(CircuitBreakersTest, WhatWasUnderWayTogetherFailsOnce) {
  for (int64_t request = 1; request <= 100; ++request) {
    breakers_.Begin(kWorker, kEpoch, request, kStart);
  }
  for (int64_t request = 1; request <= 100; ++request) {
    EXPECT_FALSE(
        breakers_.Failed(kWorker, kEpoch, request, kStart, kStart + absl::Milliseconds(request)));
  }
  EXPECT_FALSE(Fail(101, kStart + absl::Seconds(1)));
  EXPECT_TRUE(Fail(102, kStart + absl::Seconds(1)));
}

TEST_F(CircuitBreakersTest, HalfOpenOneRequestTries) {
  Open();
  EXPECT_EQ(State(after_), BreakerState::kHalfOpen);
  EXPECT_TRUE(breakers_.Admits(kWorker, kEpoch, after_));
  breakers_.Begin(kWorker, kEpoch, 10, after_);
  EXPECT_FALSE(breakers_.Admits(kWorker, kEpoch, after_)) << "one is enough";
  breakers_.Answered(kWorker, kEpoch, 9);
  EXPECT_EQ(State(after_), BreakerState::kHalfOpen) << "another request's answer says nothing";
  breakers_.Answered(kWorker, kEpoch, 10);
  EXPECT_EQ(State(after_), BreakerState::kClosed);
}

TEST_F(CircuitBreakersTest, AProbeThatFailsOpensItAgainForAsLong) {
  Open();
  EXPECT_TRUE(Fail(10, after_));
  EXPECT_EQ(State(after_ + absl::Seconds(4)), BreakerState::kOpen);
  EXPECT_EQ(State(after_ + absl::Seconds(6)), BreakerState::kHalfOpen);
}

TEST_F(CircuitBreakersTest, AProbeThatLeavesMakesWayForTheNext) {
  Open();
  breakers_.Begin(kWorker, kEpoch, 10, after_);
  breakers_.Left(kWorker, kEpoch, 10);  // its client has gone
  EXPECT_TRUE(breakers_.Admits(kWorker, kEpoch, after_));
}

TEST_F(CircuitBreakersTest, AWorkerThatFailsBehindItsFirstAnswerIsNotForgiven) {
  Open();
  breakers_.Begin(kWorker, kEpoch, 10, after_);
  breakers_.Answered(kWorker, kEpoch, 10);
  EXPECT_TRUE(breakers_.Failed(kWorker, kEpoch, 10, after_, after_)) << "once is enough now";
  breakers_.Begin(kWorker, kEpoch, 11, after_ + absl::Seconds(6));
  breakers_.Completed(kWorker, kEpoch, 11);
  EXPECT_FALSE(Fail(12, after_ + absl::Seconds(6))) << "forgiven";
}

TEST_F(CircuitBreakersTest, WhatWasUnderWayWhenItOpenedDecidesNothing) {
  breakers_.Begin(kWorker, kEpoch, 20, kStart);
  Open();
  EXPECT_FALSE(breakers_.Failed(kWorker, kEpoch, 20, kStart, after_));
  breakers_.Completed(kWorker, kEpoch, 20);
  EXPECT_EQ(State(after_), BreakerState::kHalfOpen);
}

TEST_F(CircuitBreakersTest, ARestartedWorkerIsAnotherOne) {
  Open();
  EXPECT_TRUE(breakers_.Admits(kWorker, "second life", kStart));
  breakers_.Begin(kWorker, "second life", 10, kStart);
  EXPECT_FALSE(breakers_.Failed(kWorker, kEpoch, 4, kStart, after_)) << "of a life that is over";
  EXPECT_EQ(breakers_.state(kWorker, "second life", kStart), BreakerState::kClosed);
}

TEST_F(CircuitBreakersTest, ZeroFailuresIsNoBreaker) {
  CircuitBreakers none({.failures = 0});
  for (int64_t request = 1; request < 100; ++request) {
    const absl::Time now = kStart + absl::Seconds(request);
    none.Begin(kWorker, kEpoch, request, now);
    EXPECT_FALSE(none.Failed(kWorker, kEpoch, request, now, now));
  }
  EXPECT_TRUE(none.Admits(kWorker, kEpoch, kStart));
}

}  // namespace
}  // namespace router
