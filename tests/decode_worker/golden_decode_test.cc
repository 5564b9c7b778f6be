// The decode worker on real (tiny) checkpoints: local prompts, transferred ones, mixed batches and
// preemption all give the text of an independent implementation, or of the request alone.

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "gtest/gtest.h"
#include "model/safetensors.h"
#include "tests/decode_worker/harness.h"

namespace decode_worker {
namespace {

constexpr int32_t kBlockSize = 64;

// Greedy tokens are certain where the margin is above twice the error that the fixtures allow a
// logit.
constexpr float kCertainMargin = 2e-3f;

struct GoldenCase {
  std::vector<int32_t> prompt;
  std::vector<int32_t> certain;  // greedy tokens before the first near tie
};

std::string ModelDir(const std::string& model) {
  return absl::StrCat(std::getenv("FERRY_GOLDEN_DIR"), "/models/", model);
}

std::vector<GoldenCase> LoadCases(const std::string& model) {
  auto file = model::Checkpoint::OpenFile(absl::StrCat(ModelDir(model), "/golden.safetensors"));
  EXPECT_TRUE(file.ok()) << file.status();
  std::vector<GoldenCase> cases;
  for (const int32_t length : {1, 5, 64, 130, 300}) {
    const std::string name = absl::StrCat("p", length);
    const auto* ids = reinterpret_cast<const int64_t*>((*(*file)->Get(name + ".ids"))->data.data());
    const auto* greedy =
        reinterpret_cast<const int64_t*>((*(*file)->Get(name + ".greedy"))->data.data());
    const auto* margin =
        reinterpret_cast<const float*>((*(*file)->Get(name + ".margin"))->data.data());
    GoldenCase golden;
    golden.prompt.assign(ids, ids + length);
    for (int32_t i = 0; i < 24 && margin[i] > kCertainMargin; ++i) {
      golden.certain.push_back(static_cast<int32_t>(greedy[i]));
    }
    cases.push_back(std::move(golden));
  }
  return cases;
}

std::unique_ptr<engine::Engine> MakeEngine(const std::string& model) {
  engine::EngineOptions options;
  options.model_dir = ModelDir(model);
  options.dtype = "float32";
  options.num_threads = 1;
  options.limits.max_tokens = 320;
  options.limits.max_seqs = 16;
  options.limits.max_samples = 16;
  auto engine = engine::Engine::Create(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return *std::move(engine);
}

RequestSpec Spec(const std::string& id, std::vector<int32_t> tokens, int32_t max_tokens = 24) {
  RequestSpec spec;
  spec.id = {.request_id = id, .attempt = 1};
  spec.num_prompt_tokens = static_cast<int32_t>(tokens.size());
  spec.tokens = std::move(tokens);
  spec.sampling.temperature = 0;
  spec.sampling.max_tokens = max_tokens;
  spec.cache_namespace = "test";
  spec.local_prefill = true;
  return spec;
}

RequestSpec Seeded(RequestSpec spec, uint64_t seed) {
  spec.sampling.temperature = 0.9f;
  spec.sampling.top_p = 0.95f;
  spec.sampling.seed = seed;
  return spec;
}

class GoldenDecodeTest : public ::testing::TestWithParam<const char*> {
 protected:
  void Start(const DecodeOptions& options = {}, int32_t num_blocks = 64, bool ucx = false) {
    harness_ =
        std::make_unique<SchedulerHarness>(options, MakeEngine(GetParam()), Room{num_blocks}, ucx);
  }
  void ExpectGoldenTextAfterTransfers();
  void TearDown() override {
    EXPECT_TRUE(harness_->WaitIdle());
    prefill_.reset();
    harness_.reset();
  }
  static void ExpectCertain(const GoldenCase& golden, const std::vector<int32_t>& tokens) {
    ASSERT_GE(tokens.size(), golden.certain.size());
    EXPECT_EQ(std::vector<int32_t>(tokens.begin(),
                                   tokens.begin() + static_cast<int64_t>(golden.certain.size())),
              golden.certain)
        << "prompt of " << golden.prompt.size();
  }
  std::vector<int32_t> Alone(RequestSpec spec) {
    absl::StrAppend(&spec.id.request_id, "-alone");
    const auto sink = harness_->Submit(spec);
    EXPECT_TRUE(sink->Wait().ok());
    return sink->tokens();
  }

  std::unique_ptr<SchedulerHarness> harness_;
  std::unique_ptr<FakePrefill> prefill_;
};

TEST_P(GoldenDecodeTest, LocalPromptsInOneBatchGiveTheGoldenText) {
  DecodeOptions options;
  options.chunk_tokens = 48;
  Start(options);
  const std::vector<GoldenCase> cases = LoadCases(GetParam());
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  size_t certain = 0;
  for (const GoldenCase& golden : cases) {
    certain += golden.certain.size();
    sinks.push_back(harness_->Submit(Spec(absl::StrCat("r", sinks.size()), golden.prompt)));
  }
  EXPECT_GT(certain, 60u) << "most of the 120 tokens are beyond doubt";
  for (size_t i = 0; i < cases.size(); ++i) {
    ASSERT_TRUE(sinks[i]->Wait().ok());
    ExpectCertain(cases[i], sinks[i]->tokens());
  }
}

void GoldenDecodeTest::ExpectGoldenTextAfterTransfers() {
  prefill_ = std::make_unique<FakePrefill>(MakeEngine(GetParam()), Room{16}, harness_->network());
  prefill_->Connect(harness_->runtime());
  int32_t i = 0;
  for (const GoldenCase& golden : LoadCases(GetParam())) {
    RequestSpec spec = Spec(absl::StrCat("r", i++), golden.prompt);
    spec.local_prefill = false;
    spec.prefill_epoch = prefill_->epoch();
    const auto sink = harness_->Submit(spec);
    const std::vector<FirstToken> first = prefill_->Compute(spec);
    const absl::StatusOr<ReserveGrant> grant =
        ReserveAndWait(harness_->scheduler(), {.request = spec.id,
                                               .sender = prefill_->epoch(),
                                               .num_tokens = spec.num_prompt_tokens,
                                               .wait = kPatience});
    ASSERT_TRUE(grant.ok()) << grant.status();
    const auto sent = prefill_->SendAll(harness_->runtime().epoch, grant->transfer_id, 1,
                                        grant->cached_tokens / kBlockSize);
    ASSERT_TRUE(ConfirmAndWait(harness_->scheduler(), {.request = spec.id,
                                                       .transfer_id = grant->transfer_id,
                                                       .sender = prefill_->epoch(),
                                                       .num_blocks = sent.blocks,
                                                       .num_bytes = sent.bytes,
                                                       .first_tokens = first})
                    .ok());
    ASSERT_TRUE(sink->Wait().ok());
    ExpectCertain(golden, sink->tokens());
    EXPECT_EQ(sink->usage().computed_tokens, 0);
  }
}

TEST_P(GoldenDecodeTest, TransferredPromptsGiveTheGoldenText) {
  Start();
  ExpectGoldenTextAfterTransfers();
}

TEST_P(GoldenDecodeTest, PromptsTransferredOverUcxGiveTheGoldenText) {
  Start({}, 64, /*ucx=*/true);
  ExpectGoldenTextAfterTransfers();
}

TEST_P(GoldenDecodeTest, MixedBatchEqualsEachAlone) {
  DecodeOptions options;
  options.chunk_tokens = 64;
  Start(options, 128);
  std::vector<RequestSpec> specs;
  for (const GoldenCase& golden : LoadCases(GetParam())) {
    specs.push_back(Spec(absl::StrCat("greedy", specs.size()), golden.prompt, 40));
    specs.push_back(
        Seeded(Spec(absl::StrCat("seeded", specs.size()), golden.prompt, 50), specs.size()));
    specs.back().sampling.frequency_penalty = 0.3f;
  }
  std::vector<std::vector<int32_t>> alone;
  for (const RequestSpec& spec : specs) alone.push_back(Alone(spec));
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (RequestSpec spec : specs) {
    spec.cache_namespace = "batch";  // computed anew
    sinks.push_back(harness_->Submit(spec));
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    ASSERT_TRUE(sinks[i]->Wait().ok());
    EXPECT_EQ(sinks[i]->tokens(), alone[i]) << specs[i].id.request_id;
  }
}

TEST_P(GoldenDecodeTest, PreemptionChangesNoText) {
  DecodeOptions options;
  options.growth_tokens = 0;
  Start(options, /*num_blocks=*/8);
  std::vector<RequestSpec> specs;
  for (int32_t i = 0; i < 8; ++i) {
    const RequestSpec spec = Spec(absl::StrCat("r", i), RandomTokens(60 + 9 * i, 5 + i, 300), 90);
    specs.push_back(i % 2 == 0 ? spec : Seeded(spec, 9));
  }
  std::vector<std::vector<int32_t>> alone;
  for (const RequestSpec& spec : specs) alone.push_back(Alone(spec));
  const int64_t before = harness_->scheduler().snapshot().batch.preemptions;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (const RequestSpec& spec : specs) sinks.push_back(harness_->Submit(spec));
  for (size_t i = 0; i < specs.size(); ++i) {
    ASSERT_TRUE(sinks[i]->Wait().ok());
    EXPECT_EQ(sinks[i]->tokens(), alone[i]) << specs[i].id.request_id;
  }
  EXPECT_GT(harness_->scheduler().snapshot().batch.preemptions, before);
}

TEST_P(GoldenDecodeTest, BranchZeroIsTheSingleRequestAndOthersDiffer) {
  Start();
  RequestSpec spec = Seeded(Spec("r", LoadCases(GetParam())[3].prompt, 40), 77);
  const std::vector<int32_t> alone = Alone(spec);
  spec.num_branches = 3;
  const auto sink = harness_->Submit(spec);
  ASSERT_TRUE(sink->Wait().ok());
  EXPECT_EQ(sink->tokens(0), alone);
  EXPECT_NE(sink->tokens(1), sink->tokens(0));
  EXPECT_NE(sink->tokens(2), sink->tokens(1));
  EXPECT_EQ(sink->tokens(2).size(), 40u);
}

TEST_P(GoldenDecodeTest, FollowUpTurnReusesOwnBlocksAndSaysTheSame) {
  Start();
  const RequestSpec first = Spec("turn1", LoadCases(GetParam())[3].prompt, 70);
  const auto sink = harness_->Submit(first);
  ASSERT_TRUE(sink->Wait().ok());
  std::vector<int32_t> history = first.tokens;
  const std::vector<int32_t> answer = sink->tokens();
  history.insert(history.end(), answer.begin(), answer.end());
  RequestSpec second = Spec("turn2", history, 20);
  const auto cached = harness_->Submit(second);
  ASSERT_TRUE(cached->Wait().ok());
  EXPECT_EQ(cached->usage().cached_tokens, 3 * kBlockSize);
  second.cache_namespace = "nothing cached";
  EXPECT_EQ(cached->tokens(), Alone(second));
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenDecodeTest, ::testing::Values("v3_odd", "v2_group", "v32_odd"));

}  // namespace
}  // namespace decode_worker
