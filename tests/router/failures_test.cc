// What happens to requests when workers fail, refuse, hold, vanish or come back, and when the
// client leaves: each ends exactly once, and nothing stays behind.

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::DecodeCall;
using fakes::FakeWorker;
using fakes::PrefillCall;
using testing::HasSubstr;

// Fails the first `times` calls at any of the workers that share it.
struct Failing {
  std::atomic<int> left;
  absl::Status status;
};

void FailDecodes(FakeWorker* worker, Failing* failing, bool accept_first) {
  worker->on_decode = [worker, failing, accept_first](std::shared_ptr<DecodeCall> call) {
    if (failing->left.fetch_sub(1) <= 0) return worker->DefaultDecode(call);
    if (accept_first) call->Accept();
    call->End(failing->status);
  };
}
void FailPrefills(FakeWorker* worker, Failing* failing, bool start_first) {
  worker->on_prefill = [worker, failing, start_first](std::shared_ptr<PrefillCall> call) {
    if (failing->left.fetch_sub(1) <= 0) return worker->DefaultPrefill(call);
    if (start_first) {
      call->Accept();
      call->Started();
    }
    call->End(failing->status);
  };
}

const absl::Status kRetried[] = {
    absl::UnavailableError("gone"),
    status::WithReason(absl::UnavailableError("draining"), status::kDraining),
    absl::AbortedError("transfer broke"),
    absl::InternalError("bug"),
    status::WithReason(absl::FailedPreconditionError("restarted"), status::kStaleEpoch),
    status::WithReason(absl::FailedPreconditionError("old"), status::kStaleAttempt),
    absl::ResourceExhaustedError("full"),
    absl::DataLossError("checksum"),
    absl::CancelledError("by the worker"),
    absl::UnknownError("?"),
};

TEST_F(RouterFixture, AFailedDecodeBeforeTheFirstTokenGoesToAnotherWorker) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  StartRouter();
  for (const absl::Status& status : kRetried) {
    for (const bool accept_first : {false, true}) {
      for (const bool local : {false, true}) {
        SCOPED_TRACE(absl::StrCat(status.ToString(), accept_first, local));
        Failing failing = {.left = 1, .status = status};
        FailDecodes(d1, &failing, accept_first);
        FailDecodes(d2, &failing, accept_first);
        const size_t before1 = d1->decodes().size(), before2 = d2->decodes().size();
        const Answer answer = Generate(local ? Text("hi") : Tokens(200));
        ASSERT_EQ(answer.status, absl::OkStatus());
        EXPECT_EQ(answer.texts.at(0), "hello");
        EXPECT_EQ(answer.summary.attempts(), 2u);
        EXPECT_EQ(answer.num_summaries, 1);
        EXPECT_EQ(d1->decodes().size() - before1, 1u);
        EXPECT_EQ(d2->decodes().size() - before2, 1u) << "not the same one again";
        d1->on_decode = d2->on_decode = nullptr;
      }
    }
  }
  // Half-dispatch never happens: without an accepting decode worker no prefill is opened.
  Failing refusing = {.left = 1, .status = absl::UnavailableError("no")};
  FailDecodes(d1, &refusing, false);
  FailDecodes(d2, &refusing, false);
  const size_t before = p->prefills().size();
  ASSERT_EQ(Generate(Tokens(200)).status, absl::OkStatus());
  EXPECT_EQ(p->prefills().size() - before, 1u);
  EXPECT_EQ(p->prefills().back().spec().key().attempt(), 2u);
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, AFailedPrefillIsRepeatedElsewhereAndItsDecodeIsCancelled) {
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  FakeWorker* const d = Decode();
  StartRouter();
  for (const absl::Status& status : kRetried) {
    for (const bool start_first : {false, true}) {
      SCOPED_TRACE(absl::StrCat(status.ToString(), start_first));
      Failing failing = {.left = 1, .status = status};
      FailPrefills(p1, &failing, start_first);
      FailPrefills(p2, &failing, start_first);
      const size_t before1 = p1->prefills().size(), before2 = p2->prefills().size();
      const size_t cancels = d->cancels().size();
      const Answer answer = Generate(Tokens(200));
      ASSERT_EQ(answer.status, absl::OkStatus());
      EXPECT_EQ(answer.texts.at(0), "hello");
      EXPECT_EQ(answer.summary.attempts(), 2u);
      EXPECT_EQ(p1->prefills().size() - before1, 1u);
      EXPECT_EQ(p2->prefills().size() - before2, 1u);
      EXPECT_TRUE(d->WaitFor([&] { return d->cancels().size() == cancels + 1; }));
      p1->on_prefill = p2->on_prefill = nullptr;
    }
  }
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, TheOnlyPairIsTriedAgainAfterABackOff) {
  FakeWorker* const p = Prefill();
  Decode();
  StartRouter();
  Failing failing = {.left = 2, .status = absl::UnavailableError("gone")};
  FailPrefills(p, &failing, true);
  const Answer answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.attempts(), 3u);
}

