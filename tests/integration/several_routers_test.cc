// Several routers side by side over the same workers, real processes.

#include <signal.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/fault_fixture.h"
#include "tests/integration/other_router.h"

namespace integration {
namespace {

using SeveralRoutersTest = FaultTest;

// Routers beside the system's own.
std::vector<std::unique_ptr<OtherRouter>> OtherRouters(FerrySystem& system,
                                                       const SystemOptions& options, int count) {
  std::vector<std::unique_ptr<OtherRouter>> others;
  for (int i = 0; i < count; ++i) {
    others.push_back(std::make_unique<OtherRouter>(system, options));
  }
  return others;
}

// A request that ends long after its router: nobody waits for all of it.
ferry::v1::GenerateRequest Endless(const std::vector<int32_t>& prompt) {
  ferry::v1::GenerateRequest request = ToRequest({prompt, 4000, 0});
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

TEST_F(SeveralRoutersTest, ARouterThatDiesLosesOnlyItsOwnStreams) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  options.num_decode = 2;
  const auto system = FerrySystem::Start(options);
  const auto others = OtherRouters(*system, options, 3);

  constexpr int kEach = 3;
  std::atomic<int> streaming{0};
  std::vector<std::unique_ptr<ferry::RunningGeneration>> lost;
  std::vector<Answer> kept;
  std::vector<Ask> asks;
  for (uint32_t i = 0; i < kEach; ++i) {
    lost.push_back(others[0]->client().Start(
        Endless(Prompt(300, 50 + i)),
        [&streaming, first = true](const ferry::v1::GenerateResponse&) mutable {
          streaming += std::exchange(first, false);
          return true;
        },
        [](const absl::Status&) {}));
    for (ferry::Client* client : {&system->client(), &others[1]->client(), &others[2]->client()}) {
      asks.push_back({Prompt(300, 60 + asks.size()), 200, asks.size()});
      kept.push_back(std::async(std::launch::async, [client, ask = asks.back()] {
        return client->Complete(ToRequest(ask));
      }));
    }
  }
  while (streaming < kEach) system->LetReportsPass(1);
  others[0]->process().Kill();
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

// What became of conversations whose turns came through any of some routers.
struct Outcome {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;

  double hit_rate() const { return static_cast<double>(cached_tokens) / prompt_tokens; }
};

// Conversations of the same system prompts; three people at a time have some each and take turns
// in them, and whatever they send goes to the next router.  Another `salt`: other conversations.
Outcome Converse(const std::vector<ferry::Client*>& routers, uint32_t salt,
                 const std::function<std::vector<int32_t>(int32_t, uint32_t)>& tokens) {
  constexpr int kPeople = 3;
  constexpr int kConversations = 8;  // of each
  constexpr int kTurns = 4;
  constexpr int kSystems = 6;
  std::vector<std::future<Outcome>> people;
  for (int person = 0; person < kPeople; ++person) {
    people.push_back(std::async(std::launch::async, [&, person] {
      Outcome outcome;
      std::vector<std::vector<int32_t>> histories;
      for (int i = 0; i < kConversations; ++i) {
        histories.push_back(tokens(128, salt + (person * kConversations + i) % kSystems));
      }
      for (int turn = 0; turn < kTurns; ++turn) {
        for (int i = 0; i < kConversations; ++i) {
          std::vector<int32_t>& history = histories[i];
          const int number = (turn * kPeople + person) * kConversations + i;
          const std::vector<int32_t> more = tokens(128, salt + 100 + number);
          history.insert(history.end(), more.begin(), more.end());
          const auto answer =
              routers[(number + turn) % routers.size()]->Complete(ToRequest({history, 2, 0}));
          if (!answer.ok()) {
            ADD_FAILURE() << answer.status();
            return outcome;
          }
          outcome.prompt_tokens += answer->summary.prompt_tokens();
          outcome.cached_tokens += answer->summary.cached_tokens();
        }
      }
      return outcome;
    }));
  }
  Outcome all;
  for (auto& person : people) {
    const Outcome one = person.get();
    all.prompt_tokens += one.prompt_tokens;
    all.cached_tokens += one.cached_tokens;
  }
  return all;
}

// That they herd nobody depends on the speeds that workers measure and on who is how late: it is
// tested where time is virtual, in tests/router/routing_simulation_test.cc.
TEST_F(SeveralRoutersTest, FourRoutersHitAsOftenAsOne) {
  SystemOptions options = Options();
  options.num_prefill = 3;
  options.num_decode = 2;
  const auto system = FerrySystem::Start(options);
  const auto others = OtherRouters(*system, options, 3);
  std::vector<ferry::Client*> routers = {&system->client()};
  const Outcome one = Converse(routers, 1000, Prompt);
  for (const auto& other : others) routers.push_back(&other->client());
  const Outcome four = Converse(routers, 2000, Prompt);
  ASSERT_FALSE(HasFailure());
  EXPECT_GT(one.hit_rate(), 0.5);
  EXPECT_GT(four.hit_rate(), one.hit_rate() - 0.03);
  RecordProperty("hit_rate_of_one", absl::StrCat(one.hit_rate()));
  RecordProperty("hit_rate_of_four", absl::StrCat(four.hit_rate()));
}

}  // namespace
}  // namespace integration
