#include "model/config.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "input_file/input_file.h"
#include "model/config_reader.h"
#include "model/deepseek_v4_config.h"
#include "model/json.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace model {
namespace {

using nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

// What transformers assumes for an absent key.  No value: the key is required.
struct FamilyDefaults {
  int64_t vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size,
      moe_intermediate_size, first_k_dense_replace, n_routed_experts, n_shared_experts;
  std::optional<int64_t> num_experts_per_tok;
  int64_t n_group, topk_group;
  double routed_scaling_factor;
  bool norm_topk_prob;
  int64_t max_position_embeddings;
  int32_t bos_token_id, eos_token_id;
};
constexpr FamilyDefaults kV2Defaults = {32000,        4096, 32, 32, 11008, 1407, 0, 64, 2,
                                        std::nullopt, 1,    1,  1., false, 2048, 1, 2};
constexpr FamilyDefaults kV3Defaults = {129280, 7168, 61, 128, 18432, 2048, 3, 256, 1,
                                        8,      8,    4,  2.5, true,  4096, 0, 1};
constexpr FamilyDefaults kV32Defaults = {129280, 7168, 61, 128, 18432, 2048,   3, 256, 1,
                                         8,      8,    4,  2.5, true,  163840, 0, 1};

absl::Status ReadRope(const json& config, int32_t max_position_embeddings, ConfigReader& reader,
                      RopeConfig& rope) {
  // The old key wins when both are there, as in transformers.
  const char* key = reader.Find("rope_scaling") != nullptr ? "rope_scaling" : "rope_parameters";
  rope.rope_theta = reader.Double("rope_theta", 10000, 1.001, 1e12);
  RETURN_IF_ERROR(reader.status());
  if (reader.Find(key) == nullptr) return absl::OkStatus();
  if (!config[key].is_object()) {
    reader.Fail(key, absl::StrCat("must be an object, is ", Quoted(config[key])));
    return reader.status();
  }
  ConfigReader scaling(config[key], reader.origin(), absl::StrCat(key, "."));
  return ReadRopeScaling(max_position_embeddings, scaling, rope);
}

// The gate's numbers must fit each other, or a kernel would read past its groups.
void CheckGate(const kernels::GateConfig& gate, ConfigReader& reader) {
  if (gate.num_experts % gate.num_groups != 0) {
    reader.Fail("n_group", absl::StrCat("= ", gate.num_groups,
                                        " must divide n_routed_experts = ", gate.num_experts));
    return;
  }
  const int32_t group_size = gate.num_experts / gate.num_groups;
  if (gate.top_k_groups > gate.num_groups) {
    reader.Fail("topk_group",
                absl::StrCat("= ", gate.top_k_groups, " is above n_group = ", gate.num_groups));
  } else if (gate.method == kernels::GateMethod::kNoAuxTc && group_size < 2) {
    reader.Fail("n_group", absl::StrCat("= ", gate.num_groups,
                                        " leaves groups of one expert, expected "
                                        "at least two"));
  } else if (gate.top_k > gate.top_k_groups * group_size) {
    reader.Fail("num_experts_per_tok",
                absl::StrCat("= ", gate.top_k, " is above the ", gate.top_k_groups * group_size,
                             " experts of topk_group groups"));
  }
}

void ReadGate(const FamilyDefaults& defaults, ModelConfig& config, ConfigReader& reader) {
  const bool v3 = config.family != ModelFamily::kDeepseekV2;
  kernels::GateConfig& gate = config.gate;
  gate.num_experts =
      reader.IsNull("n_routed_experts")
          ? 0
          : reader.Int("n_routed_experts", defaults.n_routed_experts, 1, kMaxExperts);
  bool any_moe_layer = false;
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) any_moe_layer |= config.IsMoeLayer(i);
  if (!any_moe_layer) return;

