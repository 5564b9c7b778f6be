#include "model/config.h"

#include <cmath>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "model/json.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace model {
namespace {

using nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

// Far above any published model, and low enough that a product of two fits int32 and the size of
// every tensor fits int64.
constexpr int64_t kMaxWidth = int64_t{1} << 20;  // hidden and intermediate sizes, ranks
constexpr int64_t kMaxHeadDim = int64_t{1} << 13;
constexpr int64_t kMaxHeads = int64_t{1} << 12;
constexpr int64_t kMaxLayers = int64_t{1} << 12;
constexpr int64_t kMaxExperts = int64_t{1} << 10;  // what the gates of every backend take
constexpr int64_t kMaxSharedExperts = int64_t{1} << 6;
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
constexpr int64_t kMaxPositions = int64_t{1} << 24;

// Typed access to the keys of one JSON object.  Remembers the first error; a key whose value is
// null counts as absent.
class ConfigReader {
 public:
  // `prefix`: where the object lies, e.g. "rope_scaling.".
  ConfigReader(const json& object, std::string origin, std::string prefix = "")
      : object_(object), origin_(std::move(origin)), prefix_(std::move(prefix)) {}

  const json* Find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  bool IsNull(const char* key) const { return object_.contains(key) && object_[key].is_null(); }

  // Without a default the key is required.
  int32_t Int(const char* key, std::optional<int64_t> otherwise, int64_t low, int64_t high) {
    const json* value = Find(key);
    if (value == nullptr) {
      if (!otherwise.has_value()) Missing(key);
      return static_cast<int32_t>(otherwise.value_or(low));
    }
    // 1e4 and 4096.0 are integers too; 2^53 and above never are a size.
    const double number = value->is_number() ? value->get<double>() : std::nan("");
    if (!(number >= static_cast<double>(low) && number <= static_cast<double>(high)) ||
        number != std::floor(number)) {
      Fail(key, absl::StrCat("must be an integer in [", low, ", ", high, "], is ", Quoted(*value)));
      return static_cast<int32_t>(low);
    }
    return static_cast<int32_t>(number);
  }

  double Double(const char* key, std::optional<double> otherwise, double low, double high) {
    const json* value = Find(key);
    if (value == nullptr) {
      if (!otherwise.has_value()) Missing(key);
      return otherwise.value_or(low);
    }
    const double number = value->is_number() ? value->get<double>() : std::nan("");
    if (!(number >= low && number <= high)) {
      Fail(key, absl::StrCat("must be a number in [", low, ", ", high, "], is ", Quoted(*value)));
      return low;
    }
    return number;
  }

  bool Bool(const char* key, bool otherwise) {
    const json* value = Find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) {
      Fail(key, absl::StrCat("must be true or false, is ", Quoted(*value)));
      return otherwise;
    }
    return value->get<bool>();
  }

  std::string String(const char* key, std::string otherwise) {
    const json* value = Find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) {
      Fail(key, absl::StrCat("must be a string, is ", Quoted(*value)));
      return otherwise;
    }
    return value->get<std::string>();
  }

  // An id, a list of ids, or nothing.
  std::vector<int32_t> Ids(const char* key, std::vector<int32_t> otherwise) {
    const json* value = Find(key);
    if (value == nullptr) return otherwise;
    std::vector<int32_t> ids;
    const json list = value->is_array() ? *value : json::array({*value});
    for (const json& id : list) {
      if (!id.is_number_integer() || id < 0 || id >= kMaxVocabulary) {
        Fail(key, absl::StrCat("must hold token ids, holds ", Quoted(id)));
        return otherwise;
      }
      ids.push_back(id.get<int32_t>());
    }
    return ids;
  }

  void Fail(const char* key, const std::string& problem) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(origin_, ": ", prefix_, key, " ", problem));
  }
  void Missing(const char* key) { Fail(key, "is missing"); }

  const std::string& origin() const { return origin_; }
  const absl::Status& status() const { return status_; }

 private:
  const json& object_;
  const std::string origin_;
  const std::string prefix_;
  absl::Status status_;
};

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
  rope.rope_theta = scaling.Double("rope_theta", rope.rope_theta, 1.001, 1e12);
  const char* type_key = scaling.Find("rope_type") != nullptr ? "rope_type" : "type";
  const std::string type = scaling.String(type_key, "default");
  if (type != "default" && type != "yarn") {
    scaling.Fail(type_key,
                 absl::StrCat("\"", type, "\" is not supported: expected yarn or default"));
  }
  rope.yarn = type == "yarn";
  if (rope.yarn) {
    rope.original_max_position_embeddings =
        scaling.Int("original_max_position_embeddings", max_position_embeddings, 1, kMaxPositions);
    rope.factor = scaling.Double("factor", std::nullopt, 1e-3, 1e6);
    rope.beta_fast = scaling.Double("beta_fast", 32, 1e-6, 1e6);
    rope.beta_slow = scaling.Double("beta_slow", 1, 1e-6, 1e6);
    rope.mscale = scaling.Double("mscale", 0, 0, 1e3);
    rope.mscale_all_dim = scaling.Double("mscale_all_dim", 0, 0, 1e3);
    rope.attention_factor = scaling.Double("attention_factor", 0, 0, 1e3);
    rope.truncate = scaling.Bool("truncate", true);
  }
  return scaling.status();
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
  const bool v3 = config.family == ModelFamily::kDeepseekV3;
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

