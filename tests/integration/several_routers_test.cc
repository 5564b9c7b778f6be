// Two routers side by side over the same workers, real processes.

#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "tests/integration/fault_fixture.h"

namespace integration {
namespace {

class SeveralRoutersTest : public FaultTest {
 protected:
  // A router beside the system's own, over the same workers; dies with the test.
  void StartOtherRouter(FerrySystem& system, const SystemOptions& options) {
    std::vector<std::string> workers;
    for (int i = 0; i < options.num_prefill; ++i) workers.push_back(system.prefill(i).address);
    for (int i = 0; i < options.num_decode; ++i) workers.push_back(system.decode(i).address);
    const std::string dir = MakeTestDir();
    std::vector<std::string> argv = {absl::StrCat(std::getenv("FERRY_BIN_DIR"), "/ferry-router"),
                                     "--model_assets=" + options.model_dir,
                                     "--listen=127.0.0.1:0",
                                     "--metrics_listen=127.0.0.1:0",
                                     "--workers=" + absl::StrJoin(workers, ","),
                                     absl::StrCat("--port_file=", dir, "/ports")};
    argv.insert(argv.end(), options.router_flags.begin(), options.router_flags.end());
    other_ = std::make_unique<ChildProcess>(ChildProcess::Start(argv, dir + "/log"));
    const auto port = WaitForPort(dir + "/ports", "grpc_port", absl::Seconds(120));
    ASSERT_TRUE(port.ok()) << port.status() << "\n" << other_->log();
    auto client = ferry::Client::Create(
        {.address = absl::StrCat("127.0.0.1:", *port), .timeout = absl::Seconds(120)});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    ASSERT_EQ(client_->WaitUntilReady("", absl::Seconds(120)), absl::OkStatus());
  }

  std::unique_ptr<ChildProcess> other_;
  std::unique_ptr<ferry::Client> client_;  // of the other router
};

TEST_F(SeveralRoutersTest, ARouterThatDiesLosesOnlyItsOwnStreams) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  options.num_decode = 2;
  const auto system = FerrySystem::Start(options);
  StartOtherRouter(*system, options);
  ASSERT_FALSE(HasFailure());

  constexpr int kEach = 3;
  std::atomic<int> streaming{0};
  std::vector<std::unique_ptr<ferry::RunningGeneration>> lost;
  std::vector<Answer> kept;
  std::vector<Ask> asks;
  for (uint32_t i = 0; i < kEach; ++i) {
    // Ends long after the router: nobody waits for all of it.
    ferry::v1::GenerateRequest request = ToRequest({Prompt(300, 50 + i), 4000, 0});
    request.mutable_sampling()->set_ignore_eos(true);
    lost.push_back(client_->Start(
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
  other_->Kill();
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
  StartOtherRouter(*system, options);
  ASSERT_FALSE(HasFailure());
  std::vector<int32_t> prompt = Prompt(640, 70);
  const auto first = system->client().Complete(ToRequest({prompt, 4, 0}));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->summary.cached_tokens(), 0);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(20)), "");
  const std::vector<int32_t> more = Prompt(100, 71);
  prompt.insert(prompt.end(), more.begin(), more.end());
  const Ask ask = {prompt, 4, 0};
  const auto second = client_->Complete(ToRequest(ask));
  ExpectRight(second, ask);
  EXPECT_EQ(second->summary.cached_tokens(), 640);
  other_->Signal(SIGTERM);
  EXPECT_EQ(other_->Wait(absl::Seconds(60)), 0);
}

}  // namespace
}  // namespace integration
