// Crowds of clients that behave badly: they leave at any moment, hurry, or never read.  Each gets
// its end, the others their answers, and nothing stays behind.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "status/grpc_status.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

std::string DemoModel() { return std::getenv("FERRY_DEMO_MODEL"); }

// Sanitized builds ask for less by FERRY_LOAD_REQUESTS.
int NumClients() {
  int count = 200;
  if (const char* text = std::getenv("FERRY_LOAD_REQUESTS")) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &count)) << text;
  }
  return count;
}

// Resident memory, bytes.
int64_t MemoryOf(const ChildProcess& process) {
  std::ifstream status(absl::StrCat("/proc/", process.pid(), "/status"));
  std::string word;
  int64_t kib = 0;
  while (status >> word && word != "VmRSS:") {
  }
  status >> kib;
  EXPECT_GT(kib, 0) << "process " << process.pid();
  return kib * 1024;
}

class CrowdTest : public testing::Test {
 protected:
  static constexpr int kNumAsks = 16;

  static SingleEngine& oracle() {
    static SingleEngine* oracle = new SingleEngine(DemoModel());
    return *oracle;
  }
  static std::vector<int32_t> Prompt(int32_t length, uint32_t salt) {
    return MakePrompt(length, salt, oracle().engine().network().config().vocab_size);
  }
  void SetUp() override {
    for (int i = 0; i < kNumAsks; ++i) {
      const Ask ask = {Prompt(1 + i * 43, i), 1 + (i * 29) % 120, i % 2 == 0 ? 0u : 100u + i};
      asks_.push_back(ask);
      expected_.push_back(Expected(oracle(), ask));
    }
  }
  static std::unique_ptr<FerrySystem> Start(const std::string& num_blocks) {
    SystemOptions options;
    options.model_dir = DemoModel();
    options.num_prefill = 2;
    options.num_decode = 2;
    options.prefill_flags = {"--num_blocks", num_blocks, "--num_threads", "1"};
    options.decode_flags = options.prefill_flags;
    options.router_flags = {"--local_prefill_tokens", "40"};
    return FerrySystem::Start(options);
  }
  void ExpectEveryAnswerRight(FerrySystem& system) const {
    for (int i = 0; i < kNumAsks; ++i) {
      const auto completion = system.client().Complete(ToRequest(asks_[i]));
      ASSERT_TRUE(completion.ok()) << "request " << i << ": " << completion.status();
      EXPECT_EQ(Tokens(*completion), expected_[i]) << "request " << i;
    }
  }
  bool IsPrefixOfExpected(int i, const std::vector<int32_t>& tokens) const {
    return tokens.size() <= expected_[i].size() &&
           std::equal(tokens.begin(), tokens.end(), expected_[i].begin());
  }

  std::vector<Ask> asks_;
  std::vector<std::vector<int32_t>> expected_;
};