TEST_F(RouterFixture, AfterMaxAttemptsTheLastErrorIsTold) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Decode();
  StartRouter();
  Failing failing = {.left = 1000, .status = absl::UnavailableError("it is gone")};
  FailPrefills(p, &failing, true);
  Answer answer = Generate(Tokens(200));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("gave up after 3 attempts"));
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr(p->address()));
  EXPECT_EQ(answer.num_summaries, 0);
  EXPECT_TRUE(answer.texts.empty());
  EXPECT_EQ(p->prefills().size(), 3u);
  failing.status = absl::InternalError("bug");
  answer = Generate(Tokens(200));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(p->prefills().size(), 3u + 2u) << "internal: once more";
  failing.status = absl::InvalidArgumentError("cannot work");
  answer = Generate(Tokens(200));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(p->prefills().size(), 3u + 2u + 1u);
  EXPECT_TRUE(d->WaitFor([&] { return d->cancels().size() == 6; }));
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, AfterTheFirstTokenAFailureEndsTheRequest) {
  Prefill();
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  for (FakeWorker* d : {d1, d2}) {
    d->on_decode = [](std::shared_ptr<DecodeCall> call) {
      call->Accept();
      call->Tokens(0, "par");
      call->End(absl::UnavailableError("died"));
    };
  }
  StartRouter();
  const Answer answer = Generate(Text("hi"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(answer.texts.at(0), "par");
  EXPECT_TRUE(answer.reasons.empty());
  EXPECT_EQ(answer.num_summaries, 0);
  EXPECT_EQ(d1->decodes().size() + d2->decodes().size(), 1u);
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, APrefillStreamThatBreaksAfterTheFirstTokenDoesNoHarm) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Decode();
  d->on_decode = [](std::shared_ptr<DecodeCall> call) {
    call->Accept();
    call->Answer("complete");
  };
  p->on_prefill = [](std::shared_ptr<PrefillCall> call) {
    call->Accept();
    call->End(absl::UnavailableError("died after the hand-over"));
  };
  StartRouter();
  for (int i = 0; i < 20; ++i) {
    const Answer answer = Generate(Tokens(200));
    ASSERT_EQ(answer.status, absl::OkStatus());
    EXPECT_EQ(answer.texts.at(0).size() % 8, 0u);
  }
}

TEST_F(RouterFixture, WrongStreamsOfWorkersAreErrorsNotAnswers) {
  FakeWorker* const d = Decode();
  StartRouter();
  const std::function<void(std::shared_ptr<DecodeCall>)> wrong[] = {
      [](std::shared_ptr<DecodeCall> call) {  // ends well without Done
        call->Accept();
        call->End(absl::OkStatus());
      },
      [](std::shared_ptr<DecodeCall> call) {  // done without tokens
        call->Accept();
        call->Done();
        call->End(absl::OkStatus());
      },
      [](std::shared_ptr<DecodeCall> call) {  // a branch that nobody asked for
        call->Accept();
        call->Tokens(1, "x");
      },
      [](std::shared_ptr<DecodeCall> call) {  // done in the middle
        call->Accept();
        call->Tokens(0, "x");
        call->Done();
        call->End(absl::OkStatus());
      },
  };
  for (const auto& behaviour : wrong) {
    d->on_decode = behaviour;
    const Answer answer = Generate(Text("hi"));
    EXPECT_EQ(answer.status.code(), absl::StatusCode::kInternal) << answer.status;
    EXPECT_EQ(answer.num_summaries, 0);
    EXPECT_TRUE(answer.reasons.empty());
  }
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, HeldBlocksArePushedToAnotherDecodeWorker) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  std::shared_ptr<PrefillCall> held;
  p->on_prefill = [&](std::shared_ptr<PrefillCall> call) {
    call->Accept();
    call->Started();
    call->Held(absl::Seconds(1));
    held = call;
  };
  StartRouter();
  const Answer answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "hello");
  EXPECT_EQ(answer.summary.kv_transport(), "fake-held");
  EXPECT_EQ(answer.summary.attempts(), 2u);
  EXPECT_EQ(answer.summary.prefill_worker(), p->address());
  ASSERT_EQ(p->prefills().size(), 1u) << "the prompt is computed once";
  ASSERT_EQ(p->pushes().size(), 1u);
  const auto push = p->pushes()[0];
  EXPECT_EQ(push.attempt_held(), 1u);
  EXPECT_EQ(push.attempt(), 2u);
  EXPECT_EQ(push.worker_epoch(), p->epoch());
  EXPECT_EQ(push.decode().address(), answer.summary.decode_worker());
  ASSERT_EQ(d1->decodes().size(), 1u);
  ASSERT_EQ(d2->decodes().size(), 1u);
  FakeWorker* const first = d1->decodes()[0].spec().key().attempt() == 1 ? d1 : d2;
  EXPECT_TRUE(first->WaitFor([&] { return first->cancels().size() == 1; }));
  held->Done();
  held->End(absl::OkStatus());
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, TheLeaseIsRenewedWhileNoDecodeWorkerHasRoom) {
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Add({.num_blocks = 100});
  p->on_prefill = [&](std::shared_ptr<PrefillCall> call) {
    call->Accept();
    d->SetLoad(0, 3, 99);  // somebody else took the room
    call->Held(absl::Milliseconds(120));
  };
  StartRouter();
  const auto call = Start(Tokens(200));
  ASSERT_TRUE(p->WaitFor([&] { return p->num_renewals() >= 3; }));
  EXPECT_TRUE(p->pushes().empty());
  d->SetLoad(0, 0, 0);
  const Answer answer = call->Wait();
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "hello");
  EXPECT_EQ(p->prefills().size(), 1u);
}

