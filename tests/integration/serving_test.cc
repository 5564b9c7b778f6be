// The main job with real processes: a prompt enters at the router, the cache crosses from a prefill
// to a decode worker, and the text is that of a single engine.

#include <cstdlib>
#include <thread>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace integration {
namespace {

constexpr int32_t kBlockSize = 64;

std::string DemoModel() { return std::getenv("FERRY_DEMO_MODEL"); }

class ServingTest : public testing::Test {
 protected:
  static SingleEngine& oracle() {
    static SingleEngine* oracle = new SingleEngine(DemoModel());
    return *oracle;
  }
  static std::vector<int32_t> Prompt(int32_t length, uint32_t salt) {
    return MakePrompt(length, salt, oracle().engine().network().config().vocab_size);
  }
  static std::vector<int32_t> Concat(std::vector<int32_t> a, const std::vector<int32_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  static SystemOptions Options() {
    SystemOptions options;
    options.model_dir = DemoModel();
    options.decode_flags = {"--num_blocks", "200"};
    options.prefill_flags = {"--num_blocks", "200"};
    return options;
  }
  static int64_t block_bytes() { return oracle().engine().cache_layout().block_bytes(); }
};

TEST_F(ServingTest, TheTextIsThatOfASingleEngineAndTheCacheHasCrossed) {
  SystemOptions options = Options();
  options.router_flags = {"--local_prefill_tokens", "0"};
  const auto system = FerrySystem::Start(options);
  for (const int32_t length : {1, 63, 64, 65, 200, 600}) {
    for (const uint64_t seed : {0, 7}) {
      SCOPED_TRACE(testing::Message() << "length " << length << " seed " << seed);
      const Ask ask = {Prompt(length, length + seed), /*max_tokens=*/20, seed};
      const auto completion = system->client().Complete(ToRequest(ask));
      ASSERT_TRUE(completion.ok()) << completion.status();
      EXPECT_EQ(Tokens(*completion), Expected(oracle(), ask));
      EXPECT_EQ(completion->finish_reason, ferry::v1::FINISH_REASON_LENGTH);
      const ferry::v1::GenerateSummary& summary = completion->summary;
      EXPECT_EQ(summary.prefill_worker(), system->prefill(0).address);
      EXPECT_EQ(summary.decode_worker(), system->decode(0).address);
      EXPECT_EQ(summary.kv_blocks(), (length + kBlockSize - 1) / kBlockSize);
      EXPECT_EQ(summary.kv_bytes(), summary.kv_blocks() * block_bytes());
      EXPECT_NE(summary.kv_transport(), "");
      EXPECT_EQ(summary.prompt_tokens(), length);
      EXPECT_EQ(summary.completion_tokens(), 20);
      EXPECT_EQ(summary.attempts(), 1);
      EXPECT_GT(summary.ttft_ms(), 0);
      const std::vector<uint32_t>& ids = completion->token_ids;
      EXPECT_EQ(completion->text, *system->client().Detokenize("", ids));
    }
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(10)), "");
}

TEST_F(ServingTest, ASecondRequestWithTheSamePrefixComputesAndTransfersOnlyTheRest) {
  SystemOptions options = Options();
  options.router_flags = {"--local_prefill_tokens", "0"};
  const auto system = FerrySystem::Start(options);
  const std::vector<int32_t> prefix = Prompt(256, 1);
  const Ask first = {Concat(prefix, Prompt(40, 2)), 8, 0};
  const Ask second = {Concat(prefix, Prompt(50, 3)), 8, 0};
  ASSERT_TRUE(system->client().Complete(ToRequest(first)).ok());
  const auto completion = system->client().Complete(ToRequest(second));
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), second));
  EXPECT_EQ(completion->summary.cached_tokens(), 256);
  EXPECT_EQ(completion->summary.kv_blocks(), 1);
  EXPECT_EQ(completion->summary.kv_bytes(), block_bytes());
  // The same prompt again: at least its last token is computed again.
  const auto again = system->client().Complete(ToRequest(second));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(Tokens(*again), Tokens(*completion));
}

