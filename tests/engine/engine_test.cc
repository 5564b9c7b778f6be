// Whole engines on real (tiny) checkpoints: the same text whether prompts run alone, in chunks,
// over a cached prefix or in a mixed batch with steps in flight.

#include "engine/engine.h"

#include <cstdlib>
#include <numeric>

#include "absl/strings/match.h"
#include "engine/cache_memory.h"
#include "engine/plan_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engine {
namespace {

using ::testing::HasSubstr;

std::string Golden(const std::string& model) {
  return std::string(std::getenv("FERRY_GOLDEN_DIR")) + "/models/" + model;
}

EngineOptions Options(const std::string& model) {
  EngineOptions options;
  options.model_dir = Golden(model);
  options.num_threads = 2;
  options.limits.max_tokens = 256;
  options.limits.max_seqs = 8;
  options.limits.max_samples = 8;
  options.num_penalty_slots = 4;
  return options;
}

class EngineTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto engine = Engine::Create(Options(GetParam()));
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    memory_ = std::make_unique<CacheMemory>(
        *CacheMemory::Map(kBlocks * engine_->cache_layout().block_bytes()));
    engine_->SetCache(memory_->span(), {});
    for (auto& plan : plans_) plan = std::make_unique<model::StepPlan>(engine_->limits());
    builders_[0] = std::make_unique<PlanBuilder>(kBlockSize, *plans_[0]);
    builders_[1] = std::make_unique<PlanBuilder>(kBlockSize, *plans_[1]);
  }

  Sequence Prompt(int32_t length, int32_t salt) {
    Sequence seq;
    for (int32_t i = 0; i < length; ++i) {
      seq.tokens.push_back((i * 37 + salt * 101 + 3) % engine_->network().config().vocab_size);
    }
    seq.num_prompt_tokens = length;
    seq.root = hasher_.Root("test");
    seq.sampling.temperature = 0;
    return seq;
  }

  PlanBuilder& Begin() {
    PlanBuilder& builder = *builders_[step_ % 2];
    builder.Begin(step_);
    return builder;
  }
  StepHandle Launch() { return *engine_->Launch(builders_[step_++ % 2]->plan()); }

  // One sequence alone: prefill in chunks of `chunk`, then decode one step at a time.
  std::vector<int32_t> Generate(Sequence& seq, int32_t chunk, int32_t count) {
    while (seq.num_output_tokens() < count) {
      const int32_t missing = static_cast<int32_t>(seq.tokens.size()) - seq.num_computed;
      const bool decode = seq.num_output_tokens() > 0;
      const int32_t rows = decode ? 1 : std::min(missing, chunk);
      EXPECT_TRUE(GrowBlocks(seq, seq.num_computed + rows, kBlockSize, pool_).ok());
      const int64_t step = step_;
      Begin().Add(seq, rows, /*absorbed=*/decode, /*sample=*/rows == missing);
      const auto result = engine_->Collect(Launch());
      EXPECT_TRUE(result.ok()) << result.status();
      if (rows == missing) AcceptToken(seq, step, result->samples[0].token_id);
    }
    IndexFullBlocks(seq, seq.num_computed, kBlockSize, hasher_, pool_);
    return {seq.tokens.begin() + seq.num_prompt_tokens, seq.tokens.end()};
  }

  static constexpr int32_t kBlocks = 64;
  static constexpr int32_t kBlockSize = 64;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<CacheMemory> memory_;
  BlockPool pool_{kBlocks};
  block_hash::BlockHasher hasher_{0};
  std::unique_ptr<model::StepPlan> plans_[2];
  std::unique_ptr<PlanBuilder> builders_[2];
  int64_t step_ = 0;
};

TEST_P(EngineTest, ChunksAndACachedPrefixChangeNoBitOfTheCache) {
  Sequence whole = Prompt(200, 1);
  const std::vector<int32_t> text = Generate(whole, 256, 6);
  Sequence chunked = Prompt(200, 1);
  EXPECT_EQ(Generate(chunked, 48, 6), text);
  const int64_t block_bytes = engine_->cache_layout().block_bytes();
  for (int32_t i = 0; i < 3; ++i) {  // the full blocks of the prompt
    EXPECT_EQ(std::memcmp(memory_->data() + whole.blocks[i] * block_bytes,
                          memory_->data() + chunked.blocks[i] * block_bytes, block_bytes),
              0)
        << "block " << i;
  }
  ReleaseBlocks(whole, pool_);
  ReleaseBlocks(chunked, pool_);
  Sequence again = Prompt(200, 1);
  again.hashes = hasher_.Chain(again.root, again.tokens, kBlockSize);
  again.blocks = pool_.AcquirePrefix(again.hashes);
  ASSERT_EQ(again.blocks.size(), 3u);
  again.num_indexed = 3;
  again.num_computed = 192;
  EXPECT_EQ(Generate(again, 256, 6), text);
}

