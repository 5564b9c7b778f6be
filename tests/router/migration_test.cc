// What happens to an output that has begun when its decode worker fails: it goes on elsewhere, and
// the client sees nothing but a gap; or it ends with an error, and what was sent stays.

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>

#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "tests/router/router_fixture.h"

namespace router {
namespace {

using fakes::DecodeCall;
using fakes::FakeWorker;
using fakes::PrefillCall;
using ferry::v1::FINISH_REASON_LENGTH;
using ferry::v1::FINISH_REASON_STOP;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

const absl::Status kDied = absl::UnavailableError("died");

class MigrationTest : public RouterFixture {
 protected:
  using Script = std::function<void(DecodeCall&)>;

  // A prefill worker that only accepts, and two decode workers: call `i` runs script `i`, whoever
  // gets it.
  void StartWith(std::vector<Script> scripts) {
    p_ = Prefill();
    p_->on_prefill = [this](std::shared_ptr<PrefillCall> call) {
      call->Accept();
      WhenBothCame(call->request.spec().key().attempt(), [] {});
    };
    d1_ = Decode();
    d2_ = Decode();
    scripts_ = std::move(scripts);
    for (FakeWorker* d : {d1_, d2_}) {
      d->on_decode = [this](std::shared_ptr<DecodeCall> call) {
        call->Accept();
        const auto answer = [call, script = scripts_.at(num_calls_++)] { script(*call); };
        if (call->request.local_prefill()) return answer();
        WhenBothCame(call->request.spec().key().attempt(), answer);
      };
    }
    StartRouter();
  }
  // The decode requests by attempt.
  std::vector<ferry::v1::DecodeRequest> Tries() const {
    std::vector<ferry::v1::DecodeRequest> tries = d1_->decodes();
    for (const auto& one : d2_->decodes()) tries.push_back(one);
    std::sort(tries.begin(), tries.end(), [](const auto& a, const auto& b) {
      return a.spec().key().attempt() < b.spec().key().attempt();
    });
    return tries;
  }
  // A decode worker has nothing to answer before the prefill worker has heard of the try: the
  // second of the two calls of an attempt runs what both have brought.
  void WhenBothCame(uint32_t attempt, const std::function<void()>& answer) {
    std::function<void()> first;
    {
      std::lock_guard lock(mutex_);
      const auto [it, is_first] = came_.try_emplace(attempt, answer);
      if (is_first) return;
      first = it->second;
    }
    first();
    answer();
  }
  static Script Dies(const std::string& after, const absl::Status& status = kDied) {
    return [after, status](DecodeCall& call) {
      call.Tokens(0, after);
      call.End(status);
    };
  }
  static Script Finishes(const std::string& rest,
                         ferry::v1::FinishReason reason = FINISH_REASON_LENGTH) {
    return [rest, reason](DecodeCall& call) { call.Answer(rest, reason); };
  }

  FakeWorker* p_ = nullptr;
  FakeWorker* d1_ = nullptr;
  FakeWorker* d2_ = nullptr;
  std::vector<Script> scripts_;
  std::atomic<size_t> num_calls_{0};
  std::mutex mutex_;                                // guards came_
  std::map<uint32_t, std::function<void()>> came_;  // by attempt
};

TEST_F(MigrationTest, TheOutputGoesOnBehindWhatHasBeenSent) {
  StartWith({Dies("par"), Finishes("tial")});
  ferry::v1::GenerateRequest request = Tokens(200, /*first=*/1, /*max_tokens=*/7);
  request.mutable_sampling()->set_min_tokens(5);
  request.mutable_sampling()->set_seed(99);
  request.mutable_sampling()->set_presence_penalty(1);
  request.mutable_sampling()->set_logprobs(2);
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "partial");
  EXPECT_THAT(answer.tokens.at(0), ElementsAre('p', 'a', 'r', 't', 'i', 'a', 'l'));
  ASSERT_EQ(answer.logprobs.size(), 7u);
  EXPECT_EQ(answer.logprobs[3].chosen().token(), "t");
  EXPECT_EQ(answer.reasons.at(0), FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.num_summaries, 1);
  EXPECT_EQ(answer.summary.prompt_tokens(), 200u);
  EXPECT_EQ(answer.summary.completion_tokens(), 7u);
  EXPECT_EQ(answer.summary.attempts(), 2u);
  EXPECT_EQ(answer.summary.migrations(), 1u);

  EXPECT_EQ(d1_->decodes().size(), 1u);
  EXPECT_EQ(d2_->decodes().size(), 1u) << "not the one that has failed";
  const ferry::v1::RequestSpec first = Tries()[0].spec();
  const ferry::v1::RequestSpec second = Tries()[1].spec();
  std::vector<uint32_t> known(request.tokens().ids().begin(), request.tokens().ids().end());
  known.insert(known.end(), {'p', 'a', 'r'});
  EXPECT_EQ(std::vector<uint32_t>(second.token_ids().begin(), second.token_ids().end()), known);
  EXPECT_EQ(second.num_prompt_tokens(), 200u);
  EXPECT_EQ(second.sampling().SerializeAsString(), first.sampling().SerializeAsString());
  ASSERT_EQ(p_->prefills().size(), 2u);
  EXPECT_EQ(p_->prefills()[1].spec().token_ids_size(), 203);
  EXPECT_EQ(p_->prefills()[1].spec().num_prompt_tokens(), 200u);
  EXPECT_TRUE(IsIdle());
}

TEST_F(MigrationTest, AStopStringMayBeginBeforeTheFailure) {
  StartWith({Dies("part"), [](DecodeCall& call) { call.Tokens(0, "ial"); }});
  ferry::v1::GenerateRequest request = Text("hi");
  request.mutable_sampling()->add_stop("tia");
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "par");
  EXPECT_EQ(answer.reasons.at(0), FINISH_REASON_STOP);
  EXPECT_EQ(answer.summary.completion_tokens(), 6u);
}

