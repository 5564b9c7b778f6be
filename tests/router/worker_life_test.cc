// Workers die, fall silent, come back, drain or are not there at all: what becomes of requests and
// of what the router knows.

#include <poll.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/fakes/silent_server.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::DecodeCall;
using fakes::FakeWorker;
using fakes::PrefillCall;
using testing::HasSubstr;

TEST_F(RouterFixture, AKilledWorkerLosesNoRequestWhenAnotherExists) {
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  FakeWorker* const d = Decode();
  for (FakeWorker* p : {p1, p2}) {
    p->on_prefill = [](std::shared_ptr<PrefillCall> call) { call->Accept(); };
  }
  StartRouter();
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(Start(Tokens(200, i * 7 + 1)));
  ASSERT_TRUE(p1->WaitFor([&] { return p1->prefills().size() + p2->prefills().size() == 8; }));
  p2->on_prefill = nullptr;
  p1->Kill();
  size_t answered = 0;
  // What p2 had taken before hangs there; only those of p1 come back.
  const size_t of_p1 = p1->prefills().size();
  ASSERT_GT(of_p1, 0u);
  ASSERT_TRUE(p2->WaitFor([&] { return p2->prefills().size() == 8; }));
  for (const auto& call : calls) answered += call->num_messages() > 0;
  ASSERT_TRUE(d->WaitFor([&] {
    answered = 0;
    for (const auto& call : calls) answered += call->num_messages() >= 6;
    return answered == of_p1;
  }));
  ASSERT_TRUE(WaitForWorkers(1, 1));
}

// A try that is given up for another one, and then answered, would leave its connection behind.
TEST_F(RouterFixture, AWorkerThatDoesNotAnswerIsTriedOverOneConnectionAtATime) {
  const fakes::SilentServer stopped;
  options_.workers.push_back(stopped.address());
  StartRouterAlone();
  for (int i = 0; i < 3; ++i) {
    const int connection = stopped.Accept();
    ASSERT_GE(connection, 0);
    for (bool is_open = true; is_open;) {
      pollfd waits[] = {{.fd = connection, .events = POLLIN, .revents = 0},
                        {.fd = stopped.fd(), .events = POLLIN, .revents = 0}};
      ASSERT_GT(poll(waits, 2, 60'000), 0);
      char buffer[4096];
      ssize_t num_bytes = 1;
      while (num_bytes > 0) num_bytes = recv(connection, buffer, sizeof(buffer), MSG_DONTWAIT);
      is_open = num_bytes < 0 && errno == EAGAIN;
      if (is_open) {
        ASSERT_EQ(waits[1].revents, 0) << "another one while it is open";
      }
    }
    close(connection);
  }
}

TEST_F(RouterFixture, ASilentWorkerIsSuspectThenDeadAndItsRequestsGoElsewhere) {
  options_.heartbeat = absl::Milliseconds(150);
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  StartRouter();
  d1->PauseReports(true);
  const auto takes_nothing = [](std::shared_ptr<DecodeCall>) {};
  d1->on_decode = takes_nothing;  // stopped: accepts nothing, breaks nothing
  for (int i = 0; i < 12; ++i) {
    const Answer answer = Generate(Text(absl::StrCat("hi ", i)));
    ASSERT_EQ(answer.status, absl::OkStatus());
    EXPECT_EQ(answer.summary.decode_worker(), d2->address());
  }
  ASSERT_TRUE(Eventually([&] { return router_->registry().link(0).state() == LinkState::kDead; }));
  d1->on_decode = nullptr;
  d1->PauseReports(false);
  ASSERT_TRUE(WaitForWorkers(0, 2)) << "the same process comes back";
}

// A router that was stopped for a while has not heard its workers: that is not their silence.
TEST_F(RouterFixture, ARouterThatCouldNotListenCallsNobodyDead) {
  options_.heartbeat = absl::Milliseconds(150);
  options_.stream_idle = absl::Milliseconds(500);
  FakeWorker* const d = Decode();
  std::shared_ptr<DecodeCall> open;
  d->on_decode = [&](std::shared_ptr<DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "a");
    open = call;
  };
  StartRouter();
  const auto call = Start(Text("hi"));
  ASSERT_TRUE(Eventually([&] { return call->num_messages() > 0; }));
  router_->loop()->Run([] {
    const absl::Time start = EventLoop::Now();
    while (EventLoop::Now() - start < absl::Seconds(2)) {
    }
  });
  open->Answer("b");
  const Answer answer = call->Wait();
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "ab");
}

TEST_F(RouterFixture, ManyThatNobodyCanServeDoNotStandInTheWayOfOthers) {
  options_.worker_wait = absl::Seconds(60);
  FakeWorker* const p = Prefill();
  Decode();
  StartRouter();
  p->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  std::vector<std::unique_ptr<RunningCall>> waiting;  // for the prefill worker to come back
  for (int i = 0; i < 3 * AdmissionQueue::kMaxSkips; ++i) waiting.push_back(Start(Tokens(200)));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == waiting.size(); }));
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(Generate(Text("hi"), absl::Seconds(10)).status, absl::OkStatus());
  }
  for (const auto& call : waiting) call->Cancel();
  for (const auto& call : waiting) {
    EXPECT_EQ(call->Wait().status.code(), absl::StatusCode::kCancelled);
  }
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, ARequestWaitsForAWorkerThatComesBack) {
  options_.worker_wait = absl::Seconds(20);
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Decode();
  StartRouter();
  const int32_t port = p->port();
  p->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  const auto call = Start(Tokens(200));
  ASSERT_TRUE(Eventually([&] { return router_->num_running() == 1; }));
  fakes::FakeWorker restarted({.role = ferry::v1::WORKER_ROLE_PREFILL, .port = port}, &directory_);
  EXPECT_EQ(call->Wait().status, absl::OkStatus());
  EXPECT_EQ(restarted.prefills().size(), 1u);
  EXPECT_EQ(d->decodes().size(), 1u);
}

