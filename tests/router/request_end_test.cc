// How requests end that are not answered: the client leaves or does not read, the time is over, the
// worker falls silent, the router stops.  Each ends once, and nothing stays behind.

#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::DecodeCall;
using fakes::FakeWorker;
using fakes::PrefillCall;
using testing::HasSubstr;

// Where a request can be when its client leaves.
TEST_F(RouterFixture, ACancelReachesBothWorkersInEveryPhase) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Add({.num_blocks = 100});
  StartRouter();
  struct Phase {
    const char* name;
    std::function<void(std::shared_ptr<DecodeCall>)> decode;
    std::function<void(std::shared_ptr<PrefillCall>)> prefill;
    std::function<bool(const RunningCall&)> reached;
    size_t prefill_cancels;
  };
  std::atomic<bool> heard{false};
  const Phase phases[] = {
      {"dispatched", [&](auto) { heard = true; }, [](auto) {},
       [&](const RunningCall&) { return heard.load(); }, 0},
      {"prefilling", [](auto call) { call->Accept(); },
       [&](auto call) {
         call->Accept();
         call->Started();
         heard = true;
       },
       [&](const RunningCall&) { return heard.load(); }, 1},
      {"held", [](auto call) { call->Accept(); },
       [&](auto call) {
         call->Accept();
         d->SetLoad(0, 3, 99);
         call->Held(absl::Milliseconds(60));
       },
       [&](const RunningCall&) { return p->num_renewals() > 0; }, 1},
      {"decoding",
       [](auto call) {
         call->Accept();
         call->Tokens(0, "a");
       },
       [](auto call) { call->Accept(); },
       [&](const RunningCall& call) { return call.num_messages() > 0; }, 1},
  };
  for (const Phase& phase : phases) {
    SCOPED_TRACE(phase.name);
    heard = false;
    d->SetLoad(0, 0, 0);
    ASSERT_TRUE(Eventually([&] { return router_->registry().link(1).load().used_blocks == 0; }));
    d->on_decode = phase.decode;
    p->on_prefill = phase.prefill;
    const size_t p_cancels = p->cancels().size(), d_cancels = d->cancels().size();
    const size_t d_opened = d->decodes().size();
    const auto call = Start(Tokens(200));
    ASSERT_TRUE(p->WaitFor([&] { return phase.reached(*call) && d->decodes().size() > d_opened; }));
    if (phase.name != std::string("dispatched")) {
      ASSERT_TRUE(p->WaitFor([&] { return p->prefills().size() > 0; }));
    }
    call->Cancel();
    EXPECT_EQ(call->Wait().status.code(), absl::StatusCode::kCancelled);
    EXPECT_TRUE(d->WaitFor([&] { return d->cancels().size() == d_cancels + 1; }));
    EXPECT_TRUE(
        p->WaitFor([&] { return p->cancels().size() == p_cancels + phase.prefill_cancels; }));
    EXPECT_TRUE(IsIdle());
  }
  // While it waits nobody has heard of it.
  d->SetLoad(0, 3, 99);
  ASSERT_TRUE(Eventually([&] { return router_->registry().link(1).load().used_blocks == 99; }));
  const size_t opened = d->decodes().size();
  const auto call = Start(Tokens(200));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == 1; }));
  call->Cancel();
  EXPECT_EQ(call->Wait().status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(IsIdle());
  EXPECT_EQ(d->decodes().size(), opened);
}

