// V4 shapes and switches that no fixture has, against a second implementation in double precision.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/model/network_runner.h"
#include "tests/model/random_v4_checkpoint.h"
#include "tests/model/reference_v4.h"
#include "tests/numerics/compare.h"

namespace model {
namespace {

using nlohmann::json;

json Small() {
  return json::parse(R"({
    "model_type": "deepseek_v4", "vocab_size": 61, "hidden_size": 37, "num_hidden_layers": 4,
    "num_attention_heads": 6, "head_dim": 20, "qk_rope_head_dim": 6, "q_lora_rank": 13,
    "o_groups": 3, "o_lora_rank": 7, "sliding_window": 9, "compress_ratios": [0, 4, 16, 4, 0],
    "index_n_heads": 9, "index_head_dim": 10, "index_topk": 5, "rope_theta": 10000,
    "compress_rope_theta": 160000, "rope_scaling": {"type": "yarn", "factor": 4,
      "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1024, "n_routed_experts": 7, "num_experts_per_tok": 3,
    "moe_intermediate_size": 11, "num_hash_layers": 2, "swiglu_limit": 1.5, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6})");
}

json Merged(json base, const json& changes) {
  base.update(changes);
  return base;
}

struct OddConfig {
  const char* name;
  json config;
  const char* dtype = "BF16";
};

// The name only: the default would print the whole config.
void PrintTo(const OddConfig& odd, std::ostream* out) { *out << odd.name; }

std::vector<OddConfig> OddConfigs() {
  return {
      {"small", Small()},
      {"float32", Small(), "F32"},
      {"other_ratios", Merged(Small(), {{"compress_ratios", {3, 7, 0, 7}},
                                        {"compress_rates",
                                         {{"compressed_sparse_attention", 3},
                                          {"heavily_compressed_attention", 7}}}})},
      {"ratio_one", Merged(Small(), {{"compress_ratios", {1, 2, 1, 0}},
                                     {"compress_rates",
                                      {{"compressed_sparse_attention", 1},
                                       {"heavily_compressed_attention", 2}}}})},
      {"hca_only", Merged(Small(), {{"compress_ratios", {16, 16, 16, 16}}})},
      {"csa_only", Merged(Small(), {{"compress_ratios", {4, 4, 4, 4}}})},
      {"window_of_one", Merged(Small(), {{"sliding_window", 1}})},
      {"window_beyond_the_prompt", Merged(Small(), {{"sliding_window", 300}})},
      {"one_entry_a_token", Merged(Small(), {{"index_topk", 1}})},
      {"every_entry", Merged(Small(), {{"index_topk", 512}})},
      {"one_stream", Merged(Small(), {{"hc_mult", 1}})},
      {"two_streams_few_steps", Merged(Small(), {{"hc_mult", 2}, {"hc_sinkhorn_iters", 1}})},
      {"other_eps", Merged(Small(), {{"rms_norm_eps", 0.3}, {"hc_eps", 0.01}})},
      {"all_hash", Merged(Small(), {{"num_hash_layers", 9}})},
      {"no_hash", Merged(Small(), {{"num_hash_layers", 0}})},
      {"hash_last", Merged(Small(), {{"mlp_layer_types", {"moe", "moe", "moe", "hash_moe"}}})},
      {"no_clamp", Merged(Small(), {{"swiglu_limit", 0}})},
      {"tied", Merged(Small(), {{"tie_word_embeddings", true}})},
      {"a_group_a_head", Merged(Small(), {{"o_groups", 6}, {"routed_scaling_factor", 2.5}})},
      {"one_head", Merged(Small(), {{"num_attention_heads", 1}, {"o_groups", 1}})},
      {"no_yarn", Merged(Small(), {{"rope_scaling", nullptr}})},
  };
}

class DeepseekV4OddConfigsTest : public ::testing::TestWithParam<OddConfig> {};

TEST_P(DeepseekV4OddConfigsTest, MatchTheReferenceWholeChunkedAndDecoded) {
  const std::string dir = ::testing::TempDir() + "/v4_odd_configs_" + GetParam().name;
  const EditableCheckpoint checkpoint =
      RandomV4CheckpointMaker(GetParam().config, GetParam().dtype, /*seed=*/7).Make();
  checkpoint.Write(dir);
  std::vector<int32_t> tokens;
  std::mt19937 random(3);
  for (int32_t i = 0; i < 70; ++i) {
    tokens.push_back(static_cast<int32_t>(random() % GetParam().config["vocab_size"].get<int>()));
  }
  const std::vector<double> expected = ReferenceV4Logits(checkpoint, tokens);

  NetworkRunner runner(dir);
  engine::Sequence whole = runner.NewSequence(tokens);
  const std::vector<float> actual = runner.Run(whole, 512);
  // Float32 against double over four layers; logits are of order 1.
  EXPECT_TRUE(numerics::AllClose<double>(actual, expected, {.abs = 2e-4}));
  engine::Sequence chunked = runner.NewSequence(tokens);
  EXPECT_TRUE(numerics::BitEqual(runner.Run(chunked, 19), actual));
  engine::Sequence decoded = runner.NewSequence(tokens);
  EXPECT_TRUE(numerics::BitEqual(runner.Run(decoded, 512, 1), actual));
}

INSTANTIATE_TEST_SUITE_P(Configs, DeepseekV4OddConfigsTest, ::testing::ValuesIn(OddConfigs()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace model
