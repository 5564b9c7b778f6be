// A small random checkpoint for any V2, V3 or V3.2 config.

#ifndef TESTS_MODEL_RANDOM_CHECKPOINT_H_
#define TESTS_MODEL_RANDOM_CHECKPOINT_H_

#include <bit>
#include <cmath>
#include <random>
#include <string>

#include "model/config.h"
#include "status/check.h"
#include "tests/model/editable_checkpoint.h"

namespace model {

class RandomCheckpointMaker {
 public:
  RandomCheckpointMaker(const nlohmann::json& config, std::string dtype, uint32_t seed)
      : dtype_(std::move(dtype)), random_(seed) {
    result_.config = config;
    const auto parsed = ParseModelConfig(config.dump(), "config.json");
    FERRY_CHECK(parsed.ok()) << parsed.status().ToString();
    config_ = *parsed;
  }

  EditableCheckpoint Make() {
    const int64_t hidden = config_.hidden_size;
    Matrix("model.embed_tokens.weight", config_.vocab_size, hidden, 1);
    Norm("model.norm.weight", hidden);
    if (!config_.tie_word_embeddings) Matrix("lm_head.weight", config_.vocab_size, hidden);
    for (int32_t i = 0; i < config_.num_hidden_layers; ++i) Layer(i);
    return result_;
  }

 private:
  void Layer(int32_t layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const std::string attention = prefix + "self_attn.";
    const int64_t hidden = config_.hidden_size;
    const int64_t heads = config_.num_attention_heads;
    Norm(prefix + "input_layernorm.weight", hidden);
    Norm(prefix + "post_attention_layernorm.weight", hidden);
    if (config_.q_lora_rank == 0) {
      Matrix(attention + "q_proj.weight", heads * config_.qk_head_dim(), hidden);
    } else {
      Matrix(attention + "q_a_proj.weight", config_.q_lora_rank, hidden);
      Norm(attention + "q_a_layernorm.weight", config_.q_lora_rank);
      Matrix(attention + "q_b_proj.weight", heads * config_.qk_head_dim(), config_.q_lora_rank);
    }
    Matrix(attention + "kv_a_proj_with_mqa.weight", config_.kv_lora_rank + config_.qk_rope_head_dim,
           hidden);
    Norm(attention + "kv_a_layernorm.weight", config_.kv_lora_rank);
    Matrix(attention + "kv_b_proj.weight", heads * (config_.qk_nope_head_dim + config_.v_head_dim),
           config_.kv_lora_rank);
    Matrix(attention + "o_proj.weight", hidden, heads * config_.v_head_dim);
    if (config_.family == ModelFamily::kDeepseekV32) Indexer(attention + "indexer.");
    if (!config_.IsMoeLayer(layer)) return Mlp(prefix + "mlp.", config_.intermediate_size);
    Matrix(prefix + "mlp.gate.weight", config_.gate.num_experts, hidden);
    if (config_.gate.method == kernels::GateMethod::kNoAuxTc) {
      Add(prefix + "mlp.gate.e_score_correction_bias", {config_.gate.num_experts}, 0, 0.2);
    }
    for (int32_t e = 0; e < config_.gate.num_experts; ++e) {
      Mlp(prefix + "mlp.experts." + std::to_string(e) + ".", config_.moe_intermediate_size);
    }
    if (config_.n_shared_experts > 0) {
      Mlp(prefix + "mlp.shared_experts.", config_.n_shared_experts * config_.moe_intermediate_size);
    }
  }
  void Indexer(const std::string& prefix) {
    const int64_t dim = config_.index_head_dim;
    Matrix(prefix + "wq_b.weight", config_.index_n_heads * dim, config_.q_lora_rank);
    Matrix(prefix + "wk.weight", dim, config_.hidden_size);
    Matrix(prefix + "weights_proj.weight", config_.index_n_heads, config_.hidden_size);
    Norm(prefix + "k_norm.weight", dim);
    Add(prefix + "k_norm.bias", {dim}, 0, 0.5);
  }
  void Mlp(const std::string& prefix, int64_t intermediate) {
    Matrix(prefix + "gate_proj.weight", intermediate, config_.hidden_size);
    Matrix(prefix + "up_proj.weight", intermediate, config_.hidden_size);
    Matrix(prefix + "down_proj.weight", config_.hidden_size, intermediate);
  }
  void Norm(const std::string& name, int64_t size) { Add(name, {size}, 1, 0.2); }
  void Matrix(const std::string& name, int64_t rows, int64_t cols, double scale = 0) {
    Add(name, {rows, cols}, 0, scale > 0 ? scale : 1.5 / std::sqrt(static_cast<double>(cols)));
  }
  void Add(const std::string& name, const std::vector<int64_t>& shape, double mean, double sigma) {
    std::normal_distribution<float> normal(static_cast<float>(mean), static_cast<float>(sigma));
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    EditableCheckpoint::Tensor tensor{dtype_, shape, {}};
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint32_t>(normal(random_));
      const uint32_t low = dtype_ == "F32" ? 0 : 2;  // bf16: the upper half
      for (uint32_t byte = low; byte < 4; ++byte) {
        tensor.bytes.push_back(static_cast<char>(bits >> (8 * byte)));
      }
    }
    result_.tensors[name] = std::move(tensor);
  }

  const std::string dtype_;  // "F32" or "BF16"
  std::mt19937 random_;
  ModelConfig config_;
  EditableCheckpoint result_;
};

}  // namespace model

#endif  // TESTS_MODEL_RANDOM_CHECKPOINT_H_
