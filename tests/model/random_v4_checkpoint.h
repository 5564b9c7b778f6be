// A small random checkpoint for any V4 config, with the released names.

#ifndef TESTS_MODEL_RANDOM_V4_CHECKPOINT_H_
#define TESTS_MODEL_RANDOM_V4_CHECKPOINT_H_

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/model/random_tensors_maker.h"

namespace model {

class RandomV4CheckpointMaker : private RandomTensorsMaker {
 public:
  RandomV4CheckpointMaker(const nlohmann::json& config, std::string dtype, uint32_t seed)
      : RandomTensorsMaker(config, std::move(dtype), seed) {}

  EditableCheckpoint Make() {
    Matrix("embed.weight", config_.vocab_size, config_.hidden_size, 1);
    Norm("norm.weight", config_.hidden_size);
    if (!config_.tie_word_embeddings) {
      Matrix("head.weight", config_.vocab_size, config_.hidden_size);
    }
    StreamMix("hc_head_", config_.hc_mult, 1);
    for (int32_t i = 0; i < config_.num_hidden_layers; ++i) Layer(i);
    return result_;
  }

 private:
  void Layer(int32_t layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    const std::string attention = prefix + "attn.", experts = prefix + "ffn.";
    const int64_t hidden = config_.hidden_size, dim = config_.qk_head_dim();
    const int64_t heads = config_.num_attention_heads, rank = config_.q_lora_rank;
    const int64_t o_rows = int64_t{config_.o_groups} * config_.o_lora_rank;
    const int64_t mixes = int64_t{config_.hc_mult} * (2 + config_.hc_mult);
    StreamMix(prefix + "hc_attn_", mixes, 3);
    StreamMix(prefix + "hc_ffn_", mixes, 3);
    Norm(prefix + "attn_norm.weight", hidden);
    Norm(prefix + "ffn_norm.weight", hidden);
    Add(attention + "attn_sink", {heads}, 0, 1);
    Matrix(attention + "wq_a.weight", rank, hidden);
    Norm(attention + "q_norm.weight", rank);
    Matrix(attention + "wq_b.weight", heads * dim, rank);
    Matrix(attention + "wkv.weight", dim, hidden);
    Norm(attention + "kv_norm.weight", dim);
    Matrix(attention + "wo_a.weight", o_rows, heads / config_.o_groups * dim);
    Matrix(attention + "wo_b.weight", hidden, o_rows);
    switch (config_.layer_types[layer]) {
      case LayerType::kSlidingAttention:
        break;
      case LayerType::kCompressedSparseAttention:
        Compressor(attention + "compressor.", config_.csa_ratio, 2 * dim, dim);
        Compressor(attention + "indexer.compressor.", config_.csa_ratio, 2 * config_.index_head_dim,
                   config_.index_head_dim);
        Matrix(attention + "indexer.wq_b.weight", config_.index_n_heads * config_.index_head_dim,
               rank);
        Matrix(attention + "indexer.weights_proj.weight", config_.index_n_heads, hidden);
        break;
      case LayerType::kHeavilyCompressedAttention:
        Compressor(attention + "compressor.", config_.hca_ratio, dim, dim);
        break;
    }
    Matrix(experts + "gate.weight", config_.gate.num_experts, hidden);
    if (config_.hash_moe[layer]) {
      ExpertTable(experts + "gate.tid2eid");
    } else {
      Add(experts + "gate.bias", {config_.gate.num_experts}, 0, 0.3);
    }
    for (int32_t e = 0; e < config_.gate.num_experts; ++e) {
      Expert(experts + "experts." + std::to_string(e) + ".");
    }
    Expert(experts + "shared_experts.");
  }
  void Expert(const std::string& prefix) {
    Matrix(prefix + "w1.weight", config_.moe_intermediate_size, config_.hidden_size);
    Matrix(prefix + "w3.weight", config_.moe_intermediate_size, config_.hidden_size);
    Matrix(prefix + "w2.weight", config_.hidden_size, config_.moe_intermediate_size);
  }
  void Compressor(const std::string& prefix, int64_t ratio, int64_t channels, int64_t dim) {
    Matrix(prefix + "wkv.weight", channels, config_.hidden_size);
    Matrix(prefix + "wgate.weight", channels, config_.hidden_size);
    Add(prefix + "ape", {ratio, channels}, 0, 0.5);
    Norm(prefix + "norm.weight", dim);
  }
  void StreamMix(const std::string& prefix, int64_t mixes, int64_t scales) {
    Matrix(prefix + "fn", mixes, int64_t{config_.hc_mult} * config_.hidden_size);
    Add(prefix + "base", {mixes}, 0, 0.5);
    Add(prefix + "scale", {scales}, 0.5, 0.2);
  }
  void ExpertTable(const std::string& name) {
    EditableCheckpoint::Tensor tensor{"I64", {config_.vocab_size, config_.gate.top_k}, {}};
    std::vector<int64_t> experts(static_cast<size_t>(config_.gate.num_experts));
    std::iota(experts.begin(), experts.end(), int64_t{0});
    for (int32_t token = 0; token < config_.vocab_size; ++token) {
      std::shuffle(experts.begin(), experts.end(), random_);
      tensor.bytes.append(reinterpret_cast<const char*>(experts.data()),
                          static_cast<size_t>(config_.gate.top_k) * sizeof(int64_t));
    }
    result_.tensors[name] = std::move(tensor);
  }
};

}  // namespace model

#endif  // TESTS_MODEL_RANDOM_V4_CHECKPOINT_H_
