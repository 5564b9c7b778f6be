#include "model/config.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <tuple>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace model {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The published config of V2-Lite, old spelling.
json V2Lite() {
  return json::parse(R"({
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "scoring_func": "softmax",
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": false,
    "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
      "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
    "max_position_embeddings": 163840, "hidden_act": "silu", "attention_bias": false,
    "tie_word_embeddings": false, "bos_token_id": 100000, "eos_token_id": 100001})");
}

// V3's, new spelling; nearly everything is transformers' default.
json V3() {
  return json::parse(R"({
    "model_type": "deepseek_v3", "max_position_embeddings": 163840, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32,
      "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
      "weight_block_size": [128, 128]}})");
}

// V3.2's published config, but for what transformers assumes anyway.
json V32() {
  json text = V3();
  text["model_type"] = "deepseek_v32";
  text["quantization_config"]["scale_fmt"] = "ue8m0";
  return text;
}

ModelConfig Parse(const json& text) {
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(ModelConfig());
}

TEST(ModelConfigTest, ReadsPublishedV2Lite) {
  const ModelConfig config = Parse(V2Lite());
  EXPECT_EQ(config.family, ModelFamily::kDeepseekV2);
  EXPECT_EQ(config.q_lora_rank, 0);
  EXPECT_EQ(config.qk_head_dim(), 192);
  EXPECT_EQ(config.gate.method, kernels::GateMethod::kGreedy);
  EXPECT_EQ(config.gate.top_k, 6);
  EXPECT_FALSE(config.IsMoeLayer(0));
  EXPECT_TRUE(config.IsMoeLayer(1));
  EXPECT_THAT(config.eos_token_ids, ElementsAre(100001));
  EXPECT_FALSE(config.fp8_weights);
  EXPECT_NEAR(config.softmax_scale(), 0.1147213868, 1e-8);  // models.md 3.4
}

TEST(ModelConfigTest, ReadsV3InTheNewSpellingWithTransformersDefaults) {
  const ModelConfig config = Parse(V3());
  EXPECT_EQ(config.family, ModelFamily::kDeepseekV3);
  EXPECT_EQ(config.hidden_size, 7168);
  EXPECT_EQ(config.num_hidden_layers, 61);
  EXPECT_EQ(config.q_lora_rank, 1536);
  EXPECT_EQ(config.gate.method, kernels::GateMethod::kNoAuxTc);
  EXPECT_EQ(config.gate.num_groups, 8);
  EXPECT_EQ(config.gate.top_k_groups, 4);
  EXPECT_TRUE(config.gate.norm_topk_prob);
  EXPECT_FLOAT_EQ(config.gate.routed_scaling_factor, 2.5f);
  EXPECT_EQ(config.first_k_dense_replace, 3);
  EXPECT_TRUE(config.rope.interleave);
  EXPECT_TRUE(config.fp8_weights);
  EXPECT_NEAR(config.softmax_scale(), 0.1352337789, 1e-8);  // models.md 3.4
}

TEST(ModelConfigTest, ReadsV32WithTransformersDefaults) {
  const ModelConfig config = Parse(V32());
  EXPECT_EQ(config.family, ModelFamily::kDeepseekV32);
  EXPECT_EQ(config.index_n_heads, 64);
  EXPECT_EQ(config.index_head_dim, 128);
  EXPECT_EQ(config.index_topk, 2048);
  EXPECT_EQ(config.gate.method, kernels::GateMethod::kNoAuxTc);
  EXPECT_EQ(config.gate.num_groups, 8);
  EXPECT_FALSE(config.IsMoeLayer(2));
  EXPECT_TRUE(config.IsMoeLayer(3));
  EXPECT_TRUE(config.rope.interleave);
  EXPECT_NEAR(config.softmax_scale(), 0.1352337789, 1e-8);  // models.md 3.4
  EXPECT_EQ(Parse(V3()).index_topk, 0);
}

TEST(ModelConfigTest, LayerTypesDecideWhichLayersAreOfExperts) {
  json text = V32();
  text["num_hidden_layers"] = 4;
  text["mlp_layer_types"] = {"sparse", "dense", "dense", "sparse"};
  text["layer_types"] = std::vector<std::string>(4, "deepseek_sparse_attention");
  const ModelConfig config = Parse(text);
  EXPECT_TRUE(config.IsMoeLayer(0));
  EXPECT_FALSE(config.IsMoeLayer(1));
  EXPECT_FALSE(config.IsMoeLayer(2));
  EXPECT_TRUE(config.IsMoeLayer(3));
}

