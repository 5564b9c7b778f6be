// Shapes and switches that no fixture has, against a second implementation in double precision.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/model/network_runner.h"
#include "tests/model/random_checkpoint.h"
#include "tests/model/reference_network.h"
#include "tests/numerics/compare.h"

namespace model {
namespace {

using nlohmann::json;

json SmallV2() {
  return json::parse(R"({
    "model_type": "deepseek_v2", "vocab_size": 41, "hidden_size": 37, "num_hidden_layers": 3,
    "num_attention_heads": 3, "q_lora_rank": null, "kv_lora_rank": 9, "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 2, "v_head_dim": 7, "intermediate_size": 11, "moe_intermediate_size": 6,
    "first_k_dense_replace": 1, "n_routed_experts": 5, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "max_position_embeddings": 1024})");
}

json SmallV3() {
  return json::parse(R"({
    "model_type": "deepseek_v3", "vocab_size": 50, "hidden_size": 33, "num_hidden_layers": 3,
    "num_attention_heads": 1, "q_lora_rank": 13, "kv_lora_rank": 130, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 6, "v_head_dim": 3, "intermediate_size": 20, "moe_intermediate_size": 5,
    "first_k_dense_replace": 1, "n_routed_experts": 12, "n_shared_experts": 3, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 3, "max_position_embeddings": 1024})");
}

// Enough index heads that no two scores tie at zero.
json SmallV32() {
  json config = SmallV3();
  config.update(json::parse(R"({"model_type": "deepseek_v32", "index_n_heads": 18,
    "index_head_dim": 11, "index_topk": 20})"));
  return config;
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
  const json yarn = {{"rope_type", "yarn"},
                     {"factor", 8.0},
                     {"rope_theta", 500.0},
                     {"original_max_position_embeddings", 32},
                     {"mscale_all_dim", 0.8}};  // without mscale: cos and sin get a factor
  json yarn_mscale = yarn;
  yarn_mscale["mscale"] = 1.3;
  yarn_mscale["truncate"] = false;
  return {
      {"v2_tiny", SmallV2()},
      {"v2_float32", SmallV2(), "F32"},
      {"v2_tied", Merged(SmallV2(), {{"tie_word_embeddings", true}})},
      {"v2_dense_only", Merged(SmallV2(), {{"first_k_dense_replace", 3}})},
      {"v2_experts_only_none_shared",
       Merged(SmallV2(), {{"first_k_dense_replace", 0}, {"n_shared_experts", nullptr}})},
      {"v2_groups", Merged(SmallV2(), {{"topk_method", "group_limited_greedy"},
                                       {"n_routed_experts", 6},
                                       {"n_group", 3},
                                       {"topk_group", 2},
                                       {"routed_scaling_factor", 16.0},
                                       {"q_lora_rank", 8}})},
      {"v2_one_expert", Merged(SmallV2(), {{"n_routed_experts", 1}, {"num_experts_per_tok", 1}})},
      {"v3_tiny", SmallV3()},
      {"v3_half_split_rope", Merged(SmallV3(), {{"rope_interleave", false}})},
      {"v3_not_renormalised", Merged(SmallV3(), {{"norm_topk_prob", false}})},
      {"v3_every_second_layer", Merged(SmallV3(), {{"moe_layer_freq", 2}})},
      {"v3_other_eps", Merged(SmallV3(), {{"rms_norm_eps", 0.3}})},
      {"v32_tiny", SmallV32()},
      {"v32_float32", SmallV32(), "F32"},
      {"v32_one_key", Merged(SmallV32(), {{"index_topk", 1}})},
      {"v32_past_the_lists_padding", Merged(SmallV32(), {{"index_topk", 129}})},
      {"v32_key_all_rotary", Merged(SmallV32(), {{"index_head_dim", 6}, {"index_n_heads", 70}})},
      {"v32_wide_index_keys", Merged(SmallV32(), {{"index_head_dim", 140}})},
      {"v32_dense_last", Merged(SmallV32(), {{"mlp_layer_types", {"sparse", "sparse", "dense"}}})},
      {"v32_yarn", Merged(SmallV32(), {{"rope_parameters", yarn}})},
      {"v3_yarn", Merged(SmallV3(), {{"rope_parameters", yarn}})},
      {"v3_yarn_mscale", Merged(SmallV3(), {{"rope_scaling", yarn_mscale}}), "F32"},
  };
}

class OddConfigsTest : public ::testing::TestWithParam<OddConfig> {};

TEST_P(OddConfigsTest, MatchTheReferenceRaggedChunkedAndAbsorbed) {
  const std::string dir = ::testing::TempDir() + "/odd_configs_" + GetParam().name;
  const EditableCheckpoint checkpoint =
      RandomCheckpointMaker(GetParam().config, GetParam().dtype, /*seed=*/7).Make();
  checkpoint.Write(dir);
  std::vector<int32_t> tokens;
  std::mt19937 random(3);
  for (int32_t i = 0; i < 150; ++i) {
    tokens.push_back(static_cast<int32_t>(random() % GetParam().config["vocab_size"].get<int>()));
  }
  const std::vector<double> expected = ReferenceLogits(checkpoint, tokens);

  NetworkOptions options = NetworkRunner::Options();
  options.piece_tokens = 32;
  NetworkRunner runner(dir, options);
  // Float32 against double over three layers; logits are of order 1.
  const numerics::Tolerance tolerance{.abs = 2e-4};
  engine::Sequence whole = runner.NewSequence(tokens);
  const std::vector<float> actual = runner.Run(whole, 512);
  EXPECT_TRUE(numerics::AllClose<double>(actual, expected, tolerance));
  engine::Sequence chunked = runner.NewSequence(tokens);
  EXPECT_TRUE(numerics::BitEqual(runner.Run(chunked, 19), actual));
  engine::Sequence absorbed = runner.NewSequence(tokens);
  EXPECT_TRUE(numerics::AllClose<double>(runner.Run(absorbed, 512, 1), expected, tolerance));
}

INSTANTIATE_TEST_SUITE_P(Configs, OddConfigsTest, ::testing::ValuesIn(OddConfigs()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace model
