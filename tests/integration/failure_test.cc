// Workers die, clients leave, pools fill up: no request is lost while another worker exists, no
// text is wrong, and every block returns.

#include <signal.h>

#include "ferry/v1/inference.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "tests/integration/fault_fixture.h"

namespace integration {
namespace {

// Which worker is killed while it works on a long prompt.
enum class Victim { kPrefill, kDecode };

class KillTest : public FaultTest, public testing::WithParamInterface<Victim> {
 protected:
  // Two workers of the victim's kind.
  static std::unique_ptr<FerrySystem> Start() {
    SystemOptions options = Options();
    (GetParam() == Victim::kPrefill ? options.num_prefill : options.num_decode) = 2;
    return FerrySystem::Start(options);
  }
  static WorkerProcess* FindBusyOne(FerrySystem& system, const Answer* until = nullptr) {
    return GetParam() == Victim::kPrefill ? FindBusyPrefill(system, 2, until)
                                          : FindBusyDecode(system, 2, until);
  }
  static const std::string& UsedWorker(const ferry::v1::GenerateSummary& summary) {
    return GetParam() == Victim::kPrefill ? summary.prefill_worker() : summary.decode_worker();
  }
};

INSTANTIATE_TEST_SUITE_P(Victims, KillTest, testing::Values(Victim::kPrefill, Victim::kDecode),
                         [](const auto& param_info) {
                           return param_info.param == Victim::kPrefill ? "Prefill" : "Decode";
                         });

TEST_P(KillTest, AWorkerKilledBeforeTheFirstTokenLosesNothing) {
  const auto system = Start();
  const Ask ask = {Prompt(LongPromptTokens(), 1), 8, 5};
  auto answer = CompleteAsync(*system, ask);
  WorkerProcess* busy = FindBusyOne(*system);
  ASSERT_NE(busy, nullptr);
  system->ExpectDead(busy->process);
  busy->process.Kill();
  const auto completion = answer.get();
  ExpectRight(completion, ask);
  EXPECT_EQ(completion->summary.attempts(), 2);
  EXPECT_NE(UsedWorker(completion->summary), busy->address);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_P(KillTest, AWorkerKilledAgainAndAgainLosesNothing) {
  constexpr int kMaxKills = 5;
  const auto system = Start();
  const Ask ask = {Prompt(LongPromptTokens(), 2), 8, 0};
  auto answer = CompleteAsync(*system, ask);
  int kills = 0;
  // It gets on between two kills, so the last ones may find it answered.
  for (WorkerProcess* busy = FindBusyOne(*system); busy != nullptr && kills < kMaxKills;
       busy = FindBusyOne(*system, &answer)) {
    system->Restart(*busy);
    ++kills;
  }
  const auto completion = answer.get();
  ExpectRight(completion, ask);
  EXPECT_GE(kills, 1);
  EXPECT_EQ(completion->summary.attempts(), kills + 1);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FaultTest, TheOnlyPrefillWorkerComesBackAndTheRequestWithIt) {
  const auto system = FerrySystem::Start(Options());
  const Ask ask = {Prompt(LongPromptTokens(), 8), 8, 0};
  auto answer = CompleteAsync(*system, ask);
  WorkerProcess* busy = FindBusyPrefill(*system, 1);
  ASSERT_NE(busy, nullptr);
  system->Restart(*busy);
  ExpectRight(answer.get(), ask);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FaultTest, WithoutAnotherWorkerTheRequestEndsWithAnError) {
  SystemOptions options = Options();
  options.router_flags.insert(options.router_flags.end(), {"--worker_wait_s", "1"});
  const auto system = FerrySystem::Start(options);
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

TEST_F(FaultTest, ACancelledRequestFreesItsBlocksOnBothSides) {
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
  ExpectRight(system->client().Complete(ToRequest(after)), after);
}

TEST_F(FaultTest, AFullDecodePoolDelaysAndDoesNotFail) {
  SystemOptions options = Options();
  options.decode_flags = {"--num_blocks", "14", "--num_threads", "1"};
  const auto system = FerrySystem::Start(options);
  std::vector<Ask> asks;
  std::vector<Answer> answers;
  for (uint32_t i = 0; i < 10; ++i) {
    asks.push_back({Prompt(300, 20 + i), 60, i % 2 == 0 ? 0u : i});
    answers.push_back(CompleteAsync(*system, asks.back()));
  }
  for (size_t i = 0; i < asks.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectRight(answers[i].get(), asks[i]);
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
}

TEST_F(FaultTest, ARouterThatIsKilledLeavesNothingBehindAtTheWorkers) {
  const auto system = FerrySystem::Start(Options());
  std::vector<Answer> answers;  // waiting, computing, being sent, decoding
  for (uint32_t i = 0; i < 12; ++i) {
    answers.push_back(CompleteAsync(*system, {Prompt(100 + i * 150, 40 + i), 1500, 0}));
  }
  ASSERT_TRUE(FerrySystem::WaitForLoad(
      system->decode(0),
      [](const auto& load) { return load.running_requests() > 1 && load.waiting_requests() > 0; },
      absl::Seconds(20)));
  system->KillRouter();
  for (Answer& answer : answers) {
    EXPECT_EQ(answer.get().status().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
  system->RestartRouter();
  const Ask ask = {Prompt(700, 60), 20, 3};
  ExpectRight(system->client().Complete(ToRequest(ask)), ask);
}

TEST_F(FaultTest, SigtermFinishesRunningRequests) {
  const auto system = FerrySystem::Start(Options());
  const Ask ask = {Prompt(400, 30), 300, 0};
  auto answer = CompleteAsync(*system, ask);
  ASSERT_TRUE(FerrySystem::WaitForLoad(
      system->decode(0), [](const auto& load) { return load.running_requests() > 0; },
      absl::Seconds(20)));
  system->router().Signal(SIGTERM);
  system->decode(0).process.Signal(SIGTERM);
  system->prefill(0).process.Signal(SIGTERM);
  ExpectRight(answer.get(), ask);
}

}  // namespace
}  // namespace integration
