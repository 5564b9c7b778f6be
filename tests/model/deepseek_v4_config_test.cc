#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/config.h"
#include "nlohmann/json.hpp"
#include "tests/model/published_v4.h"

namespace model {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

ModelConfig Parse(const json& text) {
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(ModelConfig());
}

// The same model as transformers writes it.
json NewSpelling() {
  json text = PublishedV4Flash();
  for (const char* old :
       {"compress_ratios", "num_hash_layers", "rope_scaling", "qk_rope_head_dim"}) {
    text.erase(old);
  }
  text["partial_rotary_factor"] = 0.125;
  text["compress_rates"] = {{"compressed_sparse_attention", 4},
                            {"heavily_compressed_attention", 128}};
  for (int layer = 0; layer < 43; ++layer) {
    text["layer_types"].push_back(layer < 2        ? "sliding_attention"
                                  : layer % 2 == 0 ? "compressed_sparse_attention"
                                                   : "heavily_compressed_attention");
    text["mlp_layer_types"].push_back(layer < 3 ? "hash_moe" : "moe");
  }
  text["rope_parameters"] = {
      {"main",
       {{"rope_type", "default"}, {"rope_theta", 10000.0}, {"partial_rotary_factor", 0.125}}},
      {"compress",
       {{"rope_type", "yarn"},
        {"rope_theta", 160000.0},
        {"factor", 16.0},
        {"original_max_position_embeddings", 65536},
        {"beta_fast", 32},
        {"beta_slow", 1},
        {"attention_factor", 1.0}}}};
  return text;
}

TEST(DeepseekV4ConfigTest, ReadsThePublishedFlash) {
  const ModelConfig config = Parse(PublishedV4Flash());
  EXPECT_EQ(config.family, ModelFamily::kDeepseekV4);
  EXPECT_EQ(config.qk_head_dim(), 512);
  EXPECT_EQ(config.qk_rope_head_dim, 64);
  EXPECT_EQ(config.v_head_dim, 512);
  EXPECT_NEAR(config.softmax_scale(), 0.0441941738, 1e-8);  // models.md 3.4
  EXPECT_EQ(config.layer_types.size(), 43u);
  EXPECT_EQ(config.CountLayers(LayerType::kSlidingAttention), 2);
  EXPECT_EQ(config.CountLayers(LayerType::kCompressedSparseAttention), 21);
  EXPECT_EQ(config.CountLayers(LayerType::kHeavilyCompressedAttention), 20);
  EXPECT_EQ(config.csa_ratio, 4);
  EXPECT_EQ(config.hca_ratio, 128);
  EXPECT_TRUE(config.hash_moe[2]);
  EXPECT_FALSE(config.hash_moe[3]);
  EXPECT_TRUE(config.IsMoeLayer(0));
  EXPECT_EQ(config.gate.method, kernels::GateMethod::kSqrtSoftplus);
  EXPECT_EQ(config.gate.top_k, 6);
  EXPECT_TRUE(config.gate.norm_topk_prob);
  EXPECT_FLOAT_EQ(config.gate.routed_scaling_factor, 1.5f);
  EXPECT_FLOAT_EQ(config.swiglu_limit, 10);
  EXPECT_TRUE(config.fp8_weights);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(1));
  EXPECT_FALSE(config.rope.yarn);
  EXPECT_EQ(config.rope.rope_theta, 10000);
  EXPECT_TRUE(config.compress_rope.yarn);
  EXPECT_EQ(config.compress_rope.rope_theta, 160000);
  EXPECT_EQ(RopeAttentionFactor(config.compress_rope), 1.0f);
}

// models.md 3.4, computed there in double precision.
TEST(DeepseekV4ConfigTest, FrequenciesOfCompressedLayersHaveTheKnownValues) {
  const std::vector<float> inv_freq =
      InverseFrequencies(Parse(PublishedV4Flash()).compress_rope, 64);
  const std::pair<int, double> known[] = {{0, 1},
                                          {1, 0.687656022},
                                          {10, 0.0236435402},
                                          {11, 0.0162586228},
                                          {15, 0.00363553858},
                                          {16, 0.002265625},
                                          {17, 0.00139680129},
                                          {20, 0.000296977778},
                                          {22, 9.0867843e-05},
                                          {23, 4.54442323e-05},
                                          {24, 1.953125e-05},
                                          {25, 5.37231267e-06},
                                          {31, 5.68052904e-07}};
  ASSERT_EQ(inv_freq.size(), 32u);
  for (const auto& [i, value] : known) EXPECT_NEAR(inv_freq[i] / value, 1, 1e-6) << i;
}

