// Edges that the router decides: what is refused, what waits, deadlines, drains, restarts.

#include <signal.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "status/grpc_status.h"
#include "tests/chaos/edge_fixture.h"

namespace chaos {
namespace {

using integration::WorkerProcess;
using testing::HasSubstr;

bool IsDecoding(const ferry::v1::LoadReport& load) { return load.running_requests() > 0; }

TEST_F(EdgeTest, E01_InvalidInputIsRefusedBeforeDispatch) {
  Start(Workers(1, 1));
  ferry::v1::GenerateRequest cold = Ask(10, 1, 4).request;
  cold.mutable_sampling()->set_temperature(-1);
  ferry::v1::GenerateRequest long_one = Ask(10, 1, 4).request;
  for (int i = 0; i < 9000; ++i) long_one.mutable_tokens()->add_ids(20);
  ferry::v1::GenerateRequest foreign = Ask(10, 1, 4).request;
  foreign.mutable_tokens()->add_ids(1u << 30);
  for (const ferry::v1::GenerateRequest* request : {&cold, &long_one, &foreign}) {
    const absl::Status status = Say(*request, absl::Seconds(20));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
  for (const WorkerProcess* worker : system().Living()) {
    EXPECT_EQ(Metric(*worker, "ferry_requests_total"), 0) << worker->name;
  }
  stage_->AskAll({Ask(100, 2, 4)});
}

TEST_F(EdgeTest, E02_AFullQueueRefusesWithAReason) {
  StageOptions options = Workers(1, 1);
  options.router_flags.insert(options.router_flags.end(), {"--max_queue", "2"});
  options.decode_flags = {"--num_blocks", "30"};
  Start(options);
  const Question question = Ask(900, 3, 40);
  std::vector<Asked> asked;
  for (int i = 0; i < 30; ++i) asked.push_back(Later(question, {.may_be_refused = true}));
  int num_answered = 0, num_refused = 0;
  for (Asked& one : asked) {
    const Outcome outcome = one.get();
    if (outcome.status.ok()) ++num_answered;
    if (!absl::IsResourceExhausted(outcome.status)) continue;
    ++num_refused;
    EXPECT_EQ(status::Reason(outcome.status), status::kQueueFull) << outcome.status;
  }
  EXPECT_GT(num_answered, 0);
  EXPECT_GT(num_refused, 0);
}

TEST_F(EdgeTest, E03_WithoutAPrefillWorkerShortPromptsAreServedAndLongOnesEnd) {
  StageOptions options = Workers(1, 1);
  options.router_flags.insert(options.router_flags.end(), {"--worker_wait_s", "1"});
  Start(options);
  system().ExpectDead(system().prefill(0).process);
  system().prefill(0).process.Kill();
  const Outcome outcome = stage_->observer().Ask(Ask(300, 4, 4), {.may_fail = true});
  EXPECT_EQ(outcome.status.code(), absl::StatusCode::kUnavailable) << outcome.status;
  stage_->AskAll({Ask(30, 5, 4)});
}

TEST_F(EdgeTest, E04_AClientThatLeavesTheQueueIsForgotten) {
  Start(Workers(1, 1));
  system().ExpectDead(system().decode(0).process);
  system().decode(0).process.Kill();
  std::atomic<bool> leave = false;
  Asked asked = Later(Ask(300, 6, 4), {.leave = &leave});
  EXPECT_TRUE(WaitUntil([&] { return RouterMetric("ferry_router_queue_requests") == 1; }));
  leave = true;
  EXPECT_EQ(asked.get().status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(WaitUntil([&] { return RouterMetric("ferry_router_queue_requests") == 0; }));
  EXPECT_EQ(RouterMetric("ferry_router_cancelled_total{phase=\"queued\"}"), 1);
}

TEST_F(EdgeTest, E09_ADeadlineIsKeptWhereverTheRequestIs) {
  Start(Workers(1, 1));
  const Manner by_router = {
      .deadline = kRouterDeadline, .deadline_is_routers = true, .may_run_out = true};
  // A prompt that takes longer is refused at once if that is foreseen, and else ended.
  const Outcome hurried = stage_->observer().Ask(
      LongPrompt(7), {.deadline = absl::Milliseconds(300), .may_run_out = true});
  EXPECT_TRUE(hurried.status.code() == absl::StatusCode::kDeadlineExceeded ||
              status::Reason(hurried.status) == status::kDeadline)
      << hurried.status;
  // While it is prefilled; while it decodes; while it waits for a worker that stands still.
  system().prefill(0).process.Signal(SIGSTOP);
  const Outcome prefilling = stage_->observer().Ask(Ask(300, 7, 4), by_router);
  EXPECT_EQ(prefilling.status.code(), absl::StatusCode::kDeadlineExceeded) << prefilling.status;
  EXPECT_EQ(stage_->Repair(), "");
  ExpectPromisesKept();
  Question endless = LongOutput(9);  // greedy: its branches are alike
  endless.request.mutable_sampling()->set_n(4);
  for (int branch = 1; branch < 4; ++branch) endless.expected.push_back(endless.expected[0]);
  const Outcome decoding = stage_->observer().Ask(endless, by_router);
  EXPECT_EQ(decoding.status.code(), absl::StatusCode::kDeadlineExceeded) << decoding.status;
  ExpectPromisesKept();
  system().decode(0).process.Signal(SIGSTOP);
  const Outcome waiting = stage_->observer().Ask(Ask(300, 9, 4), by_router);
  EXPECT_EQ(waiting.status.code(), absl::StatusCode::kDeadlineExceeded) << waiting.status;
  EXPECT_EQ(stage_->Repair(), "");
  stage_->AskAll({Ask(300, 9, 4)});
}

TEST_F(EdgeTest, E18_WorkersOfDifferentLayoutsAreNeverPaired) {
  Start(Workers(1, 2));
  WorkerProcess& other = system().decode(1);
  other.flags.insert(other.flags.end(), {"--kv_cache_dtype", "bfloat16"});
  system().Restart(other);
  EXPECT_TRUE(WaitUntil([&] {
    const auto models = system().client().ListModels();
    return models.ok() && models->size() == 1 && models->front().ready_decode_workers() == 2;
  }));
  for (uint32_t i = 0; i < 8; ++i) {
    const Outcome outcome = stage_->observer().Ask(Ask(200, 20 + i, 4), {});
    EXPECT_EQ(outcome.summary.decode_worker(), system().decode(0).front);
    EXPECT_EQ(outcome.summary.attempts(), 1u);
  }
  // Without the one that fits, the error says what does not.
  system().ExpectDead(system().decode(0).process);
  system().decode(0).process.Kill();
  EXPECT_TRUE(WaitUntil([&] {
    const auto models = system().client().ListModels();
    return models.ok() && models->size() == 1 && models->front().ready_decode_workers() == 1;
  }));
  const absl::Status status = Say(Ask(200, 30, 4).request, absl::Seconds(60));
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(status.message(), HasSubstr("bfloat16"));
}

TEST_F(EdgeTest, E19_ARouterThatRestartsFindsNothingLeftBehind) {
  Start(Workers(1, 1));
  const Question questions[] = {LongPrompt(10), LongOutput(11)};
  std::vector<Asked> asked;
  for (const Question& question : questions) asked.push_back(Later(question));
  ASSERT_NE(BusyDecode(IsDecoding), nullptr);
  stage_->observer().SetNobodyThere(true);
  system().KillRouter();
  for (Asked& one : asked) {
    EXPECT_EQ(one.get().status.code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(system().WaitUntilIdle(absl::Seconds(30)), "");
  system().RestartRouter();
  stage_->observer().SetNobodyThere(false);
  stage_->AskAll({Ask(500, 12, 8)});
}

TEST_F(EdgeTest, E20_ALostEventStreamMakesTheViewStaleAndItIsMadeGoodAgain) {
  Start(Workers(1, 1));
  const Question question = Ask(500, 13, 8);
  stage_->AskAll({question});
  const auto num_stale = [&] { return RouterMetric("ferry_router_index_untrusted_workers"); };
  EXPECT_EQ(num_stale(), 0);
  stage_->relay(system().prefill(0)).SetSilent(true);
  EXPECT_TRUE(WaitUntil([&] { return num_stale() > 0; }));
  EXPECT_EQ(stage_->Repair(), "");
  EXPECT_TRUE(WaitUntil([&] { return num_stale() == 0; }));
  const Outcome again = stage_->observer().Ask(question, {});
  EXPECT_GT(again.summary.cached_tokens(), 0u);
}

TEST_F(EdgeTest, E21_AWorkerThatDrainsFinishesWhatItHas) {
  Start(Workers(1, 2));
  const Question next_question = Ask(300, 15, 8);
  Asked asked = Later(LongOutput(14));
  WorkerProcess* const busy = BusyDecode(IsDecoding);
  ASSERT_NE(busy, nullptr);
  busy->process.Signal(SIGTERM);
  // New work goes to the other one, at once.
  const Outcome next = stage_->observer().Ask(next_question, {});
  EXPECT_NE(next.summary.decode_worker(), busy->front);
  const Outcome outcome = asked.get();
  EXPECT_EQ(outcome.summary.decode_worker(), busy->front);
  EXPECT_EQ(outcome.summary.attempts(), 1u);
  EXPECT_EQ(busy->process.Wait(absl::Seconds(30)), 0);
  system().Restart(*busy);
  EXPECT_EQ(stage_->Repair(), "");
}

}  // namespace
}  // namespace chaos