TEST_F(CrowdTest, ClientsThatLeaveAtAnyMomentLeaveNothingBehind) {
  const auto system = Start("40");
  const auto stub = ferry::v1::Inference::NewStub(
      grpc::CreateChannel(system->router_address(), grpc::InsecureChannelCredentials()));
  std::vector<std::thread> clients;
  for (int c = 0; c < NumClients(); ++c) {
    clients.emplace_back([&, c] {
      const int i = c % kNumAsks;
      grpc::ClientContext context;
      auto stream = stub->Generate(&context, ToRequest(asks_[i]));
      ferry::v1::GenerateResponse message;
      std::vector<int32_t> tokens;
      // Before the first message, after some, or never.
      const int leaves_after = c % 7 == 6 ? -1 : c % 7;
      for (int messages = 0; messages != leaves_after && stream->Read(&message); ++messages) {
        tokens.insert(tokens.end(), message.token_ids().begin(), message.token_ids().end());
      }
      if (leaves_after >= 0) context.TryCancel();
      while (stream->Read(&message)) {
      }
      const grpc::Status status = stream->Finish();
      EXPECT_TRUE(IsPrefixOfExpected(i, tokens)) << "client " << c;
      if (leaves_after < 0) {
        EXPECT_TRUE(status.ok()) << "client " << c << ": " << status.error_message();
        EXPECT_EQ(tokens, expected_[i]) << "client " << c;
      } else {
        EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::CANCELLED)
            << "client " << c << ": " << status.error_message();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
  ExpectEveryAnswerRight(*system);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
}

TEST_F(CrowdTest, DeadlinesAreKeptByTheHundred) {
  const auto system = Start("40");
  std::atomic<int> answered = 0;
  std::vector<std::thread> clients;
  for (int c = 0; c < NumClients(); ++c) {
    clients.emplace_back([&, c] {
      const int i = c % kNumAsks;
      const absl::Duration timeout = absl::Milliseconds(1 + (c * 37) % 2000);
      const auto client = system->NewClient(timeout);
      const absl::Time start = absl::Now();
      std::vector<int32_t> tokens;
      const absl::Status status = client->Generate(ToRequest(asks_[i]), [&](const auto& message) {
        tokens.insert(tokens.end(), message.token_ids().begin(), message.token_ids().end());
        return true;
      });
      EXPECT_LT(absl::Now() - start, timeout + absl::Seconds(5)) << "client " << c;
      EXPECT_TRUE(IsPrefixOfExpected(i, tokens)) << "client " << c;
      // A deadline that cannot be kept may be told at once.
      const bool foreseen = absl::IsResourceExhausted(status) &&
                            status::Reason(status) == status::kDeadline && tokens.empty();
      EXPECT_TRUE(status.ok() || absl::IsDeadlineExceeded(status) || foreseen)
          << "client " << c << ": " << status;
      if (status.ok()) {
        ++answered;
        EXPECT_EQ(tokens, expected_[i]) << "client " << c;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GT(answered, 0);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
  ExpectEveryAnswerRight(*system);
}

// Sixteen branches with alternatives: megabytes that nobody takes.
TEST_F(CrowdTest, ClientsThatNeverReadCostBoundedMemoryAndDelayNobodyElse) {
  constexpr int kSlowClients = 8;
  const auto system = Start("300");
  ferry::v1::GenerateRequest flood = ToRequest({Prompt(50, 99), 700, 5});
  flood.mutable_sampling()->set_n(16);
  flood.mutable_sampling()->set_logprobs(20);
  const auto stub = ferry::v1::Inference::NewStub(
      grpc::CreateChannel(system->router_address(), grpc::InsecureChannelCredentials()));
  ExpectEveryAnswerRight(*system);
  const int64_t router_before = MemoryOf(system->router());
  {
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::ClientReader<ferry::v1::GenerateResponse>>> streams;
    for (int i = 0; i < kSlowClients; ++i) {
      contexts.push_back(std::make_unique<grpc::ClientContext>());
      streams.push_back(stub->Generate(contexts.back().get(), flood));
    }
    // The workers compute all of it and are free again, whoever reads.
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(FerrySystem::WaitForLoad(
          system->decode(i), [](const auto& load) { return load.running_requests() > 0; },
          absl::Seconds(30)));
    }
    ExpectEveryAnswerRight(*system);
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(FerrySystem::WaitForLoad(
          system->decode(i), [](const auto& load) { return load.running_requests() == 0; },
          absl::Seconds(120)));
    }
    ExpectEveryAnswerRight(*system);
    // A mebibyte a client in the router, and what gRPC holds for one that does not read.
    EXPECT_LT(MemoryOf(system->router()) - router_before, kSlowClients * (6 << 20));
    // One of them reads after all, and misses nothing.
    ferry::v1::GenerateResponse message;
    std::vector<size_t> tokens(16);
    while (streams[0]->Read(&message)) tokens[message.index()] += message.token_ids_size();
    const grpc::Status status = streams[0]->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(tokens, std::vector<size_t>(16, 700));
    for (int i = 1; i < kSlowClients; ++i) {
      contexts[i]->TryCancel();
      while (streams[i]->Read(&message)) {
      }
      EXPECT_EQ(streams[i]->Finish().error_code(), grpc::StatusCode::CANCELLED);
    }
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
}

// A client's name is its own business: it may come again, also while workers remember it.
TEST_F(CrowdTest, ARequestIdMayBeUsedAgainAndAgain) {
  const auto system = Start("40");
  ferry::v1::GenerateRequest request = ToRequest(asks_[kNumAsks - 1]);
  request.set_request_id(std::string(128, 'x'));
  for (int i = 0; i < 5; ++i) {
    const auto completion = system->client().Complete(request);
    ASSERT_TRUE(completion.ok()) << completion.status();
    EXPECT_EQ(Tokens(*completion), expected_[kNumAsks - 1]);
    EXPECT_EQ(completion->summary.attempts(), 1) << "time " << i;
  }
}

// The branches of one request need more blocks than there are: they take turns, and so do requests.
TEST_F(CrowdTest, PoolsTooSmallForABranchOfEachDelayAndDoNotFail) {
  constexpr int kNumRequests = 4;
  constexpr int kNumBranches = 4;
  const auto system = Start("15");
  std::vector<Ask> asks;
  for (int c = 0; c < kNumRequests; ++c) asks.push_back({Prompt(200 + 8 * c, c), 250, 1u + c});
  std::vector<std::vector<std::vector<int32_t>>> tokens(
      kNumRequests, std::vector<std::vector<int32_t>>(kNumBranches));
  std::vector<std::thread> clients;
  for (int c = 0; c < kNumRequests; ++c) {
    clients.emplace_back([&, c] {
      ferry::v1::GenerateRequest request = ToRequest(asks[c]);
      request.mutable_sampling()->set_n(kNumBranches);
      const absl::Status status = system->client().Generate(request, [&](const auto& message) {
        auto& branch = tokens[c][message.index()];
        branch.insert(branch.end(), message.token_ids().begin(), message.token_ids().end());
        return true;
      });
      EXPECT_TRUE(status.ok()) << "client " << c << ": " << status;
    });
  }
  for (std::thread& client : clients) client.join();
  for (int c = 0; c < kNumRequests; ++c) {
    for (uint32_t branch = 0; branch < kNumBranches; ++branch) {
      EXPECT_EQ(tokens[c][branch], Expected(oracle(), asks[c], branch))
          << "client " << c << " branch " << branch;
    }
  }
  double preemptions = 0;
  for (int i = 0; i < 2; ++i) {
    preemptions +=
        SumOf(ReadMetrics(system->decode(i).metrics_port), "ferry_preemptions_total").value();
  }
  EXPECT_GT(preemptions, 0) << "the pools were too large for this test";
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
}

}  // namespace
}  // namespace integration
