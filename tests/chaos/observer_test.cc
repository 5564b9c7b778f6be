// The observer over a router that does not keep its promises: each kind is noticed.

#include "tests/chaos/observer.h"

#include <atomic>

#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"

namespace chaos {
namespace {

// Answers every request as the test says.
class FakeRouter final : public ferry::v1::Inference::Service {
 public:
  enum Behaviour { kRight, kOtherText, kUnavailable, kUnavailableLater, kForgets };
  std::atomic<Behaviour> behaviour = kRight;

  grpc::Status Generate(grpc::ServerContext* context, const ferry::v1::GenerateRequest*,
                        grpc::ServerWriter<ferry::v1::GenerateResponse>* stream) override {
    ferry::v1::GenerateResponse message;
    if (behaviour == kUnavailable) return {grpc::StatusCode::UNAVAILABLE, "nobody"};
    message.add_token_ids(behaviour == kOtherText ? 9 : 1);
    stream->Write(message);
    if (behaviour == kUnavailableLater) return {grpc::StatusCode::UNAVAILABLE, "gone"};
    // The deadline that it was to keep itself passes, and more than the grace.
    const absl::Time until = absl::Now() + absl::Seconds(2);
    while (behaviour == kForgets && !context->IsCancelled() && absl::Now() < until) {
      absl::SleepFor(absl::Milliseconds(10));  // a router that is busy with something else
    }
    message.Clear();
    message.set_finish_reason(ferry::v1::FINISH_REASON_LENGTH);
    message.mutable_summary()->set_completion_tokens(1);
    message.mutable_summary()->set_prompt_tokens(1);
    stream->Write(message);
    return grpc::Status::OK;
  }
};

class ObserverTest : public testing::Test {
 protected:
  ObserverTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&router_);
    server_ = builder.BuildAndStart();
    observer_ = std::make_unique<Observer>("127.0.0.1:" + std::to_string(port));
    question_.request.mutable_tokens()->add_ids(5);
    question_.expected = {{1}};
  }
  Tally Ask(FakeRouter::Behaviour behaviour, const Manner& manner = {}) {
    router_.behaviour = behaviour;
    observer_->Ask(question_, manner);
    return observer_->Take();
  }

  FakeRouter router_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Observer> observer_;
  Question question_;
};

TEST_F(ObserverTest, ARightAnswerIsNeitherLostNorWrongNorLate) {
  const Tally tally = Ask(FakeRouter::kRight);
  EXPECT_EQ(tally.requests, 1);
  EXPECT_EQ(tally.endings.at("OK"), 1);
  EXPECT_EQ(tally.lost + tally.wrong + tally.late, 0);
  EXPECT_TRUE(tally.faults_found.empty());
}

TEST_F(ObserverTest, OtherTextIsWrong) {
  const Tally tally = Ask(FakeRouter::kOtherText);
  EXPECT_EQ(tally.wrong, 1);
  EXPECT_EQ(tally.faults_found.size(), 1u);
}

TEST_F(ObserverTest, AnErrorBeforeTheFirstTokenIsALoss) {
  EXPECT_EQ(Ask(FakeRouter::kUnavailable).lost, 1);
  EXPECT_EQ(Ask(FakeRouter::kUnavailable, {.may_fail = true}).lost, 0);
  EXPECT_EQ(Ask(FakeRouter::kUnavailableLater).lost, 0);
  observer_->SetNobodyThere(true);
  EXPECT_EQ(Ask(FakeRouter::kUnavailable).lost, 0);
}

TEST_F(ObserverTest, AnEndBehindTheDeadlineIsLate) {
  const Manner manner = {.deadline = absl::Milliseconds(100), .deadline_is_routers = true};
  const Tally tally = Ask(FakeRouter::kForgets, manner);
  EXPECT_EQ(tally.late, 1);
  EXPECT_GT(tally.worst_overrun, absl::Seconds(1));
}

TEST_F(ObserverTest, ADeadlineThatNeedNotPassIsALoss) {
  const Manner manner = {.deadline = absl::Milliseconds(300)};
  EXPECT_EQ(Ask(FakeRouter::kForgets, manner).lost, 1);
  const Manner hurried = {.deadline = absl::Milliseconds(300), .may_run_out = true};
  const Tally tally = Ask(FakeRouter::kForgets, hurried);
  EXPECT_EQ(tally.lost, 0);
  EXPECT_EQ(tally.endings.at("DEADLINE_EXCEEDED"), 1);
}

}  // namespace
}  // namespace chaos
