// The published config and tensor list of DeepSeek-V4-Flash (models.md 1.2, 2.4), without data.

#ifndef TESTS_MODEL_PUBLISHED_V4_H_
#define TESTS_MODEL_PUBLISHED_V4_H_

#include <cstdint>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/model/published_tensors.h"

namespace model {

inline nlohmann::json PublishedV4Flash() {
  nlohmann::json config = nlohmann::json::parse(R"({
    "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000,
    "compress_rope_theta": 160000, "rope_scaling": {"type": "yarn", "factor": 16,
      "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576, "n_routed_experts": 256, "num_experts_per_tok": 6,
    "n_shared_experts": 1, "moe_intermediate_size": 2048, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 1.5,
    "num_hash_layers": 3, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1, "expert_dtype": "fp4",
    "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": false,
    "bos_token_id": 0, "eos_token_id": 1, "quantization_config": {"quant_method": "fp8",
      "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
      "scale_fmt": "ue8m0"}})");
  config["compress_ratios"] = {0, 0};
  for (int layer = 2; layer < 43; ++layer) {
    config["compress_ratios"].push_back(layer % 2 == 0 ? 4 : 128);
  }
  config["compress_ratios"].push_back(0);  // of the MTP layer
  return config;
}

// 69,187 tensors.
class PublishedV4FlashTensors {
 public:
  static std::vector<PublishedTensor> Make() {
    PublishedV4FlashTensors list;
    list.Add("embed.weight", "BF16", {129280, 4096});
    list.Add("head.weight", "BF16", {129280, 4096});
    list.Add("norm.weight", "BF16", {4096});
    list.StreamMix("hc_head_", 4, 1);
    for (int layer = 0; layer < 43; ++layer) {
      const int ratio = layer < 2 ? 0 : layer % 2 == 0 ? 4 : 128;
      list.Layer("layers." + std::to_string(layer) + ".", ratio, layer < 3);
    }
    list.Layer("mtp.0.", 0, false);
    list.Quantised("mtp.0.e_proj", 4096, 4096);
    list.Quantised("mtp.0.h_proj", 4096, 4096);
    for (const char* norm : {"enorm", "hnorm", "norm"}) {
      list.Add(std::string("mtp.0.") + norm + ".weight", "BF16", {4096});
    }
    list.StreamMix("mtp.0.hc_head_", 4, 1);
    return list.tensors_;
  }

 private:
  void Add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape) {
    tensors_.push_back({name, dtype, std::move(shape)});
  }
  void Quantised(const std::string& name, int64_t rows, int64_t cols) {
    Add(name + ".weight", "F8_E4M3", {rows, cols});
    Add(name + ".scale", "F8_E8M0", {(rows + 127) / 128, (cols + 127) / 128});
  }
  void StreamMix(const std::string& prefix, int64_t mixes, int64_t scales) {
    Add(prefix + "fn", "F32", {mixes, 16384});
    Add(prefix + "base", "F32", {mixes});
    Add(prefix + "scale", "F32", {scales});
  }
  void Compressor(const std::string& prefix, int64_t ratio, int64_t channels, int64_t dim) {
    Add(prefix + "wkv.weight", "BF16", {channels, 4096});
    Add(prefix + "wgate.weight", "BF16", {channels, 4096});
    Add(prefix + "ape", "F32", {ratio, channels});
    Add(prefix + "norm.weight", "BF16", {dim});
  }
  void Layer(const std::string& prefix, int ratio, bool hash) {
    const std::string attention = prefix + "attn.", experts = prefix + "ffn.";
    Add(prefix + "attn_norm.weight", "BF16", {4096});
    Add(prefix + "ffn_norm.weight", "BF16", {4096});
    StreamMix(prefix + "hc_attn_", 24, 3);
    StreamMix(prefix + "hc_ffn_", 24, 3);
    Add(attention + "attn_sink", "F32", {64});
    Quantised(attention + "wq_a", 1024, 4096);
    Add(attention + "q_norm.weight", "BF16", {1024});
    Quantised(attention + "wq_b", 32768, 1024);
    Quantised(attention + "wkv", 512, 4096);
    Add(attention + "kv_norm.weight", "BF16", {512});
    Quantised(attention + "wo_a", 8192, 4096);
    Quantised(attention + "wo_b", 4096, 8192);
    if (ratio == 128) Compressor(attention + "compressor.", 128, 512, 512);
    if (ratio == 4) {
      Compressor(attention + "compressor.", 4, 1024, 512);
      Compressor(attention + "indexer.compressor.", 4, 256, 128);
      Quantised(attention + "indexer.wq_b", 8192, 1024);
      Add(attention + "indexer.weights_proj.weight", "BF16", {64, 4096});
    }
    Add(experts + "gate.weight", "BF16", {256, 4096});
    if (hash) {
      Add(experts + "gate.tid2eid", "I64", {129280, 6});
    } else {
      Add(experts + "gate.bias", "F32", {256});
    }
    for (int e = 0; e < 256; ++e) {
      const std::string expert = experts + "experts." + std::to_string(e) + ".";
      for (const char* part : {"w1", "w3"}) {
        Add(expert + part + ".weight", "I8", {2048, 2048});
        Add(expert + part + ".scale", "F8_E8M0", {2048, 128});
      }
      Add(expert + "w2.weight", "I8", {4096, 1024});
      Add(expert + "w2.scale", "F8_E8M0", {4096, 64});
    }
    for (const char* part : {"w1", "w3"}) {
      Quantised(experts + "shared_experts." + part, 2048, 4096);
    }
    Quantised(experts + "shared_experts.w2", 4096, 2048);
  }

  std::vector<PublishedTensor> tensors_;
};

}  // namespace model

#endif  // TESTS_MODEL_PUBLISHED_V4_H_