TEST_F(RouterFixture, TheDeadlineEndsTheRequestAtBothWorkers) {
  options_.default_deadline = absl::Milliseconds(300);
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Decode();
  p->on_prefill = [](std::shared_ptr<PrefillCall> call) { call->Accept(); };
  StartRouter();
  Answer answer = Start(Tokens(200), absl::InfiniteDuration())->Wait();
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("prefilling, 0 tokens generated"));
  EXPECT_LE(d->decodes()[0].spec().deadline_ms(), 300u);
  EXPECT_TRUE(p->WaitFor([&] { return p->cancels().size() == 1 && d->cancels().size() == 1; }));
  answer = Generate(Tokens(200), absl::Milliseconds(100));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LE(d->decodes()[1].spec().deadline_ms(), 100u);
  EXPECT_TRUE(p->WaitFor([&] { return p->cancels().size() == 2 && d->cancels().size() == 2; }));
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, ACancelWaitsForItsConfirmationAsLongAsTold) {
  options_.cancel_ack = absl::Seconds(7);
  FakeWorker* const d = Decode();
  d->on_decode = [](std::shared_ptr<DecodeCall> call) { call->Accept(); };
  StartRouter();
  auto call = Start(Text("hi"));
  ASSERT_TRUE(d->WaitFor([&] { return d->decodes().size() == 1; }));
  call->Cancel();
  ASSERT_TRUE(d->WaitFor([&] { return d->cancels().size() == 1; }));
  // A second of a busy machine's slack below, none above.
  EXPECT_GT(d->cancel_limits()[0], absl::Seconds(6));
  EXPECT_LE(d->cancel_limits()[0], absl::Seconds(7) + absl::Milliseconds(50));
}

TEST_F(RouterFixture, ASilentStreamIsGivenUp) {
  options_.stream_idle = absl::Milliseconds(150);
  options_.max_migrations = 0;
  FakeWorker* const d = Decode();
  d->on_decode = [](std::shared_ptr<DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "a");
  };
  StartRouter();
  const Answer answer = Generate(Text("hi"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("has sent no token for 150ms"));
  EXPECT_EQ(answer.texts.at(0), "a");
  EXPECT_TRUE(d->WaitFor([&] { return d->cancels().size() == 1; }));
}

TEST_F(RouterFixture, DrainRefusesNewRequestsAndLetsRunningOnesFinish) {
  FakeWorker* const d = Decode();
  std::shared_ptr<DecodeCall> open;
  d->on_decode = [&](std::shared_ptr<DecodeCall> call) {
    call->Accept();
    open = call;
  };
  StartRouter();
  const auto call = Start(Text("hi"));
  ASSERT_TRUE(d->WaitFor([&] { return d->decodes().size() == 1; }));
  router_->StartDrain();
  const Answer refused = Generate(Text("new"));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status::Reason(refused.status), status::kDraining);
  EXPECT_FALSE(router_->WaitUntilIdle(absl::Milliseconds(20)));
  open->Answer("kept");
  EXPECT_EQ(call->Wait().texts[0], "kept");
  EXPECT_TRUE(router_->WaitUntilIdle(absl::Seconds(10)));
}

TEST_F(RouterFixture, StoppingEndsWhatStillRuns) {
  FakeWorker* const d = Decode();
  d->on_decode = [](std::shared_ptr<DecodeCall> call) { call->Accept(); };
  StartRouter();
  const auto call = Start(Text("hi"));
  ASSERT_TRUE(d->WaitFor([&] { return d->decodes().size() == 1; }));
  router_->AbortAll(absl::UnavailableError("the router is shutting down"));
  const Answer answer = call->Wait();
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("shutting down"));
  EXPECT_TRUE(d->WaitFor([&] { return d->cancels().size() == 1; }));
}

TEST_F(RouterFixture, ASlowReaderHoldsItsOwnStreamBackAndNobodyElses) {
  FakeWorker* const d = Decode();
  std::atomic<bool> flood{true};
  d->on_decode = [&](std::shared_ptr<DecodeCall> call) {
    if (!flood.exchange(false)) return d->DefaultDecode(call);
    call->Accept();
    // 64 MiB of text: far more than router and connections may hold for a client that does not
    // read.
    for (int i = 0; i < 1024; ++i) call->Tokens(0, std::string(1 << 14, 'x'));
  };
  StartRouter();
  auto slow = Start(Text("flood", 4000), absl::Seconds(60), /*read=*/false);
  ASSERT_TRUE(d->WaitFor([&] { return d->decodes().size() == 1; }));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(Generate(Text("hi")).status, absl::OkStatus());
  slow.reset();  // leaves
  EXPECT_TRUE(IsIdle());
  EXPECT_TRUE(d->WaitFor([&] { return d->cancels().size() == 1; }));
}

}  // namespace
}  // namespace router
