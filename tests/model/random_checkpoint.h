// A small random checkpoint for any V2, V3 or V3.2 config.

#ifndef TESTS_MODEL_RANDOM_CHECKPOINT_H_
#define TESTS_MODEL_RANDOM_CHECKPOINT_H_

#include <string>
#include <utility>

#include "tests/model/random_tensors_maker.h"

namespace model {

class RandomCheckpointMaker : private RandomTensorsMaker {
 public:
  RandomCheckpointMaker(const nlohmann::json& config, std::string dtype, uint32_t seed)
      : RandomTensorsMaker(config, std::move(dtype), seed) {}

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
};

}  // namespace model

#endif  // TESTS_MODEL_RANDOM_CHECKPOINT_H_