TEST_F(ServingTest, PromptsThatShareAPrefixGoToTheWorkerThatHasIt) {
  SystemOptions options = Options();
  options.num_prefill = 2;
  options.router_flags = {"--local_prefill_tokens", "0"};
  const auto system = FerrySystem::Start(options);
  for (uint32_t family = 0; family < 4; ++family) {
    const std::vector<int32_t> prefix = Prompt(512, 100 + family);
    std::string worker;
    for (uint32_t i = 0; i < 3; ++i) {
      const auto completion =
          system->client().Complete(ToRequest({Concat(prefix, Prompt(20, i)), 4, 0}));
      ASSERT_TRUE(completion.ok()) << completion.status();
      if (i == 0) worker = completion->summary.prefill_worker();
      EXPECT_EQ(completion->summary.prefill_worker(), worker)
          << "family " << family << " request " << i;
    }
  }
}

TEST_F(ServingTest, AFollowUpTurnIsServedFromTheDecodeWorkersOwnBlocks) {
  const auto system = FerrySystem::Start(Options());
  const Ask first = {Prompt(400, 5), 100, 0};
  const auto answer = system->client().Complete(ToRequest(first));
  ASSERT_TRUE(answer.ok()) << answer.status();
  const Ask turn = {Concat(Concat(first.prompt, Tokens(*answer)), Prompt(20, 6)), 10, 0};
  const auto completion = system->client().Complete(ToRequest(turn));
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), turn));
  const ferry::v1::GenerateSummary& summary = completion->summary;
  EXPECT_EQ(summary.prefill_worker(), summary.decode_worker());
  EXPECT_EQ(summary.kv_bytes(), 0);
  EXPECT_GE(summary.cached_tokens(),
            448);  // of 500 in whole blocks; the last token sampled is not cached
}

TEST_F(ServingTest, ADecodeWorkerOfRoleBothServesAlone) {
  SystemOptions options = Options();
  options.num_prefill = 0;
  options.decode_flags = {"--role", "both", "--num_blocks", "200"};
  const auto system = FerrySystem::Start(options);
  const Ask ask = {Prompt(600, 8), 12, 0};
  const auto completion = system->client().Complete(ToRequest(ask));
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(Tokens(*completion), Expected(oracle(), ask));
  EXPECT_EQ(completion->summary.kv_bytes(), 0);
}

TEST_F(ServingTest, BranchesAreTheirOwnDraws) {
  SystemOptions options = Options();
  options.router_flags = {"--local_prefill_tokens", "0"};
  const auto system = FerrySystem::Start(options);
  const Ask ask = {Prompt(100, 9), 12, 42};
  ferry::v1::GenerateRequest request = ToRequest(ask);
  request.mutable_sampling()->set_n(3);
  request.mutable_sampling()->set_logprobs(2);
  std::vector<std::vector<int32_t>> branches(3);
  int finished = 0;
  const absl::Status status =
      system->client().Generate(request, [&](const ferry::v1::GenerateResponse& message) {
        for (const uint32_t id : message.token_ids()) branches[message.index()].push_back(id);
        EXPECT_EQ(message.logprobs_size(), message.token_ids_size());
        finished += message.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED;
        return true;
      });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(finished, 3);
  for (uint32_t branch = 0; branch < 3; ++branch) {
    engine::SamplingOptions sampling;
    sampling.temperature = 0.9f;
    sampling.top_p = 0.95f;
    sampling.top_k = 50;
    sampling.seed = 42;
    sampling.branch = branch;
    sampling.max_tokens = 12;
    EXPECT_EQ(branches[branch], oracle().Generate(ask.prompt, sampling)) << "branch " << branch;
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(10)), "");
}