TEST_F(RouterFixture, ARestartedWorkerIsANewOne) {
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  Decode();
  StartRouter();
  p1->Store(ChainOf(Tokens(2000)));
  ASSERT_TRUE(Eventually([&] { return router_->index().num_entries() == 31; }));
  EXPECT_EQ(Generate(Tokens(2000)).summary.prefill_worker(), p1->address());
  const int32_t port = p1->port();
  p1->Kill();
  ASSERT_TRUE(WaitForWorkers(1, 1));
  EXPECT_EQ(Generate(Tokens(2000)).summary.prefill_worker(), p2->address());
  fakes::FakeWorker restarted({.role = ferry::v1::WORKER_ROLE_PREFILL, .port = port}, &directory_);
  ASSERT_TRUE(WaitForWorkers(2, 1));
  EXPECT_TRUE(Eventually([&] { return router_->index().num_entries() == 0; }))
      << "what the old process had is forgotten";
  Failing failing = {.left = 1, .status = absl::UnavailableError("gone")};
  FailPrefills(p2, &failing, false);
  std::string used;
  for (int i = 0; i < 50 && used != restarted.address(); ++i) {
    used = Generate(Tokens(2000, i)).summary.prefill_worker();
  }
  EXPECT_EQ(used, restarted.address());
  EXPECT_EQ(restarted.prefills()[0].worker_epoch(), restarted.epoch());
}

TEST_F(RouterFixture, ADrainingWorkerGetsNothingNewAndFinishesWhatItHas) {
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  StartRouter();
  std::shared_ptr<DecodeCall> open;
  for (FakeWorker* d : {d1, d2}) {
    d->on_decode = [&](std::shared_ptr<DecodeCall> call) {
      call->Accept();
      open = call;
    };
  }
  const auto call = Start(Text("hi"));
  ASSERT_TRUE(d1->WaitFor([&] { return d1->decodes().size() + d2->decodes().size() == 1; }));
  FakeWorker* const draining = d1->decodes().size() == 1 ? d1 : d2;
  FakeWorker* const other = draining == d1 ? d2 : d1;
  d1->on_decode = d2->on_decode = nullptr;
  draining->SetState(ferry::v1::WORKER_STATE_DRAINING);
  ASSERT_TRUE(WaitForWorkers(0, 1));
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(Generate(Text("hi")).summary.decode_worker(), other->address());
  }
  open->Answer("kept");
  EXPECT_EQ(call->Wait().texts[0], "kept");
}

TEST_F(RouterFixture, WithoutAnyWorkerTheRequestFailsSoon) {
  options_.heartbeat = absl::Milliseconds(100);
  FakeWorker* const d = Decode();
  StartRouter();
  Answer answer = Generate(Tokens(200));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable) << "nobody prefills long prompts";
  EXPECT_THAT(
      std::string(answer.status.message()),
      HasSubstr("1 decode worker, no worker that prefills any length; start a ferry-prefill"));
  d->Kill();
  answer = Generate(Text("hi"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, GapsInCacheEventsAreFilledByReplayOrSnapshot) {
  FakeWorker* const d = Decode();
  StartRouter();
  const auto entries = [&](size_t count) {
    return Eventually([&, count] { return router_->index().num_entries() == count; });
  };
  d->Store(ChainOf(Tokens(64, 1)));
  ASSERT_TRUE(entries(1));
  d->SkipFrame();
  d->Store(ChainOf(Tokens(64, 2)));
  ASSERT_TRUE(entries(2)) << "replayed";
  EXPECT_EQ(d->kv_watch_starts().back(), 2u);
  d->SkipFrame();
  d->ForgetLog();
  d->Store(ChainOf(Tokens(64, 3)));
  d->ForgetLog();
  ASSERT_TRUE(entries(3)) << "from a snapshot";
  d->Store(ChainOf(Tokens(64, 4)));
  ASSERT_TRUE(entries(4)) << "and live again";
  int64_t gaps = 0;
  router_->loop()->Run([&] { gaps = router_->index().num_gaps(); });
  EXPECT_GE(gaps, 2);
}

// Known from its facts: it need not tell of a block without a snapshot first.
TEST_F(RouterFixture, OfAModelWithStateAPromptsLastBoundaryIsForeseen) {
  options_.local_prefill_tokens = 0;
  FakeWorker* const p =
      Add({.role = ferry::v1::WORKER_ROLE_PREFILL, .num_blocks = 1000, .num_state_slots = 8});
  Add({.num_blocks = 1000, .num_state_slots = 8});
  StartRouter();
  const absl::Time before = EventLoop::Now();  // at which no prediction has expired
  // Five whole blocks; the last token is computed in any case, and its block with it.
  const ferry::v1::GenerateRequest prompt = Tokens(320);
  const Answer answer = Generate(prompt);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.summary.prefill_worker(), p->address());
  const std::vector<block_hash::BlockHash> chain = ChainOf(prompt);
  std::vector<int32_t> whole, short_of_it;
  router_->loop()->Run([&] {
    whole = router_->index().Lookup(chain, before);
    short_of_it = router_->index().Lookup(absl::MakeConstSpan(chain).first(3), before);
  });
  EXPECT_EQ(whole, (std::vector<int32_t>{4, 0}));
  EXPECT_EQ(short_of_it, (std::vector<int32_t>{0, 0}));
}

}  // namespace
}  // namespace router
