// Circuit breakers: a worker that takes requests and fails them is left alone for a while, is tried
// by one request, and costs nobody an answer.

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::FakeWorker;

class BreakerTest : public RouterFixture {
 protected:
  BreakerTest() {
    options_.breaker_failures = 3;
    options_.breaker_open = absl::Milliseconds(300);
    options_.worker_wait = absl::Seconds(20);
  }
  BreakerState StateOf(WorkerSlot slot) {
    BreakerState state = BreakerState::kClosed;
    router_->loop()->Run([&] {
      state = router_->breakers().state(slot, router_->registry().link(slot).facts().epoch,
                                        EventLoop::Now());
    });
    return state;
  }
  // Requests until the worker's breaker is open; each must be answered by somebody.
  void OpenBreakerOf(WorkerSlot slot) {
    for (int i = 0; i < 100 && StateOf(slot) == BreakerState::kClosed; ++i) {
      ASSERT_EQ(Generate(Text("hi")).status, absl::OkStatus());
    }
    ASSERT_NE(StateOf(slot), BreakerState::kClosed);
  }
};

TEST_F(BreakerTest, RequestsGoElsewhereUntilOneHasTriedTheWorkerAgain) {
  options_.breaker_open = absl::Seconds(3600);
  FakeWorker* const bad = Decode();
  FakeWorker* const good = Decode();
  Failing failing = {.left = 1 << 20, .status = absl::InternalError("bug")};
  FailDecodes(bad, &failing, true);
  StartRouter();
  OpenBreakerOf(0);
  const size_t before = bad->decodes().size();
  EXPECT_GE(before, 3u);
  for (int i = 0; i < 20; ++i) {
    const Answer answer = Generate(Text("hi"));
    ASSERT_EQ(answer.status, absl::OkStatus());
    EXPECT_EQ(answer.summary.attempts(), 1u);
  }
  EXPECT_EQ(bad->decodes().size(), before);
  EXPECT_GE(good->decodes().size(), 20u);
  EXPECT_TRUE(IsIdle());
}

TEST_F(BreakerTest, AfterItsTimeOneRequestTriesItAndAnAnswerClosesIt) {
  FakeWorker* const bad = Decode();
  Decode();
  Failing failing = {.left = 3, .status = absl::UnavailableError("gone")};
  FailDecodes(bad, &failing, true);
  StartRouter();
  OpenBreakerOf(0);
  for (int i = 0; i < 2000 && StateOf(0) != BreakerState::kClosed; ++i) {
    ASSERT_EQ(Generate(Text("hi")).status, absl::OkStatus());
  }
  EXPECT_EQ(StateOf(0), BreakerState::kClosed);
}

// With every worker open a request waits for its turn to try, and gets its answer.
TEST_F(BreakerTest, NoRequestIsLostWhenEveryBreakerIsOpen) {
  FakeWorker* const prefill = Prefill();
  FakeWorker* const decode = Decode();
  Failing failing = {.left = 1 << 20, .status = absl::InternalError("bug")};
  FailPrefills(prefill, &failing, true);
  StartRouter();
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(Generate(Tokens(200)).status.ok());
  ASSERT_NE(StateOf(0), BreakerState::kClosed);
  failing.left = 0;
  const size_t before = prefill->prefills().size();
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (int i = 0; i < 12; ++i) calls.push_back(Start(Tokens(200, 1 + i)));
  for (const auto& call : calls) EXPECT_EQ(call->Wait().status, absl::OkStatus());
  EXPECT_EQ(prefill->prefills().size() - before, 12u) << "each once";
  EXPECT_EQ(StateOf(0), BreakerState::kClosed);
  EXPECT_EQ(StateOf(1), BreakerState::kClosed) << "the decode worker had no part in it";
  EXPECT_GE(decode->decodes().size(), 12u);
  EXPECT_TRUE(IsIdle());
}

// The breaker would stay open for longer than the request can wait: it is tried all the same.
TEST_F(BreakerTest, ARequestThatCannotWaitTriesAnOpenWorker) {
  options_.breaker_open = absl::Seconds(3600);
  options_.worker_wait = absl::Milliseconds(100);
  FakeWorker* const decode = Decode();
  Failing failing = {.left = 1 << 20, .status = absl::InternalError("bug")};
  FailDecodes(decode, &failing, true);
  StartRouter();
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(Generate(Text("hi")).status.ok());
  ASSERT_EQ(StateOf(0), BreakerState::kOpen);
  failing.left = 0;
  EXPECT_EQ(Generate(Text("hi")).status, absl::OkStatus());
  EXPECT_EQ(StateOf(0), BreakerState::kClosed) << "an answer is an answer";
}

TEST_F(BreakerTest, WhatIsTheRequestsOwnDoingOpensNothing) {
  FakeWorker* const decode = Decode();
  StartRouter();
  for (const absl::Status& status :
       {absl::InvalidArgumentError("bad"), absl::OutOfRangeError("long"),
        status::WithReason(absl::InternalError("NaN"), status::kBadLogits)}) {
    Failing failing = {.left = 1 << 20, .status = status};
    FailDecodes(decode, &failing, true);
    for (int i = 0; i < 5; ++i) EXPECT_FALSE(Generate(Text("hi")).status.ok());
    EXPECT_EQ(StateOf(0), BreakerState::kClosed) << status;
  }
}

TEST_F(BreakerTest, AWorkerThatStartsAnewIsNotBlamedForItsFormerLife) {
  options_.breaker_open = absl::Seconds(3600);
  FakeWorker* const bad = Decode();
  Decode();
  Failing failing = {.left = 1 << 20, .status = absl::InternalError("bug")};
  FailDecodes(bad, &failing, true);
  StartRouter();
  OpenBreakerOf(0);
  FakeWorker::Options same;
  same.port = bad->port();
  const std::string old = bad->epoch();
  bad->Kill();
  const FakeWorker anew(same, &directory_);
  ASSERT_TRUE(Eventually([&] {
    const WorkerLink& link = router_->registry().link(0);
    return link.state() == LinkState::kServing && link.facts().epoch != old;
  }));
  EXPECT_EQ(StateOf(0), BreakerState::kClosed);
}

}  // namespace
}  // namespace router