  gate.top_k = reader.Int("num_experts_per_tok", defaults.num_experts_per_tok, 1, gate.num_experts);
  gate.norm_topk_prob = reader.Bool("norm_topk_prob", defaults.norm_topk_prob);
  gate.routed_scaling_factor = static_cast<float>(
      reader.Double("routed_scaling_factor", defaults.routed_scaling_factor, -1e6, 1e6));
  const std::string method = reader.String("topk_method", v3 ? "noaux_tc" : "greedy");
  const std::string scoring = reader.String("scoring_func", v3 ? "sigmoid" : "softmax");
  if (scoring != (v3 ? "sigmoid" : "softmax")) {
    reader.Fail("scoring_func",
                absl::StrCat("\"", scoring, "\" is not supported for ", config.model_type,
                             ": expected ", v3 ? "sigmoid" : "softmax"));
  }
  if (v3 && method == "noaux_tc") {
    gate.method = kernels::GateMethod::kNoAuxTc;
  } else if (!v3 && method == "greedy") {
    gate.method = kernels::GateMethod::kGreedy;
    return;  // groups have no meaning here
  } else if (!v3 && method == "group_limited_greedy") {
    gate.method = kernels::GateMethod::kGroupLimitedGreedy;
  } else {
    reader.Fail("topk_method",
                absl::StrCat("\"", method, "\" is not supported for ", config.model_type,
                             ": expected ", v3 ? "noaux_tc" : "greedy or group_limited_greedy"));
  }
  gate.num_groups = reader.Int("n_group", defaults.n_group, 1, kMaxExperts);
  gate.top_k_groups = reader.Int("topk_group", defaults.topk_group, 1, kMaxExperts);
  CheckGate(gate, reader);
}

// Which layers are of experts and how all of them attend, in the spelling of transformers.
void ReadLayerTypes(ConfigReader& reader, ModelConfig& config) {
  const auto read = [&](const char* key, const auto& take) {
    const json* types = reader.Find(key);
    if (types == nullptr) return;
    if (!types->is_array() || static_cast<int64_t>(types->size()) != config.num_hidden_layers) {
      reader.Fail(key, absl::StrCat("must be a list of num_hidden_layers = ",
                                    config.num_hidden_layers, " types, is ", Quoted(*types)));
      return;
    }
    for (const json& type : *types) {
      if (!take(type)) {
        reader.Fail(key, absl::StrCat("holds ", Quoted(type), ", which is not supported"));
      }
    }
  };
  read("mlp_layer_types", [&](const json& type) {
    config.moe_layers.push_back(type == "sparse");
    return type == "sparse" || type == "dense";
  });
  read("layer_types", [](const json& type) { return type == "deepseek_sparse_attention"; });
}

void ReadIndexer(ConfigReader& reader, ModelConfig& config) {
  config.index_n_heads = reader.Int("index_n_heads", 64, 1, kMaxHeads);
  config.index_head_dim = reader.Int("index_head_dim", 128, 1, kMaxHeadDim);
  config.index_topk = reader.Int("index_topk", 2048, 1, kMaxPositions);
  if (config.index_head_dim < config.qk_rope_head_dim) {
    reader.Fail("index_head_dim",
                absl::StrCat("= ", config.index_head_dim,
                             " is below qk_rope_head_dim = ", config.qk_rope_head_dim));
  }
  if (config.q_lora_rank == 0) {
    reader.Fail("q_lora_rank", "must be positive for deepseek_v32: the indexer needs the latent");
  }
  if (!reader.Bool("rope_interleave", true)) {
    reader.Fail("rope_interleave", "false is not supported for deepseek_v32");
  }
}

}  // namespace

bool ModelConfig::IsMoeLayer(int32_t layer) const {
  if (gate.num_experts == 0) return false;
  if (!moe_layers.empty()) return moe_layers[layer];
  return layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
}

int32_t ModelConfig::CountLayers(LayerType type) const {
  return static_cast<int32_t>(std::count(layer_types.begin(), layer_types.end(), type));
}

