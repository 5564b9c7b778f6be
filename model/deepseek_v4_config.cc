#include "model/deepseek_v4_config.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/hyper_connection.h"
#include "model/json.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace model {
namespace {

using nlohmann::json;

constexpr int64_t kMaxRatio = 4096;
constexpr const char kCsa[] = "compressed_sparse_attention";
constexpr const char kHca[] = "heavily_compressed_attention";

// A list with a value for each layer; what comes after them belongs to layers for drafting.
const json* PerLayer(ConfigReader& reader, const char* key, int32_t num_layers) {
  const json* list = reader.Find(key);
  if (list == nullptr) return nullptr;
  if (!list->is_array() || static_cast<int64_t>(list->size()) < num_layers) {
    reader.Fail(key, absl::StrCat("must be a list of at least num_hidden_layers = ", num_layers,
                                  " values, is ", Quoted(*list)));
    return nullptr;
  }
  return list;
}

// compress_rates, or the two keys that older configs have.
void ReadRatios(ConfigReader& reader, ModelConfig& config) {
  config.csa_ratio = reader.Int("compress_rate_csa", 4, 1, kMaxRatio);
  config.hca_ratio = reader.Int("compress_rate_hca", 128, 1, kMaxRatio);
  const json* rates = reader.Find("compress_rates");
  if (rates == nullptr) return;
  if (!rates->is_object()) {
    return reader.Fail("compress_rates", absl::StrCat("must be an object, is ", Quoted(*rates)));
  }
  ConfigReader inner(*rates, reader.origin(), "compress_rates.");
  config.csa_ratio = inner.Int(kCsa, config.csa_ratio, 1, kMaxRatio);
  config.hca_ratio = inner.Int(kHca, config.hca_ratio, 1, kMaxRatio);
  reader.Adopt(inner.status());
}

void ReadLayerTypes(ConfigReader& reader, ModelConfig& config) {
  if (const json* types = PerLayer(reader, "layer_types", config.num_hidden_layers)) {
    for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
      const json& type = (*types)[i];
      if (type == "sliding_attention") {
        config.layer_types.push_back(LayerType::kSlidingAttention);
      } else if (type == kCsa) {
        config.layer_types.push_back(LayerType::kCompressedSparseAttention);
      } else if (type == kHca) {
        config.layer_types.push_back(LayerType::kHeavilyCompressedAttention);
      } else {
        return reader.Fail("layer_types",
                           absl::StrCat("holds ", Quoted(type), ": expected sliding_attention, ",
                                        kCsa, " or ", kHca));
      }
    }
    return;
  }
  const json* ratios = PerLayer(reader, "compress_ratios", config.num_hidden_layers);
  if (ratios == nullptr) return reader.Missing("layer_types (or compress_ratios)");
  const bool named =
      reader.Find("compress_rates") != nullptr || reader.Find("compress_rate_hca") != nullptr;
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
    const json& ratio = (*ratios)[i];
    const int64_t value =
        ratio.is_number_integer() && ratio >= 0 && ratio <= kMaxRatio ? ratio.get<int64_t>() : -1;
    const bool first_hca = config.CountLayers(LayerType::kHeavilyCompressedAttention) == 0;
    if (value == 0) {
      config.layer_types.push_back(LayerType::kSlidingAttention);
    } else if (value == config.csa_ratio) {
      config.layer_types.push_back(LayerType::kCompressedSparseAttention);
    } else if (value > 0 && (value == config.hca_ratio || (!named && first_hca))) {
      config.layer_types.push_back(LayerType::kHeavilyCompressedAttention);
      config.hca_ratio = static_cast<int32_t>(value);
    } else {
      return reader.Fail("compress_ratios",
                         absl::StrCat("holds ", Quoted(ratio), ": expected 0, ", config.csa_ratio,
                                      " or ", config.hca_ratio));
    }
  }
}

