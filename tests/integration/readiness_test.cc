// When a router of real processes says that it is ready, by /ready and by the health service that
// probes ask.

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/router/http/http_client.h"

namespace integration {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Duration kPatience = absl::Seconds(30);

class ReadinessTest : public testing::Test {
 protected:
  ReadinessTest() {
    SystemOptions options;
    options.model_dir = std::getenv("FERRY_DEMO_MODEL");
    options.prefill_flags = options.decode_flags = {"--num_blocks", "50"};
    options.router_flags = {"--http_listen", "127.0.0.1:0"};
    system_ = FerrySystem::Start(options);
  }
  // As a probe asks.
  bool Healthy() {
    ChildProcess health =
        ChildProcess::Start({absl::StrCat(std::getenv("FERRY_BIN_DIR"), "/ferry"), "health",
                             "--address=" + system_->router_address(), "--service=readiness"},
                            MakeTestDir() + "/health.log");
    return health.Wait(kPatience) == 0;
  }
  // Waits until both say that the router is not ready and /ready names `reason`; returns what
  // /ready said last.
  std::string WhyNotReady(const std::string& reason) {
    const absl::Time end = absl::Now() + kPatience;
    std::string said = "nothing";
    while (absl::Now() < end) {
      const router::http::Reply reply = router::http::Get(system_->router_http_port(), "/ready");
      said = reply.body;
      if (reply.status == 503 && absl::StrContains(said, reason) && !Healthy()) break;
    }
    return said;
  }
  // All three ways to ask say so at one time: on a busy machine a report may be so late that its
  // worker is not ready for a moment.
  void ExpectReady() {
    const absl::Time end = absl::Now() + kPatience;
    std::string not_ready;
    do {
      not_ready = system_->WaitUntilReady(end - absl::Now());
      const router::http::Reply reply = router::http::Get(system_->router_http_port(), "/ready");
      if (reply.status != 200) not_ready += reply.body;
      if (!Healthy()) not_ready += "the health service says no";
    } while (!not_ready.empty() && absl::Now() < end);
    EXPECT_EQ(not_ready, "");
  }

  std::unique_ptr<FerrySystem> system_;
};

TEST_F(ReadinessTest, APairIsReadyAndNeitherOfItsWorkersAlone) {
  ExpectReady();
  for (WorkerProcess* const worker : {&system_->prefill(0), &system_->decode(0)}) {
    worker->process.Kill();
    const std::string reason =
        worker == &system_->decode(0) ? "no decode worker is ready" : "no prefill worker is ready";
    EXPECT_THAT(WhyNotReady(reason), AllOf(HasSubstr(reason), HasSubstr(worker->address)));
    system_->Restart(*worker);
    ExpectReady();
  }
}

TEST_F(ReadinessTest, WorkersThatCannotExchangeCacheAreNotReadyAndTheReasonIsNamed) {
  WorkerProcess& prefill = system_->prefill(0);
  const std::vector<std::string> flags = prefill.flags;
  prefill.flags.insert(prefill.flags.end(), {"--block_size", "128"});
  system_->Restart(prefill);
  const std::string reason = "block_size is 128 at prefill worker " + prefill.address;
  EXPECT_THAT(WhyNotReady(reason), HasSubstr(reason));
  prefill.flags = flags;
  system_->Restart(prefill);
  ExpectReady();
}

// What /v1/models says is what the pair that is there serves.
TEST_F(ReadinessTest, TheContextIsThatOfThePairThatIsThere) {
  const auto context = [this] {
    const auto reply = router::http::Get(system_->router_http_port(), "/v1/models");
    return reply.Json()["data"][0]["max_model_len"].get<int>();
  };
  const auto ask = [this](int prompt_tokens) {
    const nlohmann::json body = {{"prompt", std::vector<int>(prompt_tokens, 5)}, {"max_tokens", 1}};
    return router::http::Post(system_->router_http_port(), "/v1/completions", body.dump());
  };
  ExpectReady();
  EXPECT_GT(context(), 300);
  EXPECT_EQ(ask(300).status, 200);
  WorkerProcess& prefill = system_->prefill(0);
  prefill.flags.insert(prefill.flags.end(), {"--max_model_len", "300"});
  system_->Restart(prefill);
  ExpectReady();
  EXPECT_EQ(context(), 300);
  EXPECT_EQ(ask(299).status, 200);
  const auto reply = ask(300);
  EXPECT_EQ(reply.status, 400) << reply.body;
  EXPECT_THAT(reply.body, HasSubstr("prompt has 300 tokens: the context is 300"));
}

}  // namespace
}  // namespace integration