TEST_F(MigrationTest, SeveralBranchesAreDrawnAgainAndNothingIsSentTwice) {
  StartWith({[](DecodeCall& call) {
               call.Tokens(0, "ab");
               call.Tokens(1, "x", FINISH_REASON_STOP);
               call.End(kDied);
             },
             [](DecodeCall& call) {
               call.Tokens(1, "y", FINISH_REASON_STOP);  // has ended: it may be anything
               call.Tokens(0, "a");
               call.Tokens(0, "bcd", FINISH_REASON_LENGTH);
               call.Done();
               call.End(absl::OkStatus());
             }});
  ferry::v1::GenerateRequest request = Text("hi");
  request.mutable_sampling()->set_n(2);
  request.mutable_sampling()->set_logprobs(0);
  const Answer answer = Generate(request);
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "abcd");
  EXPECT_EQ(answer.texts.at(1), "x");
  EXPECT_EQ(answer.logprobs.size(), 4u);
  EXPECT_EQ(answer.summary.completion_tokens(), 5u);
  EXPECT_EQ(Tries().back().spec().token_ids_size(), Tries().front().spec().token_ids_size());
  EXPECT_TRUE(IsIdle());
}

TEST_F(MigrationTest, ABranchThatComesOutDifferentlyIsAnError) {
  StartWith({Dies("ab"), [](DecodeCall& call) { call.Tokens(0, "aXc"); }});
  ferry::v1::GenerateRequest request = Text("hi");
  request.mutable_sampling()->set_n(2);
  const Answer answer = Generate(request);
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(
      std::string(answer.status.message()),
      AllOf(HasSubstr("token 1 of branch 0 is 88 there, but 98 has been sent"), HasSubstr("died")));
  EXPECT_EQ(answer.texts.at(0), "ab");
  EXPECT_EQ(answer.num_summaries, 0);
  EXPECT_TRUE(IsIdle());
}

TEST_F(MigrationTest, OnlyAsOftenAsAllowed) {
  StartWith({Dies("par"), Dies("ti"), Finishes("never")});
  const Answer answer = Generate(Text("hi"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()), HasSubstr("died"));
  EXPECT_EQ(answer.texts.at(0), "parti");
  EXPECT_TRUE(answer.reasons.empty());
  EXPECT_EQ(answer.num_summaries, 0);
  EXPECT_EQ(num_calls_, 2u);
  EXPECT_TRUE(IsIdle());
}

TEST_F(MigrationTest, ATryThatFailsBeforeItsFirstTokenIsNoMigration) {
  StartWith({Dies("par"), [](DecodeCall& call) { call.End(kDied); }, Finishes("tial")});
  const Answer answer = Generate(Text("hi"));
  ASSERT_EQ(answer.status, absl::OkStatus());
  EXPECT_EQ(answer.texts.at(0), "partial");
  EXPECT_EQ(answer.summary.attempts(), 3u);
  EXPECT_EQ(answer.summary.migrations(), 1u);
}

TEST_F(MigrationTest, AReaderThatIsTooSlowIsNotMovedOn) {
  StartWith({Dies("par", absl::ResourceExhaustedError("the reader is too slow"))});
  EXPECT_EQ(Generate(Text("hi")).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(num_calls_, 1u);
}

TEST_F(MigrationTest, WhatTheNextWorkerRefusesIsNotTheClientsMistake) {
  StartWith({Dies("par"), [](DecodeCall& call) {
               call.End(absl::InvalidArgumentError("penalties over 5000 tokens"));
             }});
  const Answer answer = Generate(Text("hi"));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(answer.status.message()),
              AllOf(HasSubstr("penalties over 5000 tokens"), HasSubstr("died")));
}

TEST_F(MigrationTest, TheOutputSoFarIsLookedForInTheCaches) {
  std::shared_ptr<DecodeCall> open;
  const std::string output(70, 'x');
  StartWith({[](DecodeCall&) {}, Finishes("y")});
  for (FakeWorker* d : {d1_, d2_}) {
    d->on_decode = [&](std::shared_ptr<DecodeCall> call) {
      call->Accept();
      if (num_calls_++ > 0) return call->Answer("y");
      call->Tokens(0, output);
      open = call;
    };
  }
  ferry::v1::GenerateRequest request = Tokens(100, 1, /*max_tokens=*/71);
  const auto call = Start(request);
  ASSERT_TRUE(p_->WaitFor([&] { return call->num_messages() > 0; }));
  FakeWorker* const other = d1_->decodes().empty() ? d1_ : d2_;
  ferry::v1::GenerateRequest continued = request;
  for (const char c : output) continued.mutable_tokens()->add_ids(static_cast<uint8_t>(c));
  other->Store(ChainOf(continued));  // 128 of 170 tokens: the rest may be computed there
  const WorkerSlot slot = other == d1_ ? 1 : 2;
  ASSERT_TRUE(Eventually([&] {
    const auto hits = router_->index().Lookup(ChainOf(continued), EventLoop::Now());
    return slot < static_cast<WorkerSlot>(hits.size()) && hits[slot] == 2;
  }));
  open->End(kDied);
  EXPECT_EQ(call->Wait().status, absl::OkStatus());
  ASSERT_EQ(other->decodes().size(), 1u);
  EXPECT_TRUE(other->decodes()[0].local_prefill());
}

}  // namespace
}  // namespace router
