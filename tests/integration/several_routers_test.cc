// Two routers side by side over the same workers, real processes.

#include <signal.h>

#include <atomic>
#include <utility>

#include "tests/integration/fault_fixture.h"
#include "tests/integration/other_router.h"

namespace integration {
namespace {

using SeveralRoutersTest = FaultTest;

TEST_F(SeveralRoutersTest, ARouterThatDiesLosesOnlyItsOwnStreams) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  options.num_decode = 2;
  const auto system = FerrySystem::Start(options);
  OtherRouter other(*system, options);

  constexpr int kEach = 3;
  std::atomic<int> streaming{0};
  std::vector<std::unique_ptr<ferry::RunningGeneration>> lost;
  std::vector<Answer> kept;
  std::vector<Ask> asks;
  for (uint32_t i = 0; i < kEach; ++i) {
    // Ends long after the router: nobody waits for all of it.
    ferry::v1::GenerateRequest request = ToRequest({Prompt(300, 50 + i), 4000, 0});
    request.mutable_sampling()->set_ignore_eos(true);
    lost.push_back(other.client().Start(
        request,
        [&streaming, first = true](const ferry::v1::GenerateResponse&) mutable {
          streaming += std::exchange(first, false);
          return true;
        },
        [](const absl::Status&) {}));
    asks.push_back({Prompt(300, 60 + i), 200, i});
    kept.push_back(CompleteAsync(*system, asks.back()));
  }
  while (streaming < kEach) system->LetReportsPass(1);
  other.process().Kill();
  for (const auto& one : lost) EXPECT_EQ(one->Wait().code(), absl::StatusCode::kUnavailable);
  for (size_t i = 0; i < kept.size(); ++i) ExpectRight(kept[i].get(), asks[i]);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

// What one router has had computed the other one finds: the second of two equal prefixes goes to
// the worker that has it, whichever router it comes through.
TEST_F(SeveralRoutersTest, APrefixIsFoundThroughEitherRouter) {
  SystemOptions options = Options();
  options.num_prefill = 3;
  const auto system = FerrySystem::Start(options);
  OtherRouter other(*system, options);
  std::vector<int32_t> prompt = Prompt(640, 70);
  const auto first = system->client().Complete(ToRequest({prompt, 4, 0}));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->summary.cached_tokens(), 0);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
  const std::vector<int32_t> more = Prompt(100, 71);
  prompt.insert(prompt.end(), more.begin(), more.end());
  const Ask ask = {prompt, 4, 0};
  const auto second = other.client().Complete(ToRequest(ask));
  ExpectRight(second, ask);
  EXPECT_EQ(second->summary.cached_tokens(), 640);
  other.process().Signal(SIGTERM);
  EXPECT_EQ(other.process().Wait(absl::Seconds(60)), 0);
}

}  // namespace
}  // namespace integration