TEST(ModelConfigTest, RefusesIndexersThatCannotBe) {
  const std::tuple<const char*, json, const char*> cases[] = {
      {"index_topk", 0, "index_topk must be an integer in [1, "},
      {"index_n_heads", "many", "index_n_heads must be an integer"},
      {"index_head_dim", 63, "index_head_dim = 63 is below qk_rope_head_dim = 64"},
      {"q_lora_rank", nullptr, "q_lora_rank must be positive for deepseek_v32"},
      {"rope_interleave", false, "rope_interleave false is not supported for deepseek_v32"},
      {"mlp_layer_types", {"dense"}, "mlp_layer_types must be a list of num_hidden_layers = 2"},
      {"mlp_layer_types",
       {"dense", "moe"},
       "mlp_layer_types holds \"moe\", which is not supported"},
      {"mlp_layer_types", 7, "mlp_layer_types must be a list"},
      {"layer_types",
       {"deepseek_sparse_attention", "full_attention"},
       "layer_types holds \"full_attention\", which is not supported"},
  };
  for (const auto& [key, value, message] : cases) {
    json text = V32();
    text["num_hidden_layers"] = 2;
    text[key] = value;
    EXPECT_THAT(ParseModelConfig(text.dump(), "c").status().ToString(), HasSubstr(message));
  }
}

TEST(ModelConfigTest, OldAndNewSpellingsMeanTheSame) {
  json renamed = V2Lite();
  renamed["rope_parameters"] = renamed["rope_scaling"];
  renamed["rope_parameters"]["rope_theta"] = renamed["rope_theta"];
  renamed["rope_parameters"]["rope_type"] = "yarn";
  renamed.erase("rope_scaling");
  renamed.erase("rope_theta");
  renamed["q_lora_rank"] = 0;
  const ModelConfig a = Parse(V2Lite());
  const ModelConfig b = Parse(renamed);
  EXPECT_EQ(a.q_lora_rank, b.q_lora_rank);
  EXPECT_EQ(a.softmax_scale(), b.softmax_scale());
  EXPECT_EQ(InverseFrequencies(a.rope, 64), InverseFrequencies(b.rope, 64));
}

TEST(ModelConfigTest, NoRopeScalingMeansNoYarnAndNoMscale) {
  json text = V2Lite();
  text["rope_scaling"] = nullptr;
  const ModelConfig config = Parse(text);
  EXPECT_FALSE(config.rope.yarn);
  EXPECT_NEAR(config.softmax_scale(), 0.0721687836, 1e-8);
  EXPECT_EQ(RopeAttentionFactor(config.rope), 1.0f);
}

// models.md 3.4, computed there in double precision.
TEST(RopeTest, YarnFrequenciesHaveTheKnownValues) {
  const std::vector<float> inv_freq = InverseFrequencies(Parse(V2Lite()).rope, 64);
  const std::pair<int, double> known[] = {{0, 1},
                                          {1, 0.749894209},
                                          {10, 0.0562341325},
                                          {11, 0.0390069266},
                                          {15, 0.00833450895},
                                          {16, 0.0055},
                                          {17, 0.00356199749},
                                          {20, 0.000790569415},
                                          {22, 0.000177827941},
                                          {23, 3.33380358e-05},
                                          {24, 2.5e-05},
                                          {25, 1.87473552e-05},
                                          {31, 3.33380358e-06}};
  ASSERT_EQ(inv_freq.size(), 32u);
  for (const auto& [i, value] : known) EXPECT_NEAR(inv_freq[i] / value, 1, 1e-6) << i;
}

TEST(RopeTest, AttentionFactorIsOneUnlessOneMscaleIsMissing) {
  RopeConfig rope = Parse(V2Lite()).rope;
  EXPECT_EQ(RopeAttentionFactor(rope), 1.0f);
  rope.mscale = 0;
  EXPECT_NEAR(RopeAttentionFactor(rope), 1.36888795, 1e-6);  // get(40, 1)
  rope.attention_factor = 1.5;
  EXPECT_EQ(RopeAttentionFactor(rope), 1.5f);
}

TEST(RopeTest, TablesAreCosAndSinOfTheFloatAngle) {
  RopeConfig rope;
  const RopeTables tables = MakeRopeTables(rope, 8, 1001);
  const std::vector<float> inv_freq = InverseFrequencies(rope, 8);
  ASSERT_EQ(tables.cos.size(), 1001u * 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(tables.cos[i], 1.0f);
    EXPECT_EQ(tables.sin[i], 0.0f);
    const float angle = 1000.0f * inv_freq[i];
    EXPECT_NEAR(tables.cos[4000 + i], std::cos(static_cast<double>(angle)), 1e-7);
    EXPECT_NEAR(tables.sin[4000 + i], std::sin(static_cast<double>(angle)), 1e-7);
  }
}

struct BadConfig {
  const char* key;
  json value;
  const char* message;
};