TEST_P(EngineTest, AMixedBatchWithTwoStepsInFlightGivesEachItsOwnText) {
  constexpr int32_t kCount = 12;
  const int32_t lengths[] = {5, 70, 130, 64};
  std::vector<std::vector<int32_t>> alone;
  std::vector<Sequence> seqs;
  for (int32_t i = 0; i < 4; ++i) {
    Sequence seq = Prompt(lengths[i], i);
    if (i % 2 == 1) {
      seq.sampling.temperature = 0.8f;
      seq.sampling.top_p = 0.9f;
      seq.sampling.seed = 100 + i;
    }
    seqs.push_back(seq);
    alone.push_back(Generate(seq, 256, kCount));
    ReleaseBlocks(seq, pool_);
  }
  pool_.ClearIndex();

  // Continuous: at every step decodes first, then one chunk of 48; the next step is launched before
  // the previous one is collected.
  struct Flight {
    StepHandle handle;
    int64_t step;
    std::vector<std::pair<size_t, int32_t>> samples;  // sequence, sample
  };
  std::deque<Flight> flights;
  const auto collect = [&] {
    const Flight flight = flights.front();
    flights.pop_front();
    const auto result = engine_->Collect(flight.handle);
    ASSERT_TRUE(result.ok()) << result.status();
    for (const auto& [s, sample] : flight.samples) {
      AcceptToken(seqs[s], flight.step, result->samples[sample].token_id);
    }
  };
  for (int guard = 0; guard < 200; ++guard) {
    PlanBuilder& builder = Begin();
    Flight flight{.handle = 0, .step = step_, .samples = {}};
    for (size_t s = 0; s < seqs.size(); ++s) {
      Sequence& seq = seqs[s];
      const bool prefilled = seq.num_computed >= seq.num_prompt_tokens;
      if (!prefilled || seq.num_output_tokens() >= kCount) continue;
      ASSERT_TRUE(GrowBlocks(seq, seq.num_computed + 1, kBlockSize, pool_).ok());
      flight.samples.emplace_back(s, builder.Add(seq, 1, /*absorbed=*/true, /*sample=*/true));
    }
    for (size_t s = 0; s < seqs.size(); ++s) {
      Sequence& seq = seqs[s];
      const int32_t missing = seq.num_prompt_tokens - seq.num_computed;
      if (missing <= 0) continue;
      const int32_t rows = std::min(missing, 48);
      ASSERT_TRUE(GrowBlocks(seq, seq.num_computed + rows, kBlockSize, pool_).ok());
      const int32_t sample = builder.Add(seq, rows, /*absorbed=*/false, rows == missing);
      if (sample >= 0) flight.samples.emplace_back(s, sample);
      break;
    }
    if (builder.empty()) break;
    flight.handle = Launch();
    flights.push_back(flight);
    if (flights.size() == 2) collect();
  }
  while (!flights.empty()) collect();
  for (size_t s = 0; s < seqs.size(); ++s) {
    ASSERT_GE(seqs[s].num_output_tokens(), kCount);
    const auto begin = seqs[s].tokens.begin() + seqs[s].num_prompt_tokens;
    EXPECT_EQ(std::vector<int32_t>(begin, begin + kCount), alone[s]) << "sequence " << s;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EngineTest, testing::Values("v2_group", "v3_odd", "v3_fp8"));

TEST(EngineCreateTest, AStepHoldsEverySequenceThatMayRun) {
  EngineOptions options = Options("v3_odd");
  options.limits = {.max_tokens = 100, .max_seqs = 130};
  const auto engine = Engine::Create(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const model::StepLimits& limits = (*engine)->limits();
  EXPECT_GE(limits.max_tokens, 130);
  EXPECT_GE(limits.max_absorbed_tokens, 130);
  EXPECT_GE(limits.max_samples, 130);
}

TEST(EngineCreateTest, WrongOptionsAreOneSentence) {
  EngineOptions options = Options("v3_odd");
  options.device = "tpu";
  EXPECT_THAT(std::string(Engine::Create(options).status().message()), HasSubstr("'tpu'"));
  options = Options("v3_odd");
  options.device = "cuda";  // says what is missing, or there is a GPU
  const absl::Status status = Engine::Create(options).status();
  EXPECT_TRUE(status.ok() || absl::StrContains(std::string(status.message()), "device cuda: this"))
      << status;
  options = Options("v3_odd");
  options.dtype = "bfloat16";
  EXPECT_THAT(std::string(Engine::Create(options).status().message()), HasSubstr("use float32"));
  options = Options("v3_odd");
  options.kv_cache_dtype = "int4";
  EXPECT_THAT(std::string(Engine::Create(options).status().message()), HasSubstr("'int4'"));
  options = Options("v3_odd");
  options.max_model_len = 1 << 20;
  EXPECT_THAT(std::string(Engine::Create(options).status().message()), HasSubstr("2048 positions"));
  options = Options("v3_odd");
  options.block_size = 48;
  EXPECT_THAT(std::string(Engine::Create(options).status().message()), HasSubstr("48"));
  options = Options("no_such_model");
  EXPECT_EQ(Engine::Create(options).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace engine
