// Workers die, clients leave, pools fill up: no request is lost while another worker exists, no
// text is wrong, and every block returns.

#include <signal.h>

#include <cstdlib>
#include <future>

#include "absl/strings/numbers.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

std::string LongModel() { return std::getenv("FERRY_LONG_MODEL"); }

// A prompt that takes long enough to interfere with; sanitized builds ask for a shorter one by
// FERRY_LONG_PROMPT_TOKENS.
int32_t LongPromptTokens() {
  int32_t tokens = 4000;
  if (const char* text = std::getenv("FERRY_LONG_PROMPT_TOKENS")) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &tokens)) << text;
  }
  return tokens;
}

class FailureTest : public testing::Test {
 protected:
  static SingleEngine& oracle() {
    static SingleEngine* oracle = new SingleEngine(LongModel());
    return *oracle;
  }
  static std::vector<int32_t> Prompt(int32_t length, uint32_t salt) {
    return MakePrompt(length, salt, oracle().engine().network().config().vocab_size);
  }
  static SystemOptions Options() {
    SystemOptions options;
    options.model_dir = LongModel();
    options.prefill_flags = {"--num_blocks", "400", "--num_threads", "1"};
    options.decode_flags = {"--num_blocks", "400", "--num_threads", "1"};
    options.router_flags = {"--local_prefill_tokens", "0"};
    return options;
  }
  static std::future<absl::StatusOr<ferry::Client::Completion>> CompleteAsync(FerrySystem& system,
                                                                              const Ask& ask) {
    return std::async(std::launch::async,
                      [&system, ask] { return system.client().Complete(ToRequest(ask)); });
  }
  // The first of `workers` whose load `busy` accepts.
  static WorkerProcess* FindBusy(std::vector<WorkerProcess*> workers,
                                 const std::function<bool(const ferry::v1::LoadReport&)>& busy) {
    for (int round = 0; round < 200; ++round) {
      for (WorkerProcess* worker : workers) {
        if (FerrySystem::WaitForLoad(*worker, busy, absl::Milliseconds(50))) return worker;
      }
    }
    return nullptr;
  }
};

TEST_F(FailureTest, APrefillWorkerKilledInMidPromptLosesNothing) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  const auto system = FerrySystem::Start(options);
  const Ask ask = {Prompt(LongPromptTokens(), 1), 8, 0};
  auto answer = CompleteAsync(*system, ask);
  WorkerProcess* busy = FindBusy({&system->prefill(0), &system->prefill(1)}, [](const auto& load) {
    return load.waiting_tokens() > 0 &&
           load.waiting_tokens() < static_cast<uint64_t>(LongPromptTokens() - 100);
  });
  ASSERT_NE(busy, nullptr);
  system->ExpectDead(busy->process);
  busy->process.Kill();
  const auto completion = answer.get();
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), ask));
  EXPECT_EQ(completion->summary.attempts(), 2);
  EXPECT_NE(completion->summary.prefill_worker(), busy->address);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FailureTest, ADecodeWorkerKilledBeforeTheFirstTokenLosesNothing) {
  SystemOptions options = Options();
  options.num_decode = 2;
  const auto system = FerrySystem::Start(options);
  const Ask ask = {Prompt(LongPromptTokens(), 2), 8, 5};
  auto answer = CompleteAsync(*system, ask);
  WorkerProcess* busy = FindBusy({&system->decode(0), &system->decode(1)},
                                 [](const auto& load) { return load.kv_blocks().reserved() > 0; });
  ASSERT_NE(busy, nullptr);
  system->ExpectDead(busy->process);
  busy->process.Kill();
  const auto completion = answer.get();
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), ask));
  EXPECT_GE(completion->summary.attempts(), 2);
  EXPECT_NE(completion->summary.decode_worker(), busy->address);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FailureTest, WithoutAnotherWorkerTheRequestEndsWithAnError) {
  const auto system = FerrySystem::Start(Options());
  auto answer = CompleteAsync(*system, {Prompt(LongPromptTokens(), 3), 8, 0});
  ASSERT_TRUE(FerrySystem::WaitForLoad(
      system->prefill(0), [](const auto& load) { return load.running_requests() > 0; },
      absl::Seconds(20)));
  system->ExpectDead(system->prefill(0).process);
  system->prefill(0).process.Kill();
  const auto completion = answer.get();
  EXPECT_EQ(completion.status().code(), absl::StatusCode::kUnavailable) << completion.status();
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FailureTest, ACancelledRequestFreesItsBlocksOnBothSides) {
  const auto system = FerrySystem::Start(Options());
  const auto stub = ferry::v1::Inference::NewStub(
      grpc::CreateChannel(system->router_address(), grpc::InsecureChannelCredentials()));
  // In mid-prefill.
  {
    grpc::ClientContext context;
    auto stream = stub->Generate(&context, ToRequest({Prompt(LongPromptTokens(), 4), 8, 0}));
    ASSERT_TRUE(FerrySystem::WaitForLoad(
        system->decode(0), [](const auto& load) { return load.kv_blocks().reserved() > 0; },
        absl::Seconds(20)));
    context.TryCancel();
    ferry::v1::GenerateResponse message;
    while (stream->Read(&message)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
  // While decoding: the client walks away after three messages.
  int messages = 0;
  const absl::Status status = system->client().Generate(
      ToRequest({Prompt(500, 5), 2000, 0}), [&](const auto&) { return ++messages < 3; });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
  // By its deadline.
  const auto hurried = system->NewClient(absl::Milliseconds(300));
  EXPECT_EQ(hurried->Complete(ToRequest({Prompt(LongPromptTokens(), 6), 500, 0})).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
  const Ask after = {Prompt(300, 7), 8, 0};
  const auto completion = system->client().Complete(ToRequest(after));
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), after));
}

TEST_F(FailureTest, AFullDecodePoolDelaysAndDoesNotFail) {
  SystemOptions options = Options();
  options.decode_flags = {"--num_blocks", "14", "--num_threads", "1"};
  const auto system = FerrySystem::Start(options);
  std::vector<Ask> asks;
  std::vector<std::future<absl::StatusOr<ferry::Client::Completion>>> answers;
  for (uint32_t i = 0; i < 10; ++i) {
    asks.push_back({Prompt(300, 20 + i), 60, i % 2 == 0 ? 0u : i});
    answers.push_back(CompleteAsync(*system, asks.back()));
  }
  for (size_t i = 0; i < asks.size(); ++i) {
    const auto completion = answers[i].get();
    ASSERT_TRUE(completion.ok()) << completion.status();
    EXPECT_EQ(Tokens(*completion), Expected(oracle(), asks[i])) << "request " << i;
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FailureTest, SigtermFinishesRunningRequests) {
  const auto system = FerrySystem::Start(Options());
  const Ask ask = {Prompt(400, 30), 300, 0};
  auto answer = CompleteAsync(*system, ask);
  ASSERT_TRUE(FerrySystem::WaitForLoad(
      system->decode(0), [](const auto& load) { return load.running_requests() > 0; },
      absl::Seconds(20)));
  system->router().Signal(SIGTERM);
  system->decode(0).process.Signal(SIGTERM);
  system->prefill(0).process.Signal(SIGTERM);
  const auto completion = answer.get();
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), ask));
}

}  // namespace
}  // namespace integration