// Three outputs outgrow the pool: the lowest priority is computed again, and nobody's text shows
// it.
TEST_F(ServingTest, WhoGivesWayUnderMemoryPressureHasTheTextOfASingleEngine) {
  SystemOptions options = Options();
  options.num_prefill = 1;
  options.decode_flags = {"--num_blocks", "22", "--growth_tokens", "0"};
  options.router_flags = {"--local_prefill_tokens", "0", "--kv_watermark", "1"};
  const auto system = FerrySystem::Start(options);
  std::vector<Ask> asks;
  std::vector<std::vector<int32_t>> expected;
  for (uint32_t i = 0; i < 3; ++i) {
    asks.push_back({Prompt(150, 40 + i), 800, i});
    expected.push_back(Expected(oracle(), asks.back()));
  }
  double preemptions = 0;
  // On a busy machine one may be over before the others have begun: then again.
  for (int round = 0; round < 5 && preemptions == 0; ++round) {
    std::vector<std::thread> clients;
    for (int i = 0; i < 3; ++i) {
      clients.emplace_back([&, i] {
        ferry::v1::GenerateRequest request = ToRequest(asks[i]);
        request.set_priority(i - 1);
        const auto completion = system->client().Complete(request);
        ASSERT_TRUE(completion.ok()) << completion.status();
        EXPECT_EQ(Tokens(*completion), expected[i]) << "priority " << i - 1;
        EXPECT_EQ(completion->summary.attempts(), 1);
      });
    }
    for (std::thread& client : clients) client.join();
    preemptions =
        SumOf(ReadMetrics(system->decode(0).metrics_port), "ferry_preemptions_total").value();
  }
  EXPECT_GT(preemptions, 0) << "the pool was too large for this test";
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
}

TEST_F(ServingTest, TenantsHaveTheSameTextAndShareNoCache) {
  SystemOptions options = Options();
  options.router_flags = {"--local_prefill_tokens", "0"};
  const auto system = FerrySystem::Start(options);
  const Ask ask = {Prompt(300, 50), 8, 0};
  const std::vector<int32_t> expected = Expected(oracle(), ask);
  ferry::v1::GenerateRequest request = ToRequest(ask);
  for (const auto& [tenant, cached] :
       {std::pair{"a", 0}, {"b", 0}, {"", 0}, {"a", 256}, {"b", 256}}) {
    request.set_tenant(tenant);
    const auto completion = system->client().Complete(request);
    ASSERT_TRUE(completion.ok()) << completion.status();
    EXPECT_EQ(Tokens(*completion), expected);
    EXPECT_EQ(completion->summary.cached_tokens(), cached) << "tenant \"" << tenant << '"';
  }
}

TEST_F(ServingTest, TextEndsBeforeAStopString) {
  const auto system = FerrySystem::Start(Options());
  ferry::v1::GenerateRequest request;
  request.set_text("Emma was not sorry");
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(60);
  const auto whole = system->client().Complete(request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_GT(whole->text.size(), 20u);
  const std::string stop = whole->text.substr(10, 6);
  request.mutable_sampling()->add_stop(stop);
  const auto cut = system->client().Complete(request);
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->text, whole->text.substr(0, whole->text.find(stop)));
  EXPECT_EQ(cut->finish_reason, ferry::v1::FINISH_REASON_STOP);
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(10)), "");
}

TEST_F(ServingTest, EachKindOfLinkWorksAlone) {
  for (const std::string kind : {"tcp", "shm"}) {
    SystemOptions options = Options();
    options.router_flags = {"--local_prefill_tokens", "0"};
    for (auto* flags : {&options.prefill_flags, &options.decode_flags}) {
      flags->insert(flags->end(), {"--links", kind});
    }
    const auto system = FerrySystem::Start(options);
    const Ask ask = {Prompt(300, 4), 8, 0};
    const auto completion = system->client().Complete(ToRequest(ask));
    ASSERT_TRUE(completion.ok()) << completion.status();
    EXPECT_EQ(Tokens(*completion), Expected(oracle(), ask));
    EXPECT_THAT(completion->summary.kv_transport(), testing::StartsWith(kind + "/"));
  }
}

TEST_F(ServingTest, EveryProcessExportsItsMetrics) {
  const auto system = FerrySystem::Start(Options());
  ASSERT_TRUE(system->client().Complete(ToRequest({Prompt(300, 3), 4, 0})).ok());
  EXPECT_THAT(ReadMetrics(system->router_metrics_port()),
              testing::HasSubstr("ferry_router_requests_total"));
  EXPECT_THAT(ReadMetrics(system->prefill(0).metrics_port), testing::HasSubstr("ferry_kv_blocks"));
  EXPECT_THAT(ReadMetrics(system->decode(0).metrics_port), testing::HasSubstr("ferry_kv_blocks"));
}

}  // namespace
}  // namespace integration