TEST(ModelConfigTest, RefusesInOneSentenceNamingFileKeyAndValue) {
  const BadConfig cases[] = {
      {"model_type", "llama", "model_type \"llama\" is not supported"},
      {"model_type", 3, "model_type must be a string, is 3"},
      {"hidden_size", -1, "hidden_size must be an integer in [1, 1048576], is -1"},
      {"hidden_size", "2048", "hidden_size must be an integer in [1, 1048576], is \"2048\""},
      {"hidden_size", 1e300, "hidden_size must be an integer"},
      {"hidden_size", 20.5, "hidden_size must be an integer in [1, 1048576], is 20.5"},
      {"vocab_size", int64_t{1} << 62, "vocab_size must be an integer"},
      {"num_hidden_layers", 0, "num_hidden_layers must be an integer"},
      {"qk_rope_head_dim", 63, "qk_rope_head_dim must be even, is 63"},
      {"num_experts_per_tok", 65, "num_experts_per_tok must be an integer in [1, 64], is 65"},
      {"num_experts_per_tok", nullptr, "num_experts_per_tok is missing"},
      {"topk_method", "noaux_tc", "topk_method \"noaux_tc\" is not supported for deepseek_v2"},
      {"scoring_func", "sigmoid", "scoring_func \"sigmoid\" is not supported for deepseek_v2"},
      {"norm_topk_prob", true, "norm_topk_prob true is not supported"},
      {"norm_topk_prob", "no", "norm_topk_prob must be true or false, is \"no\""},
      {"attention_bias", true, "attention_bias true is not supported"},
      {"hidden_act", "gelu", "hidden_act \"gelu\" is not supported: expected silu"},
      {"rms_norm_eps", "small", "rms_norm_eps must be a number"},
      {"rope_theta", 0, "rope_theta must be a number"},
      {"rope_scaling", 4, "rope_scaling must be an object, is 4"},
      {"rope_scaling",
       {{"type", "linear"}, {"factor", 4}},
       "rope_scaling.type \"linear\" is not supported"},
      {"rope_scaling", {{"type", "yarn"}}, "rope_scaling.factor is missing"},
      {"eos_token_id", {1, -2}, "eos_token_id must hold token ids, holds -2"},
      {"quantization_config",
       {{"quant_method", "awq"}},
       "quantization_config.quant_method \"awq\" is not supported"},
      {"quantization_config",
       {{"quant_method", "fp8"}, {"weight_block_size", {128}}},
       "quantization_config.weight_block_size must be two positive integers"},
  };
  for (const BadConfig& bad : cases) {
    json text = V2Lite();
    text[bad.key] = bad.value;
    const absl::StatusOr<ModelConfig> config = ParseModelConfig(text.dump(), "dir/config.json");
    ASSERT_FALSE(config.ok()) << bad.message;
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(config.status().message()),
                ::testing::AllOf(HasSubstr("dir/config.json: "), HasSubstr(bad.message)));
  }
}

TEST(ModelConfigTest, RefusesGroupsThatDoNotFit) {
  json text = V3();
  text["n_group"] = 7;
  EXPECT_THAT(ParseModelConfig(text.dump(), "c").status().ToString(),
              HasSubstr("n_group = 7 must divide n_routed_experts = 256"));
  text["n_group"] = 256;
  EXPECT_THAT(ParseModelConfig(text.dump(), "c").status().ToString(), HasSubstr("groups of one"));
  text["n_group"] = 8;
  text["topk_group"] = 9;
  EXPECT_THAT(ParseModelConfig(text.dump(), "c").status().ToString(),
              HasSubstr("is above n_group"));
  text["topk_group"] = 1;
  text["num_experts_per_tok"] = 33;
  EXPECT_THAT(ParseModelConfig(text.dump(), "c").status().ToString(),
              HasSubstr("num_experts_per_tok = 33 is above the 32 experts"));
}

TEST(ModelConfigTest, RefusesTextThatIsNoGoodJson) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "not valid JSON"},
      {"{\"model_type\":", "not valid JSON"},
      {"[1]", "expected a JSON object, found an array of 1 element"},
      {"{\"a\": 1, \"a\": 2}", "key \"a\" is duplicate"},
      {"{\"a\": {\"b\": 1, \"b\": 2}}", "key \"b\" is duplicate"},
      {"{\"a\": \"\xff\"}", "not valid JSON"},
      {"{\"rms_norm_eps\": 1e10000}", "a number is too large for a 64-bit float"},
      {"{\"a\": " + std::string(100000, '[') + std::string(100000, ']') + "}", "nested deeper"},
  };
  for (const auto& [text, message] : cases) {
    EXPECT_THAT(ParseModelConfig(text, "c.json").status().ToString(),
                ::testing::AllOf(HasSubstr("c.json: "), HasSubstr(message)));
  }
}

TEST(ModelConfigTest, GenerationConfigSetsTheEosIds) {
  const std::string dir = ::testing::TempDir() + "/model_config_test";
  std::filesystem::create_directories(dir);
  std::ofstream(dir + "/config.json") << V2Lite().dump();
  std::filesystem::remove(dir + "/generation_config.json");
  EXPECT_THAT(LoadModelConfig(dir)->eos_token_ids, ElementsAre(100001));
  std::ofstream(dir + "/generation_config.json") << R"({"eos_token_id": [7, 8]})";
  EXPECT_THAT(LoadModelConfig(dir)->eos_token_ids, ElementsAre(7, 8));
  std::ofstream(dir + "/generation_config.json") << R"({"eos_token_id": "x"})";
  EXPECT_THAT(LoadModelConfig(dir).status().ToString(),
              HasSubstr("generation_config.json: eos_token_id must hold token ids"));
  EXPECT_EQ(LoadModelConfig(dir + "/nowhere").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace model
