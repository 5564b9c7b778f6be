// ModelConfig: the shape of a model, from its checkpoint's config.json.
//
// Names are those of config.json, letter for letter.  Old and new spellings are read: rope_scaling
// and rope_parameters, q_lora_rank null or 0, "type" and "rope_type".  Nothing here is a default of
// ours: a key that the file lacks gets transformers' default for that model_type or is an error
// that names it.
//
// Plain values.

#ifndef MODEL_CONFIG_H_
#define MODEL_CONFIG_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe.h"

namespace model {

enum class ModelFamily : uint8_t { kDeepseekV2, kDeepseekV3, kDeepseekV32, kDeepseekV4 };

// What a layer of V4 attends besides its window (models.md 7.4, 7.5).
enum class LayerType : uint8_t {
  kSlidingAttention,
  kCompressedSparseAttention,   // CSA: the best of the entries of csa_ratio tokens
  kHeavilyCompressedAttention,  // HCA: all entries of hca_ratio tokens
};

struct RopeConfig {
  double rope_theta = 10000;
  bool yarn = false;
  double factor = 1;
  int32_t original_max_position_embeddings = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 0;            // 0: absent
  double mscale_all_dim = 0;    // 0: absent
  double attention_factor = 0;  // of cos and sin; 0: absent, derived from the two above
  bool truncate = true;         // the ramp's ends are rounded to whole dimensions
  bool interleave = true;
};

struct ModelConfig {
  ModelFamily family = ModelFamily::kDeepseekV2;
  std::string model_type;  // "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"
  int32_t vocab_size = 0;
  int32_t hidden_size = 0;
  int32_t num_hidden_layers = 0;
  int32_t num_attention_heads = 0;
  int32_t q_lora_rank = 0;  // 0: a single q_proj
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 0;
  int32_t intermediate_size = 0;
  int32_t moe_intermediate_size = 0;
  int32_t first_k_dense_replace = 0;
  int32_t moe_layer_freq = 1;
  std::vector<bool> moe_layers;  // [num_hidden_layers], mlp_layer_types; empty: by the two above
  int32_t n_shared_experts = 0;
  kernels::GateConfig gate;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  RopeConfig rope;
  int32_t max_position_embeddings = 0;
  int32_t num_nextn_predict_layers = 0;
  int32_t bos_token_id = -1;           // -1: none
  std::vector<int32_t> eos_token_ids;  // generation_config.json's when present, else config.json's
  bool fp8_weights = false;
  int32_t weight_block_rows = 128;
  int32_t weight_block_cols = 128;

  // The lightning indexer of deepseek_v32 and deepseek_v4.
  int32_t index_n_heads = 0;
  int32_t index_head_dim = 0;
  int32_t index_topk = 0;

  // deepseek_v4; there head_dim is qk_nope_head_dim + qk_rope_head_dim and v_head_dim as well.
  std::vector<LayerType> layer_types;  // [num_hidden_layers]
  std::vector<bool> hash_moe;          // [num_hidden_layers], experts by token id
  int32_t csa_ratio = 0;               // tokens of an entry: compress_rates
  int32_t hca_ratio = 0;
  int32_t sliding_window = 0;
  RopeConfig compress_rope;  // of every rotation in layers that compress
  int32_t o_groups = 0;
  int32_t o_lora_rank = 0;
  float swiglu_limit = 0;  // 0: no clamp
  int32_t hc_mult = 0;     // residual streams
  int32_t hc_sinkhorn_iters = 0;
  double hc_eps = 0;

  bool IsMoeLayer(int32_t layer) const;
  int32_t CountLayers(LayerType type) const;
  int32_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  // qk_head_dim^-1/2, times mscale^2 for YaRN (models.md 3.4).
  float softmax_scale() const;
};

// Errors: kInvalidArgument naming the file, the key and what was found; kNotFound for no file.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir);
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json, std::string_view origin);

// inv_freq [rope_dim / 2] in float32, and the factor of cos and sin.
std::vector<float> InverseFrequencies(const RopeConfig& rope, int32_t rope_dim);
float RopeAttentionFactor(const RopeConfig& rope);

// cos and sin tables, float32 [max_positions, qk_rope_head_dim / 2], evaluated in float32 as
// transformers does (models.md 3.3, 3.4), attention factor applied.
struct RopeTables {
  std::vector<float> cos;
  std::vector<float> sin;
};
RopeTables MakeRopeTables(const RopeConfig& rope, int32_t rope_dim, int32_t max_positions);

}  // namespace model

#endif  // MODEL_CONFIG_H_