TEST_F(RouterFixture, AFailedPushKeepsTheBlocksALostLeaseStartsAgain) {
  FakeWorker* const p = Prefill();
  Decode();
  Decode();
  std::atomic<int> holds{1};
  p->on_prefill = [&](std::shared_ptr<PrefillCall> call) {
    if (holds.fetch_sub(1) <= 0) return p->DefaultPrefill(call);
    call->Accept();
    call->Held(absl::Seconds(10));
  };
  std::atomic<int> pushes{0};
  p->on_push_held = [&](const ferry::v1::PushHeldRequest& request) -> absl::Status {
    if (++pushes == 1) return absl::ResourceExhaustedError("no room there either");
    ferry::v1::RequestKey key;
    key.set_request_id(request.request_id());
    key.set_attempt(request.attempt());
    return directory_.at(request.decode().address())->Deliver(key) ? absl::OkStatus()
                                                                   : absl::AbortedError("not open");
  };
  StartRouter();
  Answer answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.attempts(), 3u);
  EXPECT_EQ(p->prefills().size(), 1u);

  holds = 1;
  p->on_push_held = [](const ferry::v1::PushHeldRequest&) {
    return absl::NotFoundError("the lease has expired");
  };
  answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(p->prefills().size(), 3u) << "computed again";
  EXPECT_TRUE(IsIdle());
}

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

TEST_F(RouterFixture, ASilentStreamIsGivenUp) {
  options_.stream_idle = absl::Milliseconds(150);
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
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("1 decode workers, 0 that prefill"));
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

TEST_F(RouterFixture, ManyRequestsAtOnceEndOnceEach) {
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  Failing failing = {.left = 20, .status = absl::AbortedError("broke")};
  for (FakeWorker* p : {p1, p2}) FailPrefills(p, &failing, true);
  for (FakeWorker* d : {d1, d2}) d->output = std::string("some text for everybody");
  StartRouter();
  std::vector<std::unique_ptr<RunningCall>> calls;
  for (int i = 0; i < 100; ++i)
    calls.push_back(Start(i % 2 == 0 ? Tokens(100 + i, i) : Text("short")));
  for (int i = 0; i < 100; i += 10) calls[i]->Cancel();
  for (int i = 0; i < 100; ++i) {
    const Answer answer = calls[i]->Wait();
    if (i % 10 == 0) {
      EXPECT_TRUE(answer.status.ok() || absl::IsCancelled(answer.status)) << answer.status;
      continue;
    }
    ASSERT_EQ(answer.status, absl::OkStatus());
    EXPECT_EQ(answer.texts.at(0), "some text for everybody");
    EXPECT_EQ(answer.num_summaries, 1);
  }
  EXPECT_TRUE(IsIdle());
}

}  // namespace
}  // namespace router
