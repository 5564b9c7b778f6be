// What the router does when a try of a request fails: whose fault it may be, where it goes next,
// when it is given up.

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

TEST_F(RouterFixture, AWorkerThatDoesNotAcceptARequestInTimeLosesItToAnother) {
  options_.accept_limit = absl::Milliseconds(150);
  options_.breaker_failures = 0;
  FakeWorker* const p1 = Prefill();
  FakeWorker* const p2 = Prefill();
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  std::atomic<int> silent{0};
  for (FakeWorker* const p : {p1, p2}) {
    p->on_prefill = [&silent, p](std::shared_ptr<PrefillCall> call) {
      if (silent-- <= 0) p->DefaultPrefill(call);
    };
  }
  for (FakeWorker* const d : {d1, d2}) {
    d->on_decode = [&silent, d](std::shared_ptr<DecodeCall> call) {
      if (silent-- <= 0) d->DefaultDecode(call);
    };
  }
  StartRouter();
  silent = 1;
  Answer answer = Generate(Text("hi"));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.attempts(), 2u);
  EXPECT_EQ(d1->decodes().size(), 1u);
  EXPECT_EQ(d2->decodes().size(), 1u);
  for (FakeWorker* const d : {d1, d2}) d->on_decode = nullptr;
  silent = 1;
  answer = Generate(Tokens(200));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.attempts(), 2u);
  EXPECT_EQ(p1->prefills().size(), 1u);
  EXPECT_EQ(p2->prefills().size(), 1u);
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

// A request cannot be blamed for a worker that it never reached.
TEST_F(RouterFixture, AWorkerThatNeverHadTheRequestCostsNoTry) {
  options_.max_attempts = 1;
  FakeWorker* const p = Prefill();
  FakeWorker* const d1 = Decode();
  FakeWorker* const d2 = Decode();
  StartRouter();
  for (const absl::Status& status :
       {absl::UnavailableError("connection refused"), absl::ResourceExhaustedError("full"),
        status::WithReason(absl::UnavailableError("draining"), status::kDraining),
        status::WithReason(absl::FailedPreconditionError("restarted"), status::kStaleEpoch)}) {
    SCOPED_TRACE(status.ToString());
    Failing decodes = {.left = 4, .status = status};
    FailDecodes(d1, &decodes, false);
    FailDecodes(d2, &decodes, false);
    Failing prefills = {.left = 2, .status = status};
    FailPrefills(p, &prefills, false);
    const Answer answer = Generate(Tokens(200));
    ASSERT_EQ(answer.status, absl::OkStatus());
    EXPECT_EQ(answer.summary.attempts(), 7u);
    d1->on_decode = d2->on_decode = nullptr;
  }
  Failing had_it = {.left = 1, .status = absl::UnavailableError("killed")};
  FailPrefills(p, &had_it, true);
  EXPECT_EQ(Generate(Tokens(200)).status.code(), absl::StatusCode::kUnavailable);
}

TEST_F(RouterFixture, TheDeadlineBoundsTriesThatCostNothingAndSaysWhatFailed) {
  options_.default_deadline = absl::Milliseconds(400);
  FakeWorker* const d = Decode();
  StartRouter();
  Failing failing = {.left = 1000, .status = absl::ResourceExhaustedError("full for ever")};
  FailDecodes(d, &failing, false);
  const Answer answer = Generate(Text("hi"), absl::InfiniteDuration());
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("full for ever"));
  EXPECT_GE(d->decodes().size(), 2u);
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, AfterMaxAttemptsTheLastErrorIsTold) {
  options_.max_attempts = 3;
  FakeWorker* const p = Prefill();
  FakeWorker* const d = Decode();
  StartRouter();
  Failing failing = {.left = 1000, .status = absl::UnavailableError("it is gone")};
  FailPrefills(p, &failing, true);
  Answer answer = Generate(Tokens(200));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("gave up after"));
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr(p->address()));
  EXPECT_EQ(answer.num_summaries, 0);
  EXPECT_TRUE(answer.texts.empty());
  // gRPC may drop the acceptance that an error overtakes; such a try is not counted.
  EXPECT_GE(p->prefills().size(), 3u);
  size_t tries = p->prefills().size();
  failing.status = absl::InternalError("bug");
  answer = Generate(Tokens(200));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(p->prefills().size(), tries += 2) << "internal: once more";
  failing.status = absl::InvalidArgumentError("cannot work");
  answer = Generate(Tokens(200));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(p->prefills().size(), tries += 1);
  EXPECT_TRUE(d->WaitFor([&] { return d->cancels().size() == tries; }));
  EXPECT_TRUE(IsIdle());
}

TEST_F(RouterFixture, WithoutMigrationAFailureAfterTheFirstTokenEndsTheRequest) {
  options_.max_migrations = 0;
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
