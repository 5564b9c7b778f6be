// Workers that take different lengths: what the router says that it takes is what some pair of them
// serves, and whoever asks for more is told how much, and who is away that takes it.

#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "status/public_message.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::FakeWorker;
using testing::HasSubstr;

constexpr auto kPrefill = ferry::v1::WORKER_ROLE_PREFILL;
constexpr auto kDecode = ferry::v1::WORKER_ROLE_DECODE;
constexpr auto kBoth = ferry::v1::WORKER_ROLE_BOTH;

class ContextTest : public RouterFixture {
 protected:
  ferry::v1::ModelCard Card() { return ListModels().models(0); }
  void ExpectContext(uint32_t tokens) {
    const ferry::v1::ModelCard card = Card();
    EXPECT_EQ(card.max_model_len(), tokens);
    EXPECT_TRUE(card.ready());
    EXPECT_EQ(Generate(Tokens(static_cast<int>(tokens) - 1, 1, 1)).status, absl::OkStatus());
  }
  void ExpectTooLong(int prompt_tokens, int context) {
    EXPECT_EQ(Generate(Tokens(prompt_tokens, 1, 1)).status,
              absl::InvalidArgumentError(absl::StrCat("prompt has ", prompt_tokens,
                                                      " tokens: the context is ", context,
                                                      ", and at least one token must fit behind "
                                                      "it")));
  }
  // A request that waits for the one worker that takes its prompt, which has left its port.
  void StartForOneThatIsAway() {
    options_.worker_wait = absl::Seconds(20);
    Add({.role = kPrefill, .max_model_len = 1000});
    FakeWorker* const large = Add({.role = kPrefill, .max_model_len = 2000});
    Add({.role = kDecode, .max_model_len = 3000});
    StartRouter();
    away_port_ = large->port();
    large->Kill();
    ASSERT_TRUE(WaitForWorkers(1, 1));
    waiting_ = Start(Tokens(1500));
    ASSERT_TRUE(Eventually([&] { return router_->num_running() == 1; }));
  }

  int32_t away_port_ = 0;
  std::unique_ptr<RunningCall> waiting_;
};

TEST_F(ContextTest, APairTakesWhatTheSmallerOfTheTwoTakes) {
  Add({.role = kPrefill, .max_model_len = 1000});
  Add({.role = kDecode, .max_model_len = 3000});
  StartRouter();
  ExpectContext(1000);
  ExpectTooLong(1000, 1000);
  // The output is the decode worker's matter.
  EXPECT_EQ(Generate(Tokens(900, 1, 2100)).status, absl::OkStatus());
  EXPECT_EQ(Generate(Tokens(900, 1, 2101)).status,
            absl::InvalidArgumentError("sampling.max_tokens is 2101: with a prompt of 900 tokens "
                                       "the context of 3000 is passed"));
}

TEST_F(ContextTest, ACacheMayBeSmallerThanTheContext) {
  Add({.role = kPrefill, .num_blocks = 10});  // of 64 tokens
  Decode();
  StartRouter();
  ExpectContext(640);
  ExpectTooLong(640, 640);
}

TEST_F(ContextTest, TheLargestPairCountsAndNotTheLargestWorkers) {
  Add({.role = kPrefill, .max_model_len = 1000, .links = {"tcp"}});
  Add({.role = kDecode, .max_model_len = 2000, .links = {"tcp"}});
  Add({.role = kPrefill, .max_model_len = 1500, .links = {"shm"}});
  Add({.role = kDecode, .max_model_len = 1200, .links = {"shm"}});
  StartRouter();
  ExpectContext(1200);
  // A worker that is started anew may mend that.
  const absl::Status misfits = Generate(Tokens(1300)).status;
  EXPECT_EQ(misfits.code(), absl::StatusCode::kUnavailable) << misfits;
  EXPECT_THAT(std::string(misfits.message()),
              HasSubstr("the longest prompt that they take has 1199 tokens; no data link in "
                        "common: "));
  ExpectTooLong(1500, 1500);
}

// Its prompts may be of any length that it holds.
TEST_F(ContextTest, AWorkerThatComputesEveryPromptIsAPairOfItsOwn) {
  Add({.role = kPrefill, .max_model_len = 1000});
  Add({.role = kDecode, .max_model_len = 2000});
  Add({.role = kBoth, .max_model_len = 1300});
  StartRouter();
  ExpectContext(1300);
  ExpectTooLong(1300, 1300);
}

TEST_F(ContextTest, ShortPromptsNeedOnlyTheDecodeWorker) {
  Add({.role = kPrefill, .max_model_len = 1000});
  Add({.role = kDecode, .max_model_len = 3000, .links = {"carrier pigeon"}});
  Add({.role = kDecode, .max_model_len = 2000});
  StartRouter();
  ExpectContext(1000);
  EXPECT_EQ(Generate(Tokens(64, 1, 2936)).status, absl::OkStatus()) << "--local_prefill_tokens";
}