namespace {

absl::Status ReadMla(const json& root, ConfigReader& reader, ModelConfig& config) {
  const bool v32 = config.family == ModelFamily::kDeepseekV32;
  const bool v3 = config.family == ModelFamily::kDeepseekV3 || v32;
  const FamilyDefaults& defaults = v32 ? kV32Defaults : v3 ? kV3Defaults : kV2Defaults;

  config.vocab_size = reader.Int("vocab_size", defaults.vocab_size, 1, kMaxVocabulary);
  config.hidden_size = reader.Int("hidden_size", defaults.hidden_size, 1, kMaxWidth);
  config.num_hidden_layers =
      reader.Int("num_hidden_layers", defaults.num_hidden_layers, 1, kMaxLayers);
  config.num_attention_heads =
      reader.Int("num_attention_heads", defaults.num_attention_heads, 1, kMaxHeads);
  config.q_lora_rank =
      reader.IsNull("q_lora_rank") ? 0 : reader.Int("q_lora_rank", 1536, 0, kMaxWidth);
  config.kv_lora_rank = reader.Int("kv_lora_rank", 512, 1, kMaxWidth);
  config.qk_nope_head_dim = reader.Int("qk_nope_head_dim", 128, 1, kMaxHeadDim);
  config.qk_rope_head_dim = reader.Int("qk_rope_head_dim", 64, 2, kMaxHeadDim);
  if (config.qk_rope_head_dim % 2 != 0) {
    reader.Fail("qk_rope_head_dim", absl::StrCat("must be even, is ", config.qk_rope_head_dim));
  }
  config.v_head_dim = reader.Int("v_head_dim", 128, 1, kMaxHeadDim);
  config.intermediate_size =
      reader.Int("intermediate_size", defaults.intermediate_size, 1, kMaxWidth);
  config.moe_intermediate_size =
      reader.Int("moe_intermediate_size", defaults.moe_intermediate_size, 1, kMaxWidth);
  config.first_k_dense_replace =
      reader.Int("first_k_dense_replace", defaults.first_k_dense_replace, 0, kMaxLayers);
  config.moe_layer_freq = reader.Int("moe_layer_freq", 1, 1, kMaxLayers);
  config.n_shared_experts =
      reader.IsNull("n_shared_experts")
          ? 0
          : reader.Int("n_shared_experts", defaults.n_shared_experts, 0, kMaxSharedExperts);
  config.rms_norm_eps = reader.Double("rms_norm_eps", 1e-6, 0, 1);
  config.tie_word_embeddings = reader.Bool("tie_word_embeddings", false);
  config.max_position_embeddings =
      reader.Int("max_position_embeddings", defaults.max_position_embeddings, 1, kMaxPositions);
  config.num_nextn_predict_layers = reader.Int("num_nextn_predict_layers", 0, 0, kMaxLayers);
  const std::vector<int32_t> bos = reader.Ids("bos_token_id", {defaults.bos_token_id});
  config.bos_token_id = reader.IsNull("bos_token_id") || bos.empty() ? -1 : bos.front();
  config.eos_token_ids = reader.IsNull("eos_token_id")
                             ? std::vector<int32_t>()
                             : reader.Ids("eos_token_id", {defaults.eos_token_id});
  if (v32) {
    ReadLayerTypes(reader, config);
    ReadIndexer(reader, config);
  }
  ReadGate(defaults, config, reader);
  config.rope.interleave = !v3 || reader.Bool("rope_interleave", true);
  RefuseUnsupported(reader);
  // DeepSeek's code renormalises then, transformers does not; no published V2 sets it.
  if (!v3 && config.gate.norm_topk_prob) {
    reader.Fail("norm_topk_prob", "true is not supported for deepseek_v2");
  }
  RETURN_IF_ERROR(reader.status());
  RETURN_IF_ERROR(ReadRope(root, config.max_position_embeddings, reader, config.rope));
  return ReadQuantization(reader, config);
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view text, std::string_view origin) {
  ASSIGN_OR_RETURN(const json root, ParseJsonObject(text, std::string(origin)));
  ConfigReader reader(root, std::string(origin));
  ModelConfig config;
  config.model_type = reader.String("model_type", "");
  if (config.model_type == "deepseek_v4") {
    config.family = ModelFamily::kDeepseekV4;
    RETURN_IF_ERROR(ReadDeepseekV4Config(reader, config));
    return config;
  }
  if (config.model_type == "deepseek_v2") {
    config.family = ModelFamily::kDeepseekV2;
  } else if (config.model_type == "deepseek_v3") {
    config.family = ModelFamily::kDeepseekV3;
  } else if (config.model_type == "deepseek_v32") {
    config.family = ModelFamily::kDeepseekV32;
  } else {
    reader.Fail("model_type", absl::StrCat("\"", config.model_type,
                                           "\" is not supported: expected deepseek_v2, "
                                           "deepseek_v3, deepseek_v32 or deepseek_v4"));
    return reader.status();
  }
  RETURN_IF_ERROR(ReadMla(root, reader, config));
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir) {
  const std::string path = absl::StrCat(model_dir, "/config.json");
  ASSIGN_OR_RETURN(const std::string text, input_file::Read(path, kMaxConfigBytes));
  ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text, path));

  const std::string generation_path = absl::StrCat(model_dir, "/generation_config.json");
  absl::StatusOr<std::string> generation = input_file::Read(generation_path, kMaxConfigBytes);
  if (absl::IsNotFound(generation.status())) return config;
  RETURN_IF_ERROR(generation.status());
  ASSIGN_OR_RETURN(const json root, ParseJsonObject(*generation, generation_path));
  ConfigReader reader(root, generation_path);
  config.eos_token_ids = reader.Ids("eos_token_id", config.eos_token_ids);
  RETURN_IF_ERROR(reader.status());
  return config;
}

}  // namespace model
