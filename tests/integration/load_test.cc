// Many requests of mixed lengths at once: none lost, none wrong, every block returned.

#include <atomic>
#include <cstdlib>
#include <thread>

#include "absl/strings/numbers.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

// Sanitized builds ask for less by FERRY_LOAD_REQUESTS.
int NumRequests() {
  int count = 200;
  if (const char* text = std::getenv("FERRY_LOAD_REQUESTS")) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &count)) << text;
  }
  return count;
}

TEST(LoadTest, ConcurrentRequestsOfMixedLengthsAreAllRight) {
  const std::string model = std::getenv("FERRY_DEMO_MODEL");
  SingleEngine oracle(model);
  const int32_t vocab = oracle.engine().network().config().vocab_size;
  std::vector<Ask> asks;
  std::vector<std::vector<int32_t>> expected;
  const std::vector<int32_t> shared = MakePrompt(192, 9999, vocab);
  for (int i = 0; i < NumRequests(); ++i) {
    Ask ask;
    ask.prompt = MakePrompt(1 + (i * 97) % 700, i, vocab);
    if (i % 3 == 0) ask.prompt.insert(ask.prompt.begin(), shared.begin(), shared.end());
    ask.max_tokens = 1 + (i * 31) % 40;
    ask.seed = i % 2 == 0 ? 0 : 1000 + i;
    expected.push_back(Expected(oracle, ask));
    asks.push_back(std::move(ask));
  }

  SystemOptions options;
  options.model_dir = model;
  options.num_prefill = 2;
  options.num_decode = 2;
  options.prefill_flags = {"--num_blocks", "150", "--num_threads", "1"};
  options.decode_flags = {"--num_blocks", "150", "--num_threads", "1"};
  const auto system = FerrySystem::Start(options);
  std::atomic<int> lost = 0, wrong = 0;
  std::vector<std::thread> clients;
  for (size_t i = 0; i < asks.size(); ++i) {
    clients.emplace_back([&, i] {
      const auto completion = system->client().Complete(ToRequest(asks[i]));
      if (!completion.ok()) {
        ++lost;
        ADD_FAILURE() << "request " << i << ": " << completion.status();
      } else if (Tokens(*completion) != expected[i]) {
        ++wrong;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
}

}  // namespace
}  // namespace integration