absl::Status ReadQuantization(const json& config, ConfigReader& reader, ModelConfig& result) {
  if (reader.Find("quantization_config") == nullptr) return absl::OkStatus();
  if (!config["quantization_config"].is_object()) {
    reader.Fail("quantization_config",
                absl::StrCat("must be an object, is ", Quoted(config["quantization_config"])));
    return reader.status();
  }
  ConfigReader quantization(config["quantization_config"], reader.origin(), "quantization_config.");
  const std::string method = quantization.String("quant_method", "");
  if (method != "fp8") {
    quantization.Fail("quant_method",
                      absl::StrCat("\"", method, "\" is not supported: expected fp8"));
  }
  const std::string format = quantization.String("fmt", "e4m3");
  if (format != "e4m3") {
    quantization.Fail("fmt", absl::StrCat("\"", format, "\" is not supported: expected e4m3"));
  }
  result.fp8_weights = true;
  if (const json* block = quantization.Find("weight_block_size"); block != nullptr) {
    const auto size = [&](size_t i) -> int32_t {
      const bool good = block->is_array() && block->size() == 2 &&
                        (*block)[i].is_number_integer() && (*block)[i] >= 1 &&
                        (*block)[i] <= kMaxWidth;
      if (!good) quantization.Fail("weight_block_size", "must be two positive integers");
      return good ? (*block)[i].get<int32_t>() : 1;
    };
    result.weight_block_rows = size(0);
    result.weight_block_cols = size(1);
  }
  return quantization.status();
}

// What would change the mathematics and is not implemented.
void RefuseUnsupported(ConfigReader& reader, const ModelConfig& config) {
  for (const char* bias : {"attention_bias", "mlp_bias"}) {
    if (reader.Bool(bias, false)) reader.Fail(bias, "true is not supported");
  }
  if (const std::string act = reader.String("hidden_act", "silu"); act != "silu") {
    reader.Fail("hidden_act", absl::StrCat("\"", act, "\" is not supported: expected silu"));
  }
  // DeepSeek's code renormalises then, transformers does not; no published V2 sets it.
  if (config.family == ModelFamily::kDeepseekV2 && config.gate.norm_topk_prob) {
    reader.Fail("norm_topk_prob", "true is not supported for deepseek_v2");
  }
}

}  // namespace

bool ModelConfig::IsMoeLayer(int32_t layer) const {
  return gate.num_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
}

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view text, std::string_view origin) {
  ASSIGN_OR_RETURN(const json root, ParseJsonObject(text, std::string(origin)));
  ConfigReader reader(root, std::string(origin));
  ModelConfig config;
  config.model_type = reader.String("model_type", "");
  if (config.model_type == "deepseek_v2") {
    config.family = ModelFamily::kDeepseekV2;
  } else if (config.model_type == "deepseek_v3") {
    config.family = ModelFamily::kDeepseekV3;
  } else {
    reader.Fail("model_type",
                absl::StrCat("\"", config.model_type,
                             "\" is not supported: expected deepseek_v2 or deepseek_v3"));
    return reader.status();
  }
  const bool v3 = config.family == ModelFamily::kDeepseekV3;
  const FamilyDefaults& defaults = v3 ? kV3Defaults : kV2Defaults;

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
  ReadGate(defaults, config, reader);
  config.rope.interleave = !v3 || reader.Bool("rope_interleave", true);
  RefuseUnsupported(reader, config);
  RETURN_IF_ERROR(reader.status());
  RETURN_IF_ERROR(ReadRope(root, config.max_position_embeddings, reader, config.rope));
  RETURN_IF_ERROR(ReadQuantization(root, reader, config));
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir) {
  const std::string path = absl::StrCat(model_dir, "/config.json");
  ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxConfigBytes));
  ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text, path));

  const std::string generation_path = absl::StrCat(model_dir, "/generation_config.json");
  absl::StatusOr<std::string> generation = ReadTextFile(generation_path, kMaxConfigBytes);
  if (absl::IsNotFound(generation.status())) return config;
  RETURN_IF_ERROR(generation.status());
  ASSIGN_OR_RETURN(const json root, ParseJsonObject(*generation, generation_path));
  ConfigReader reader(root, generation_path);
  config.eos_token_ids = reader.Ids("eos_token_id", config.eos_token_ids);
  RETURN_IF_ERROR(reader.status());
  return config;
}

}  // namespace model
