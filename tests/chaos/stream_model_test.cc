#include "tests/chaos/stream_model.h"

#include "gtest/gtest.h"

namespace chaos {
namespace {

ferry::v1::GenerateResponse Tokens(std::initializer_list<uint32_t> ids, bool last = false,
                                   uint32_t branch = 0) {
  ferry::v1::GenerateResponse message;
  message.set_index(branch);
  for (const uint32_t id : ids) message.add_token_ids(id);
  if (last) message.set_finish_reason(ferry::v1::FINISH_REASON_LENGTH);
  return message;
}

ferry::v1::GenerateResponse Summary(uint32_t prompt, uint32_t completion) {
  ferry::v1::GenerateResponse message;
  message.mutable_summary()->set_prompt_tokens(prompt);
  message.mutable_summary()->set_completion_tokens(completion);
  return message;
}

class StreamModelTest : public testing::Test {
 protected:
  StreamModel model_{5, {{7, 8, 9}}};
};

TEST_F(StreamModelTest, AWholeAnswerIsRight) {
  model_.OnMessage(Tokens({7}));
  model_.OnMessage(Tokens({8, 9}, true));
  model_.OnMessage(Summary(5, 3));
  model_.OnEnd(absl::OkStatus());
  EXPECT_EQ(model_.wrong(), "");
  EXPECT_EQ(model_.num_tokens(), 3u);
}

TEST_F(StreamModelTest, AnErrorBehindABeginningIsRight) {
  model_.OnMessage(Tokens({7}));
  model_.OnEnd(absl::UnavailableError("gone"));
  EXPECT_EQ(model_.wrong(), "");
}

TEST_F(StreamModelTest, AnotherTokenIsWrong) {
  model_.OnMessage(Tokens({7, 9}));
  EXPECT_EQ(model_.wrong(), "token 1 of branch 0 is 9, a single engine says 8");
}

TEST_F(StreamModelTest, ATokenTwiceIsWrong) {
  model_.OnMessage(Tokens({7, 8}));
  model_.OnMessage(Tokens({8, 9}, true));
  EXPECT_EQ(model_.wrong(), "token 2 of branch 0 is 8, a single engine says 9");
}

TEST_F(StreamModelTest, TooManyAndTooFewTokensAreWrong) {
  model_.OnMessage(Tokens({7, 8, 9, 9}));
  EXPECT_EQ(model_.wrong(), "token 3 of branch 0 is 9, a single engine has ended");
  StreamModel other(5, {{7, 8, 9}});
  other.OnMessage(Tokens({7, 8}, true));
  EXPECT_EQ(other.wrong(), "branch 0 ends after 2 of 3 tokens");
}

TEST_F(StreamModelTest, OkWithoutAnEndIsWrong) {
  model_.OnMessage(Tokens({7, 8, 9}, true));
  model_.OnEnd(absl::OkStatus());
  EXPECT_EQ(model_.wrong(), "OK without a summary");
}

TEST_F(StreamModelTest, WhatComesBehindAnEndIsWrong) {
  model_.OnMessage(Tokens({7, 8, 9}, true));
  model_.OnMessage(Tokens({}, true));
  EXPECT_EQ(model_.wrong(), "two ends of a branch");
  StreamModel summarized(5, {{7}});
  summarized.OnMessage(Tokens({7}, true));
  summarized.OnMessage(Summary(5, 1));
  summarized.OnMessage(Summary(5, 1));
  EXPECT_EQ(summarized.wrong(), "a message behind the summary");
  StreamModel ended(5, {{7}});
  ended.OnEnd(absl::UnavailableError(""));
  ended.OnMessage(Tokens({7}));
  EXPECT_EQ(ended.wrong(), "a message behind the end");
  StreamModel twice(5, {{7}});
  twice.OnEnd(absl::UnavailableError(""));
  twice.OnEnd(absl::UnavailableError(""));
  EXPECT_EQ(twice.wrong(), "two ends");
}

TEST_F(StreamModelTest, OnlyARouterThatDiesMayBreakOffBehindItsSummary) {
  for (const bool router_died : {false, true}) {
    for (const absl::Status& status : {absl::UnavailableError("reset"), absl::InternalError("")}) {
      StreamModel model(5, {{7}});
      model.OnMessage(Tokens({7}, true));
      model.OnMessage(Summary(5, 1));
      model.OnEnd(status, router_died);
      EXPECT_EQ(model.wrong(),
                router_died && absl::IsUnavailable(status) ? "" : "a summary and an error");
    }
  }
}

TEST_F(StreamModelTest, TheClientsOwnClockMayEndTheCallBehindTheSummary) {
  for (const char* words : {"Deadline Exceeded", "deadline passed, decoding"}) {
    StreamModel model(5, {{7}});
    model.OnMessage(Tokens({7}, true));
    model.OnMessage(Summary(5, 1));
    model.OnEnd(absl::DeadlineExceededError(words));
    EXPECT_EQ(model.wrong(), words[0] == 'D' ? "" : "a summary and an error");
  }
}

TEST_F(StreamModelTest, EveryBranchHasItsOwnTextAndEnd) {
  StreamModel two(5, {{7, 8}, {1}});
  two.OnMessage(Tokens({1}, true, 1));
  two.OnMessage(Tokens({7, 8}, true, 0));
  two.OnMessage(Summary(5, 3));
  two.OnEnd(absl::OkStatus());
  EXPECT_EQ(two.wrong(), "");
  StreamModel early(5, {{7, 8}, {1}});
  early.OnMessage(Tokens({1}, true, 1));
  early.OnMessage(Summary(5, 1));
  EXPECT_EQ(early.wrong(), "a summary before the last branch's end");
  StreamModel strange(5, {{7, 8}});
  strange.OnMessage(Tokens({7}, false, 1));
  EXPECT_EQ(strange.wrong(), "branch 1 of 1");
}

TEST_F(StreamModelTest, AWrongSumIsWrong) {
  model_.OnMessage(Tokens({7, 8, 9}, true));
  model_.OnMessage(Summary(5, 2));
  EXPECT_EQ(model_.wrong(), "a summary of 5 + 2 tokens for 5 + 3");
}

TEST_F(StreamModelTest, ACancelOfNobodyIsWrong) {
  model_.OnEnd(absl::CancelledError(""));
  EXPECT_EQ(model_.wrong(), "cancelled by nobody");
  StreamModel left(5, {{7}});
  left.OnClientLeaves();
  left.OnEnd(absl::CancelledError(""));
  EXPECT_EQ(left.wrong(), "");
}

}  // namespace
}  // namespace chaos
