// Every process of a system is ended by SIGTERM and started anew, one after the other, while
// clients ask: the "Upgrades" of docs/operations.md.  No request is lost, and no output has to go
// on elsewhere: who drains finishes what it has.

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/other_router.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

constexpr int kNumClients = 6;
constexpr int kAnswersBetween = 2 * kNumClients;  // with all processes there
constexpr absl::Duration kPatience = absl::Seconds(120);

// Clients of the SDK, with its defaults, that ask at random until they are stopped; each answer is
// compared with a single engine's.
class Load {
 public:
  Load(const std::vector<std::string>& routers, const std::vector<Ask>& asks,
       const std::vector<std::vector<int32_t>>& expected)
      : asks_(asks), expected_(expected) {
    for (int c = 0; c < kNumClients; ++c) {
      // As a service's name would lead them: to the first router that can be reached, another one
      // for every other client.
      const std::string address = absl::StrCat("ipv4:", routers[c % routers.size()], ",",
                                               routers[(c + 1) % routers.size()]);
      threads_.emplace_back([this, address, c] { Run(address, c); });
    }
  }
  ~Load() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

  // Until `count` more requests have been answered; false: not within kPatience.
  bool WaitForAnswers(int64_t count) {
    std::unique_lock lock(mutex_);
    const int64_t wanted = num_answers_ + count;
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(kPatience),
                             [&] { return num_answers_ >= wanted; });
  }

 private:
  void Run(const std::string& address, int seed) {
    const auto client = *ferry::Client::Create({.address = address, .timeout = kPatience});
    std::mt19937 random(seed);
    while (!stop_) {
      const size_t i = random() % asks_.size();
      const auto completion = client->Complete(ToRequest(asks_[i]));
      EXPECT_TRUE(completion.ok()) << "lost: " << completion.status();
      if (completion.ok()) {
        EXPECT_EQ(Tokens(*completion), expected_[i]) << "wrong";
      }
      const std::lock_guard lock(mutex_);
      ++num_answers_;
      changed_.notify_all();
    }
  }

  const std::vector<Ask>& asks_;
  const std::vector<std::vector<int32_t>>& expected_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;  // guards num_answers_
  std::condition_variable changed_;
  int64_t num_answers_ = 0;
  std::vector<std::thread> threads_;
};

TEST(RollingUpgradeTest, EveryProcessIsReplacedAndNothingIsLost) {
  SystemOptions options;
  options.model_dir = std::getenv("FERRY_DEMO_MODEL");
  options.num_prefill = 2;
  options.num_decode = 2;
  options.prefill_flags = {"--num_blocks", "150", "--num_threads", "1"};
  options.decode_flags = {"--num_blocks", "150", "--num_threads", "1"};
  options.router_flags = {"--local_prefill_tokens", "40"};
  SingleEngine oracle(options.model_dir);
  const int32_t vocab = oracle.engine().network().config().vocab_size;
  std::vector<Ask> asks;
  std::vector<std::vector<int32_t>> expected;
  for (uint32_t i = 0; i < 24; ++i) {
    asks.push_back({MakePrompt(1 + static_cast<int32_t>(i * 61 % 640), i, vocab),
                    i % 8 == 7 ? 350 : 1 + static_cast<int32_t>(i * 37 % 100),
                    i % 2 == 0 ? 0 : 100 + i});
    expected.push_back(Expected(oracle, asks.back()));
  }
  const auto system = FerrySystem::Start(options);
  OtherRouter other(*system, options);
  {
    Load load({system->router_address(), other.address()}, asks, expected);
    ASSERT_TRUE(load.WaitForAnswers(kAnswersBetween));
    for (WorkerProcess* worker :
         {&system->decode(0), &system->decode(1), &system->prefill(0), &system->prefill(1)}) {
      // It is in the middle of something.
      ASSERT_TRUE(FerrySystem::WaitForLoad(
          *worker, [](const auto& report) { return report.running_requests() > 0; }, kPatience));
      system->Roll(*worker);
      ASSERT_EQ(system->WaitUntilReady(kPatience), "");
      ASSERT_TRUE(load.WaitForAnswers(kAnswersBetween));
    }
    const std::string metrics = ReadMetrics(system->router_metrics_port());
    EXPECT_EQ(SumOf(metrics, "ferry_router_migrations_total"), 0.0);
    for (const std::function<void()>& roll :
         {std::function<void()>([&] { system->RollRouter(); }), {[&] { other.Roll(); }}}) {
      roll();
      ASSERT_TRUE(load.WaitForAnswers(kAnswersBetween));
    }
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
}

}  // namespace
}  // namespace integration