void ReadMlpLayerTypes(ConfigReader& reader, ModelConfig& config) {
  const json* types = PerLayer(reader, "mlp_layer_types", config.num_hidden_layers);
  const int32_t num_hash_layers = reader.Int("num_hash_layers", 3, 0, kMaxLayers);
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
    if (types == nullptr) {
      config.hash_moe.push_back(i < num_hash_layers);
      continue;
    }
    const json& type = (*types)[i];
    if (type != "hash_moe" && type != "moe") {
      return reader.Fail("mlp_layer_types",
                         absl::StrCat("holds ", Quoted(type), ": expected hash_moe or moe"));
    }
    config.hash_moe.push_back(type == "hash_moe");
  }
}

// The two RoPE tables.  A flat object describes the one of the layers that compress.
absl::Status ReadRopes(ConfigReader& reader, ModelConfig& config) {
  config.rope.rope_theta = reader.Double("rope_theta", 10000, 1.001, 1e12);
  config.compress_rope.rope_theta = reader.Double("compress_rope_theta", 160000, 1.001, 1e12);
  const std::string key =
      reader.Find("rope_scaling") != nullptr ? "rope_scaling" : "rope_parameters";
  const json* object = reader.Find(key.c_str());
  if (object != nullptr && !object->is_object()) {
    reader.Fail(key.c_str(), absl::StrCat("must be an object, is ", Quoted(*object)));
  }
  RETURN_IF_ERROR(reader.status());
  const auto read = [&](const json& scaling, const std::string& prefix, RopeConfig& rope) {
    ConfigReader inner(scaling, reader.origin(), prefix);
    return ReadRopeScaling(config.max_position_embeddings, inner, rope);
  };
  if (object != nullptr && object->contains("main") && (*object)["main"].is_object() &&
      object->contains("compress") && (*object)["compress"].is_object()) {
    RETURN_IF_ERROR(read((*object)["main"], key + ".main.", config.rope));
    RETURN_IF_ERROR(read((*object)["compress"], key + ".compress.", config.compress_rope));
  } else if (object != nullptr) {
    const double theta = config.compress_rope.rope_theta;
    RETURN_IF_ERROR(read(*object, key + ".", config.compress_rope));
    config.compress_rope.rope_theta = theta;
  }
  // DeepSeek's code has no factor of cos and sin here, whatever YaRN would give.
  for (RopeConfig* rope : {&config.rope, &config.compress_rope}) {
    rope->mscale = rope->mscale_all_dim = 0;
    if (rope->attention_factor == 0) rope->attention_factor = 1;
  }
  return absl::OkStatus();
}

void ReadHeads(ConfigReader& reader, ModelConfig& config) {
  const int32_t head_dim = reader.Int("head_dim", 512, 2, kMaxHeadDim);
  config.num_attention_heads = reader.Int("num_attention_heads", 64, 1, kMaxHeads);
  reader.Int("num_key_value_heads", 1, 1, 1);
  // partial_rotary_factor is what transformers keeps of qk_rope_head_dim, and wins over it.
  if (reader.Find("partial_rotary_factor") != nullptr) {
    const double factor = reader.Double("partial_rotary_factor", 0, 0, 1);
    config.qk_rope_head_dim = static_cast<int32_t>(head_dim * factor);
  } else {
    config.qk_rope_head_dim = reader.Int("qk_rope_head_dim", head_dim / 8, 2, kMaxHeadDim);
  }
  if (config.qk_rope_head_dim < 2 || config.qk_rope_head_dim % 2 != 0 ||
      config.qk_rope_head_dim >= head_dim) {
    reader.Fail("qk_rope_head_dim", absl::StrCat("(or partial_rotary_factor) must give an even "
                                                 "number of dimensions below head_dim = ",
                                                 head_dim, ", gives ", config.qk_rope_head_dim));
  }
  config.qk_nope_head_dim = head_dim - config.qk_rope_head_dim;
  config.v_head_dim = head_dim;
  config.q_lora_rank = reader.Int("q_lora_rank", 1024, 1, kMaxWidth);
  config.o_groups = reader.Int("o_groups", 8, 1, kMaxHeads);
  config.o_lora_rank = reader.Int("o_lora_rank", 1024, 1, kMaxWidth);
  if (config.num_attention_heads % config.o_groups != 0) {
    reader.Fail("o_groups", absl::StrCat("= ", config.o_groups, " must divide num_attention_heads",
                                         " = ", config.num_attention_heads));
  }
  config.sliding_window = reader.Int("sliding_window", 128, 1, kMaxPositions);
  config.index_n_heads = reader.Int("index_n_heads", 64, 1, kMaxHeads);
  config.index_head_dim = reader.Int("index_head_dim", 128, 2, kMaxHeadDim);
  config.index_topk = reader.Int("index_topk", 512, 1, kMaxPositions);
  if (config.index_head_dim < config.qk_rope_head_dim) {
    reader.Fail("index_head_dim", absl::StrCat("= ", config.index_head_dim, " is below the ",
                                               config.qk_rope_head_dim, " rotary dimensions"));
  }
}

