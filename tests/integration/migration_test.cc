// A decode worker is killed while its tokens are being read: the output goes on at another one, and
// is that of a single engine all the same.

#include <cstdlib>
#include <optional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

constexpr int32_t kOutputTokens = 700;  // a second or more of decoding
constexpr size_t kKillAfterTokens = 20;

class MigrationTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    SystemOptions options;
    options.model_dir = std::getenv("FERRY_DEMO_MODEL");
    options.num_decode = 2;
    options.prefill_flags = options.decode_flags = {"--num_blocks", "200", "--num_threads", "1"};
    options.router_flags = {"--local_prefill_tokens", "0"};
    system_ = FerrySystem::Start(options).release();
    oracle_ = new SingleEngine(options.model_dir);
  }
  static void TearDownTestSuite() {
    EXPECT_EQ(system_->WaitUntilIdle(absl::Seconds(30)), "");
    delete system_;
    delete oracle_;
  }

  static ferry::v1::GenerateRequest Request(int32_t prompt_tokens, uint64_t seed) {
    Ask ask = {
        MakePrompt(prompt_tokens, prompt_tokens, oracle_->engine().network().config().vocab_size),
        kOutputTokens, seed};
    return ToRequest(ask);
  }
  static std::vector<int32_t> Expected(const ferry::v1::GenerateRequest& request,
                                       uint32_t branch = 0) {
    const ferry::v1::SamplingParams& params = request.sampling();
    engine::SamplingOptions sampling;
    sampling.temperature = params.temperature();
    sampling.top_k = params.top_k();
    if (params.has_top_p()) sampling.top_p = params.top_p();
    if (params.has_repetition_penalty()) sampling.repetition_penalty = params.repetition_penalty();
    sampling.presence_penalty = params.presence_penalty();
    sampling.frequency_penalty = params.frequency_penalty();
    sampling.seed = params.seed();
    sampling.max_tokens = static_cast<int32_t>(params.max_tokens());
    sampling.branch = branch;
    const auto& ids = request.tokens().ids();
    return oracle_->Generate({ids.begin(), ids.end()}, sampling);
  }

  struct Output {
    absl::Status status;
    std::string text;  // of branch 0
    std::vector<std::vector<int32_t>> tokens;
    std::optional<ferry::v1::FinishReason> reason;
    ferry::v1::GenerateSummary summary;
  };
  // Runs the request; the worker that decodes it is killed, and comes back afterwards.
  static Output RunAndKill(const ferry::v1::GenerateRequest& request) {
    Output output;
    output.tokens.resize(std::max(1u, request.sampling().n()));
    WorkerProcess* killed = nullptr;
    output.status = system_->client().Generate(request, [&](const auto& message) {
      std::vector<int32_t>& tokens = output.tokens[message.index()];
      tokens.insert(tokens.end(), message.token_ids().begin(), message.token_ids().end());
      if (message.index() == 0) output.text += message.text();
      if (message.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED) {
        output.reason = message.finish_reason();
      }
      if (message.has_summary()) output.summary = message.summary();
      for (int i = 0; i < 2 && killed == nullptr && tokens.size() >= kKillAfterTokens; ++i) {
        if (!FerrySystem::WaitForLoad(
                system_->decode(i), [](const auto& load) { return load.running_requests() > 0; },
                absl::Milliseconds(50))) {
          continue;
        }
        killed = &system_->decode(i);
        system_->ExpectDead(killed->process);
        killed->process.Kill();
      }
      return true;
    });
    if (killed == nullptr) {
      ADD_FAILURE() << "nobody was killed";
      return output;
    }
    EXPECT_EQ(output.summary.migrations(), 1u);
    EXPECT_EQ(output.summary.attempts(), 2u);
    EXPECT_NE(output.summary.decode_worker(), killed->address);
    system_->Restart(*killed);
    EXPECT_EQ(system_->WaitUntilReady(absl::Seconds(30)), "");
    return output;
  }

  static FerrySystem* system_;
  static SingleEngine* oracle_;
};

FerrySystem* MigrationTest::system_ = nullptr;
SingleEngine* MigrationTest::oracle_ = nullptr;

TEST_F(MigrationTest, GreedySeededAndPenalizedOutputIsThatOfASingleEngine) {
  ferry::v1::GenerateRequest requests[] = {Request(150, 0), Request(151, 7), Request(152, 0),
                                           Request(153, 8)};
  for (int i : {2, 3}) {
    ferry::v1::SamplingParams& sampling = *requests[i].mutable_sampling();
    sampling.set_repetition_penalty(1.2f);
    sampling.set_presence_penalty(0.5f);
    sampling.set_frequency_penalty(0.1f);
  }
  for (const ferry::v1::GenerateRequest& request : requests) {
    SCOPED_TRACE(request.sampling().ShortDebugString());
    const Output output = RunAndKill(request);
    ASSERT_TRUE(output.status.ok()) << output.status;
    EXPECT_EQ(output.tokens[0], Expected(request));
    EXPECT_EQ(output.summary.prompt_tokens(), request.tokens().ids_size());
    EXPECT_EQ(output.summary.completion_tokens(), kOutputTokens);
  }
}

TEST_F(MigrationTest, TextGoesOnAndEndsBeforeAStopString) {
  ferry::v1::GenerateRequest request = Request(100, 0);
  request.mutable_sampling()->set_repetition_penalty(1.3f);  // or it says the same again and again
  const auto whole = system_->client().Complete(request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const std::string stop = whole->text.substr(whole->text.size() - 40, 12);
  const size_t end = whole->text.find(stop);
  ASSERT_GT(end, whole->text.size() / 2);
  request.mutable_sampling()->add_stop(stop);
  const Output output = RunAndKill(request);
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_EQ(output.text, whole->text.substr(0, end));
  EXPECT_EQ(output.reason, ferry::v1::FINISH_REASON_STOP);
}

TEST_F(MigrationTest, BranchesAreDrawnAgain) {
  ferry::v1::GenerateRequest request = Request(120, 11);
  request.mutable_sampling()->set_n(3);
  request.mutable_sampling()->set_max_tokens(300);
  const Output output = RunAndKill(request);
  ASSERT_TRUE(output.status.ok()) << output.status;
  for (uint32_t branch = 0; branch < 3; ++branch) {
    EXPECT_EQ(output.tokens[branch], Expected(request, branch)) << "branch " << branch;
  }
}

}  // namespace
}  // namespace integration