TEST(DeepseekV4ConfigTest, BothSpellingsMeanTheSame) {
  const ModelConfig a = Parse(PublishedV4Flash());
  const ModelConfig b = Parse(NewSpelling());
  EXPECT_EQ(a.layer_types, b.layer_types);
  EXPECT_EQ(a.hash_moe, b.hash_moe);
  EXPECT_EQ(a.qk_rope_head_dim, b.qk_rope_head_dim);
  EXPECT_EQ(InverseFrequencies(a.rope, 64), InverseFrequencies(b.rope, 64));
  EXPECT_EQ(InverseFrequencies(a.compress_rope, 64), InverseFrequencies(b.compress_rope, 64));
  EXPECT_EQ(RopeAttentionFactor(b.compress_rope), 1.0f);
}

TEST(DeepseekV4ConfigTest, RatiosOfOtherSizes) {
  json text = PublishedV4Flash();
  text["num_hidden_layers"] = 4;
  text["compress_ratios"] = {0, 4, 32, 4, 0};
  EXPECT_EQ(Parse(text).hca_ratio, 32);
  EXPECT_THAT(
      Parse(text).layer_types,
      ElementsAre(LayerType::kSlidingAttention, LayerType::kCompressedSparseAttention,
                  LayerType::kHeavilyCompressedAttention, LayerType::kCompressedSparseAttention));
  text["compress_rates"] = {{"compressed_sparse_attention", 8},
                            {"heavily_compressed_attention", 64}};
  text["compress_ratios"] = {8, 64, 8, 64};
  EXPECT_EQ(Parse(text).csa_ratio, 8);
  EXPECT_EQ(Parse(text).hca_ratio, 64);
  text.erase("compress_rates");
  text["compress_rate_csa"] = 8;
  text["compress_rate_hca"] = 64;
  EXPECT_EQ(Parse(text).CountLayers(LayerType::kCompressedSparseAttention), 2);
}

TEST(DeepseekV4ConfigTest, RefusesInOneSentenceNamingFileKeyAndValue) {
  struct BadConfig {
    const char* key;
    json value;
    const char* message;
  };
  const BadConfig cases[] = {
      {"compress_ratios", nullptr, "layer_types (or compress_ratios) is missing"},
      {"compress_ratios",
       {0, 4},
       "compress_ratios must be a list of at least num_hidden_layers = 43"},
      {"compress_ratios", json::array_t(43, 4.5),
       "compress_ratios holds 4.5: expected 0, 4 or 128"},
      {"layer_types", json::array_t(43, "full_attention"),
       "layer_types holds \"full_attention\": expected sliding_attention"},
      {"layer_types", json::array_t(43, "sliding_attention"),
       "layer_types must have a layer that compresses"},
      {"compress_ratios", json::array_t(43, 0),
       "compress_ratios must have a layer that compresses"},
      {"mlp_layer_types", json::array_t(43, "dense"),
       "mlp_layer_types holds \"dense\": expected hash_moe or moe"},
      {"compress_rates", 4, "compress_rates must be an object, is 4"},
      {"compress_rates",
       {{"compressed_sparse_attention", 0}},
       "compress_rates.compressed_sparse_attention must be an integer in [1, 4096], is 0"},
      {"num_key_value_heads", 64, "num_key_value_heads must be an integer in [1, 1], is 64"},
      {"qk_rope_head_dim", 63, "must give an even number of dimensions below head_dim = 512"},
      {"qk_rope_head_dim", 512, "must give an even number of dimensions below head_dim = 512"},
      {"index_head_dim", 32, "index_head_dim = 32 is below the 64 rotary dimensions"},
      {"o_groups", 7, "o_groups = 7 must divide num_attention_heads = 64"},
      {"n_shared_experts", 2, "n_shared_experts must be an integer in [1, 1], is 2"},
      {"num_experts_per_tok", 257, "num_experts_per_tok must be an integer in [1, 256], is 257"},
      {"scoring_func", "sigmoid", "scoring_func \"sigmoid\" is not supported for deepseek_v4"},
      {"hc_mult", 17, "hc_mult must be an integer in [1, 16], is 17"},
      {"hc_sinkhorn_iters", 0, "hc_sinkhorn_iters must be an integer"},
      {"rope_scaling", 4, "rope_scaling must be an object, is 4"},
      {"rope_scaling", {{"type", "linear"}}, "rope_scaling.type \"linear\" is not supported"},
      {"rope_scaling", {{"type", "yarn"}}, "rope_scaling.factor is missing"},
      {"mlp_bias", true, "mlp_bias true is not supported"},
      {"quantization_config", {{"quant_method", "awq"}}, "quant_method \"awq\" is not supported"},
  };
  for (const BadConfig& bad : cases) {
    json text = PublishedV4Flash();
    text[bad.key] = bad.value;
    const absl::StatusOr<ModelConfig> config = ParseModelConfig(text.dump(), "dir/config.json");
    ASSERT_FALSE(config.ok()) << bad.message;
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(config.status().message()),
                ::testing::AllOf(HasSubstr("dir/config.json: "), HasSubstr(bad.message)));
  }
}

}  // namespace
}  // namespace model
