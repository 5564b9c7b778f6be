// A storm of faults over two prefill and two decode workers: they are killed and come back at the
// same address, or stand still and go on; clients leave and hurry.  One worker of each kind is
// always there, so no request is lost: it ends once and in time, with the text of a single engine,
// unless its client did not wait for it or the workers that were sending its tokens went away more
// often than it may migrate (DESIGN.md 5).  When the storm is over every gauge is where it was.

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

// No request takes longer; a slow machine included.
constexpr absl::Duration kEndOfPatience = absl::Seconds(100);
constexpr int kNumClients = 6;
constexpr int kNumBlocks = 60;

int64_t FromEnvironment(const char* name, int64_t value) {
  if (const char* text = std::getenv(name)) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &value)) << text;
  }
  return value;
}

// How the requests have ended; waited on by whoever makes the faults.
class Tally {
 public:
  void Add(const std::string& ending) {
    std::lock_guard lock(mutex_);
    ++counts_[ending];
    ++total_;
    changed_.notify_all();
  }
  // Until `more` further requests have ended, at most `timeout`.
  void Wait(int64_t more, absl::Duration timeout) {
    std::unique_lock lock(mutex_);
    const int64_t wanted = total_ + more;
    changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), [&] { return total_ >= wanted; });
  }
  std::map<std::string, int64_t> counts() const {
    std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  mutable std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::map<std::string, int64_t> counts_;
  int64_t total_ = 0;
};

class ChaosTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string model = std::getenv("FERRY_DEMO_MODEL");
    SingleEngine oracle(model);
    const int32_t vocab = oracle.engine().network().config().vocab_size;
    const std::vector<int32_t> shared = MakePrompt(130, 4711, vocab);
    for (uint32_t i = 0; i < 32; ++i) {
      Ask ask;
      ask.prompt = MakePrompt(1 + static_cast<int32_t>(i * 61 % 640), i, vocab);
      if (i % 4 == 0) ask.prompt.insert(ask.prompt.begin(), shared.begin(), shared.end());
      ask.max_tokens = 1 + static_cast<int32_t>(i * 37 % 90);
      ask.seed = i % 2 == 0 ? 0 : 100 + i;
      expected_.push_back(Expected(oracle, ask));
      asks_.push_back(std::move(ask));
    }
    SystemOptions options;
    options.model_dir = model;
    options.num_prefill = 2;
    options.num_decode = 2;
    const std::vector<std::string> flags = {"--num_blocks", std::to_string(kNumBlocks),
                                            "--num_threads", "1"};
    options.prefill_flags = flags;
    options.decode_flags = flags;
    options.router_flags = {"--local_prefill_tokens", "40"};
    system_ = FerrySystem::Start(options);
  }

  // One request and what must be true of its end.
  void Run(size_t i, bool leaves, int leaves_after, absl::Duration timeout) {
    const auto client = system_->NewClient(timeout);
    const absl::Time start = absl::Now();
    std::vector<int32_t> tokens;
    int messages = 0;
    const absl::Status status = client->Generate(ToRequest(asks_[i]), [&](const auto& message) {
      tokens.insert(tokens.end(), message.token_ids().begin(), message.token_ids().end());
      return !leaves || ++messages <= leaves_after;
    });
    EXPECT_LT(absl::Now() - start, timeout + absl::Seconds(5)) << "request " << i << ": " << status;
    // Wrong text is never sent, whatever the end.
    ASSERT_LE(tokens.size(), expected_[i].size()) << "request " << i;
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), expected_[i].begin())) << "request " << i;
    const bool hurries = timeout < kEndOfPatience;
    switch (status.code()) {
      case absl::StatusCode::kOk:
        EXPECT_EQ(tokens, expected_[i]) << "request " << i;
        break;
      case absl::StatusCode::kCancelled:
        EXPECT_TRUE(leaves) << "request " << i << ": " << status;
        break;
      case absl::StatusCode::kDeadlineExceeded:
        EXPECT_TRUE(hurries) << "request " << i << ": " << status;
        break;
      default:
        EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << "request " << i;
        EXPECT_FALSE(tokens.empty())
            << "request " << i << " was lost before its first token: " << status;
    }
    tally_.Add(absl::StatusCodeToString(status.code()));
  }

  void BeClient(uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!storm_is_over_) {
      const size_t i = random() % asks_.size();
      const bool leaves = random() % 8 == 0;
      const int leaves_after = static_cast<int>(random() % 4);
      const bool hurries = random() % 8 == 0;
      Run(i, leaves, leaves_after,
          hurries ? absl::Milliseconds(1 + random() % 300) : kEndOfPatience);
    }
  }

  void MakeFault(std::mt19937_64& random) {
    const int i = static_cast<int>(random() % 2);
    const bool prefill = random() % 2 == 0;
    WorkerProcess& worker = prefill ? system_->prefill(i) : system_->decode(i);
    const char* const role = prefill ? "prefill" : "decode";
    if (random() % 2 == 0) {
      std::printf("%s %d is killed\n", role, i);
      system_->Restart(worker);
      return;
    }
    // Below, around and above the limits of a stalled transfer and of a worker's silence.
    const absl::Duration pause = absl::Milliseconds(1 << (random() % 14));
    std::printf("%s %d stands still for at most %s\n", role, i,
                absl::FormatDuration(pause).c_str());
    worker.process.Signal(SIGSTOP);
    tally_.Wait(static_cast<int64_t>(random() % 200), pause);
    worker.process.Signal(SIGCONT);
  }

  std::vector<Ask> asks_;
  std::vector<std::vector<int32_t>> expected_;
  std::unique_ptr<FerrySystem> system_;
  Tally tally_;
  std::atomic<bool> storm_is_over_{false};
};

TEST_F(ChaosTest, EveryRequestEndsOnceAndRightAndEveryBlockReturns) {
  const auto seed = static_cast<uint64_t>(FromEnvironment("FERRY_CHAOS_SEED", 1));
  const absl::Time end = absl::Now() + absl::Seconds(FromEnvironment("FERRY_CHAOS_SECONDS", 60));
  std::mt19937_64 random(seed);
  std::vector<std::thread> clients;
  for (int c = 0; c < kNumClients; ++c) {
    clients.emplace_back([this, client_seed = random()] { BeClient(client_seed); });
  }
  while (absl::Now() < end) {
    MakeFault(random);
    tally_.Wait(static_cast<int64_t>(random() % 40), absl::Seconds(5));
  }
  storm_is_over_ = true;
  for (std::thread& client : clients) client.join();
  for (const auto& [ending, count] : tally_.counts()) {
    std::printf("%s: %ld\n", ending.c_str(), static_cast<long>(count));
    RecordProperty(ending, static_cast<int>(count));
  }
  EXPECT_GT(tally_.counts()["OK"], 0);

  EXPECT_EQ(system_->WaitUntilReady(absl::Seconds(60)), "");
  for (size_t i = 0; i < asks_.size(); ++i) {
    const auto completion = system_->client().Complete(ToRequest(asks_[i]));
    ASSERT_TRUE(completion.ok()) << "request " << i << " after the storm: " << completion.status();
    EXPECT_EQ(Tokens(*completion), expected_[i]) << "request " << i << " after the storm";
  }
  EXPECT_EQ(system_->WaitUntilIdle(absl::Seconds(60)), "");
}

}  // namespace
}  // namespace integration