TEST_F(ContextTest, WorkersThatAreAwayDoNotCountAndAreNamedWithWhatTheyTake) {
  Add({.role = kPrefill, .max_model_len = 1000});
  FakeWorker* const large = Add({.role = kPrefill, .max_model_len = 2000});
  Add({.role = kDecode, .max_model_len = 3000});
  StartRouter();
  ExpectContext(2000);
  ExpectTooLong(2000, 2000);
  const int32_t port = large->port();
  large->Kill();
  ASSERT_TRUE(WaitForWorkers(1, 1));
  ExpectContext(1000);
  const absl::Status away = Generate(Tokens(1500)).status;
  EXPECT_EQ(away.code(), absl::StatusCode::kUnavailable) << away;
  EXPECT_THAT(std::string(away.message()),
              HasSubstr("no pair of workers can serve a prompt of 1500 tokens for model m now: 1 "
                        "decode worker, 1 worker that prefills any length; the longest prompt that "
                        "they take has 999 tokens; workers that take more are away; worker " +
                        large->address()));
  EXPECT_THAT(std::string(away.message()), HasSubstr("which takes 2000 tokens"));
  ExpectTooLong(2000, 2000);  // nor did anybody before
  EXPECT_EQ(Generate(Tokens(500)).status, absl::OkStatus());
  // It comes back, and takes less.
  FakeWorker small({.role = kPrefill, .max_model_len = 1200, .port = port}, &directory_);
  ASSERT_TRUE(WaitForWorkers(2, 1));
  ExpectContext(1200);
  ExpectTooLong(1500, 1200);
}

TEST_F(ContextTest, ARequestWaitsForTheWorkerThatTakesIt) {
  ASSERT_NO_FATAL_FAILURE(StartForOneThatIsAway());
  FakeWorker again({.role = kPrefill, .max_model_len = 2000, .port = away_port_}, &directory_);
  const Answer answer = waiting_->Wait();
  EXPECT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.summary.prefill_worker(), again.address());
}

TEST_F(ContextTest, OneThatWaitsInVainForItIsToldSo) {
  ASSERT_NO_FATAL_FAILURE(StartForOneThatIsAway());
  FakeWorker small({.role = kPrefill, .max_model_len = 1200, .port = away_port_}, &directory_);
  EXPECT_EQ(waiting_->Wait().status,
            absl::InvalidArgumentError("prompt has 1500 tokens: the context is 1200, and at least "
                                       "one token must fit behind it"));
}

TEST_F(ContextTest, OneThatDrainsIsAwayAsWell) {
  Add({.role = kPrefill, .max_model_len = 1000});
  FakeWorker* const large = Add({.role = kPrefill, .max_model_len = 2000});
  Add({.role = kDecode, .max_model_len = 3000});
  StartRouter();
  large->SetState(ferry::v1::WORKER_STATE_DRAINING);
  ASSERT_TRUE(WaitForWorkers(1, 1));
  ExpectContext(1000);
  const absl::Status away = Generate(Tokens(1500)).status;
  EXPECT_EQ(away.code(), absl::StatusCode::kUnavailable) << away;
  EXPECT_THAT(std::string(away.message()),
              HasSubstr(absl::StrCat("worker ", large->address(),
                                     " takes no more requests (prefill, draining), which takes "
                                     "2000 tokens")));
}

// Nobody has a partner now: what is known is what counts, and no request is wrong for it.
TEST_F(ContextTest, WithoutAPairTheContextIsThatOfTheWorkersThatAreKnown) {
  FakeWorker* const p = Add({.role = kPrefill, .max_model_len = 1000});
  Add({.role = kDecode, .max_model_len = 3000});
  StartRouter();
  p->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 1));
  EXPECT_FALSE(Card().ready());
  EXPECT_EQ(Card().max_model_len(), 1000u);
  EXPECT_EQ(Generate(Tokens(900)).status.code(), absl::StatusCode::kUnavailable);
  ExpectTooLong(1000, 1000);
}

TEST_F(ContextTest, WhoNeverHadAPartnerMayGetOneThatTakesAsMuch) {
  Add({.role = kDecode, .max_model_len = 3000});
  StartRouter();
  EXPECT_EQ(Generate(Tokens(2900)).status.code(), absl::StatusCode::kUnavailable);
  ExpectTooLong(3000, 3000);
}

TEST_F(ContextTest, WhatATryHasShownNotToFitDoesNotCountEither) {
  Add({.role = kPrefill, .max_model_len = 1000});
  FakeWorker* const large = Add({.role = kPrefill, .max_model_len = 2000});
  Add({.role = kDecode, .max_model_len = 3000});
  large->on_prefill = [](std::shared_ptr<fakes::PrefillCall> call) {
    call->End(status::WithReason(absl::FailedPreconditionError("no"), status::kIncompatible));
  };
  StartRouter();
  EXPECT_EQ(Card().max_model_len(), 2000u);
  EXPECT_EQ(Generate(Tokens(1500)).status.code(), absl::StatusCode::kUnavailable);
  ExpectContext(1000);
}

}  // namespace
}  // namespace router