void ReadExperts(ConfigReader& reader, ModelConfig& config) {
  kernels::GateConfig& gate = config.gate;
  gate.method = kernels::GateMethod::kSqrtSoftplus;
  gate.num_experts = reader.Int("n_routed_experts", 256, 1, kMaxExperts);
  gate.top_k = reader.Int("num_experts_per_tok", 6, 1, gate.num_experts);
  // Both DeepSeek's code and transformers normalise, whatever norm_topk_prob says.
  gate.norm_topk_prob = true;
  gate.routed_scaling_factor =
      static_cast<float>(reader.Double("routed_scaling_factor", 1.5, -1e6, 1e6));
  for (const auto& [key, supported] :
       {std::pair("scoring_func", "sqrtsoftplus"), std::pair("topk_method", "noaux_tc")}) {
    if (const std::string found = reader.String(key, supported); found != supported) {
      reader.Fail(key, absl::StrCat("\"", found, "\" is not supported for deepseek_v4: expected ",
                                    supported));
    }
  }
  config.moe_intermediate_size = reader.Int("moe_intermediate_size", 2048, 1, kMaxWidth);
  config.n_shared_experts = reader.Int("n_shared_experts", 1, 1, 1);
  config.swiglu_limit = static_cast<float>(reader.Double("swiglu_limit", 10, 0, 1e6));
}

}  // namespace

absl::Status ReadDeepseekV4Config(ConfigReader& reader, ModelConfig& config) {
  config.vocab_size = reader.Int("vocab_size", 129280, 1, kMaxVocabulary);
  config.hidden_size = reader.Int("hidden_size", 4096, 1, kMaxWidth);
  config.num_hidden_layers = reader.Int("num_hidden_layers", 43, 1, kMaxLayers);
  config.rms_norm_eps = reader.Double("rms_norm_eps", 1e-6, 0, 1);
  config.tie_word_embeddings = reader.Bool("tie_word_embeddings", false);
  config.max_position_embeddings = reader.Int("max_position_embeddings", 1048576, 1, kMaxPositions);
  config.num_nextn_predict_layers = reader.Int("num_nextn_predict_layers", 1, 0, kMaxLayers);
  const std::vector<int32_t> bos = reader.Ids("bos_token_id", {0});
  config.bos_token_id = reader.IsNull("bos_token_id") || bos.empty() ? -1 : bos.front();
  config.eos_token_ids =
      reader.IsNull("eos_token_id") ? std::vector<int32_t>() : reader.Ids("eos_token_id", {1});
  config.hc_mult = reader.Int("hc_mult", 4, 1, kernels::kMaxStreams);
  config.hc_sinkhorn_iters = reader.Int("hc_sinkhorn_iters", 20, 1, 1000);
  config.hc_eps = reader.Double("hc_eps", 1e-6, 0, 1);
  ReadHeads(reader, config);
  ReadExperts(reader, config);
  ReadRatios(reader, config);
  RETURN_IF_ERROR(reader.status());
  ReadLayerTypes(reader, config);
  ReadMlpLayerTypes(reader, config);
  RefuseUnsupported(reader);
  if (config.CountLayers(LayerType::kSlidingAttention) == config.num_hidden_layers) {
    reader.Fail(reader.Find("layer_types") != nullptr ? "layer_types" : "compress_ratios",
                "must have a layer that compresses");
  }
  RETURN_IF_ERROR(reader.status());
  RETURN_IF_ERROR(ReadRopes(reader, config));
  return ReadQuantization(reader, config);
}

}  // namespace model
