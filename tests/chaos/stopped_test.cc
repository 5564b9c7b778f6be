// Processes that stand still (SIGSTOP) and go on: a short stop delays, a long one is a death that
// is taken back; nothing is lost, nothing is written where it does not belong any more.

#include <signal.h>

#include "tests/integration/fault_fixture.h"

namespace integration {
namespace {

// Beyond five missed heartbeats, the stall time of a transfer and the router's patience.
constexpr absl::Duration kLong = absl::Seconds(7);

void StandStill(const ChildProcess& process, WorkerProcess& clock, absl::Duration duration) {
  process.Signal(SIGSTOP);
  // The reports of another process tell the time.
  FerrySystem::WaitForLoad(
      clock, [](const auto&) { return false; }, duration);
  process.Signal(SIGCONT);
}

TEST_F(FaultTest, AShortStopDelaysAndNothingElse) {
  const auto system = FerrySystem::Start(Options());
  const Ask prompt = {Prompt(LongPromptTokens(), 1), 30, 0};
  auto answer = CompleteAsync(*system, prompt);
  ASSERT_NE(FindBusyPrefill(*system, 1), nullptr);
  StandStill(system->prefill(0).process, system->decode(0), absl::Seconds(1));
  ASSERT_NE(FindBusyDecode(*system, 1), nullptr);
  StandStill(system->decode(0).process, system->prefill(0), absl::Seconds(1));
  auto completion = answer.get();
  ExpectRight(completion, prompt);
  EXPECT_EQ(completion->summary.attempts(), 1);

  const Ask output = {Prompt(300, 2), 900, 7};
  answer = CompleteAsync(*system, output);
  ASSERT_TRUE(FerrySystem::WaitForLoad(
      system->decode(0), [](const auto& load) { return load.running_requests() > 0; },
      absl::Seconds(20)));
  StandStill(system->decode(0).process, system->prefill(0), absl::Seconds(1));
  completion = answer.get();
  ExpectRight(completion, output);
  EXPECT_EQ(completion->summary.attempts(), 1);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FaultTest, APrefillWorkerThatStandsStillForLongIsReplacedAndComesBack) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  const auto system = FerrySystem::Start(options);
  const Ask ask = {Prompt(LongPromptTokens(), 3), 20, 0};
  auto answer = CompleteAsync(*system, ask);
  WorkerProcess* busy = FindBusyPrefill(*system, 2);
  ASSERT_NE(busy, nullptr);
  busy->process.Signal(SIGSTOP);
  const auto completion = answer.get();
  busy->process.Signal(SIGCONT);
  ExpectRight(completion, ask);
  EXPECT_NE(completion->summary.prefill_worker(), busy->address);
  EXPECT_EQ(system->WaitUntilReady(absl::Seconds(20)), "");
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FaultTest, ADecodeWorkerThatStandsStillForLongIsReplacedAndComesBack) {
  SystemOptions options = Options();
  options.num_decode = 2;
  const auto system = FerrySystem::Start(options);
  const Ask ask = {Prompt(LongPromptTokens(), 4), 20, 0};
  auto answer = CompleteAsync(*system, ask);
  WorkerProcess* busy = FindBusyDecode(*system, 2);
  ASSERT_NE(busy, nullptr);
  busy->process.Signal(SIGSTOP);
  const auto completion = answer.get();
  busy->process.Signal(SIGCONT);
  ExpectRight(completion, ask);
  EXPECT_NE(completion->summary.decode_worker(), busy->address);
  EXPECT_EQ(system->WaitUntilReady(absl::Seconds(20)), "");
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
  // It takes part again.
  std::vector<Ask> asks;
  std::vector<Answer> answers;
  for (uint32_t i = 0; i < 8; ++i) {
    asks.push_back({Prompt(300, 50 + i), 20, i});
    answers.push_back(CompleteAsync(*system, asks.back()));
  }
  for (size_t i = 0; i < asks.size(); ++i) ExpectRight(answers[i].get(), asks[i]);
}

TEST_F(FaultTest, ARouterThatStandsStillLosesNothing) {
  const auto system = FerrySystem::Start(Options());
  std::vector<Ask> asks;
  std::vector<Answer> answers;
  for (uint32_t i = 0; i < 8; ++i) {
    asks.push_back(
        {Prompt(i == 0 ? LongPromptTokens() : 200 + 40 * static_cast<int32_t>(i), 70 + i), 400, i});
    answers.push_back(CompleteAsync(*system, asks.back()));
  }
  ASSERT_TRUE(FerrySystem::WaitForLoad(
      system->decode(0), [](const auto& load) { return load.running_requests() > 1; },
      absl::Seconds(20)));
  StandStill(system->router(), system->prefill(0), kLong);
  for (size_t i = 0; i < asks.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectRight(answers[i].get(), asks[i]);
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

}  // namespace
}  // namespace integration
