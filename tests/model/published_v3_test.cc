// The published tensor lists of DeepSeek-V3 and V3.2 (models.md 2.2, 2.3), without data.

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weights.h"
#include "tests/model/published_tensors.h"

namespace model {
namespace {

constexpr int64_t kHidden = 7168;
constexpr int kLayers = 61;  // the one after them is for drafting

class PublishedV3Tensors {
 public:
  static std::vector<PublishedTensor> Make(bool indexer) {
    PublishedV3Tensors list(indexer);
    list.Add("model.embed_tokens.weight", "BF16", {129280, kHidden});
    list.Add("lm_head.weight", "BF16", {129280, kHidden});
    list.Add("model.norm.weight", list.norm_dtype_, {kHidden});
    for (int layer = 0; layer <= kLayers; ++layer) list.Layer(layer);
    const std::string draft = "model.layers." + std::to_string(kLayers) + ".";
    list.Add(draft + "embed_tokens.weight", "BF16", {129280, kHidden});
    list.Add(draft + "enorm.weight", list.norm_dtype_, {kHidden});
    list.Add(draft + "hnorm.weight", list.norm_dtype_, {kHidden});
    list.Add(draft + "eh_proj.weight", "BF16", {kHidden, 2 * kHidden});
    list.Add(draft + "shared_head.norm.weight", list.norm_dtype_, {kHidden});
    list.Add(draft + "shared_head.head.weight", "BF16", {129280, kHidden});
    return list.tensors_;
  }

 private:
  explicit PublishedV3Tensors(bool indexer)
      : indexer_(indexer), norm_dtype_(indexer ? "F32" : "BF16") {}

  void Add(const std::string& name, const std::string& dtype, std::vector<int64_t> shape) {
    tensors_.push_back({name, dtype, std::move(shape)});
  }
  void Quantised(const std::string& name, int64_t rows, int64_t cols) {
    Add(name + ".weight", "F8_E4M3", {rows, cols});
    Add(name + ".weight_scale_inv", "F32", {(rows + 127) / 128, (cols + 127) / 128});
  }
  void Mlp(const std::string& prefix, int64_t intermediate) {
    Quantised(prefix + "gate_proj", intermediate, kHidden);
    Quantised(prefix + "up_proj", intermediate, kHidden);
    Quantised(prefix + "down_proj", kHidden, intermediate);
  }
  void Layer(int layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const std::string attention = prefix + "self_attn.";
    Add(prefix + "input_layernorm.weight", norm_dtype_, {kHidden});
    Add(prefix + "post_attention_layernorm.weight", norm_dtype_, {kHidden});
    Quantised(attention + "q_a_proj", 1536, kHidden);
    Add(attention + "q_a_layernorm.weight", norm_dtype_, {1536});
    Quantised(attention + "q_b_proj", 24576, 1536);
    Quantised(attention + "kv_a_proj_with_mqa", 576, kHidden);
    Add(attention + "kv_a_layernorm.weight", norm_dtype_, {512});
    Quantised(attention + "kv_b_proj", 32768, 512);
    Quantised(attention + "o_proj", kHidden, 16384);
    if (indexer_) {
      Quantised(attention + "indexer.wq_b", 8192, 1536);
      Quantised(attention + "indexer.wk", 128, kHidden);
      Add(attention + "indexer.k_norm.weight", "F32", {128});
      Add(attention + "indexer.k_norm.bias", "F32", {128});
      Add(attention + "indexer.weights_proj.weight", "BF16", {64, kHidden});
    }
    if (layer < 3) return Mlp(prefix + "mlp.", 18432);
    Add(prefix + "mlp.gate.weight", "BF16", {256, kHidden});
    Add(prefix + "mlp.gate.e_score_correction_bias", "F32", {256});
    for (int e = 0; e < 256; ++e) Mlp(prefix + "mlp.experts." + std::to_string(e) + ".", 2048);
    Mlp(prefix + "mlp.shared_experts.", 2048);
  }

  const bool indexer_;
  const std::string norm_dtype_;
  std::vector<PublishedTensor> tensors_;
};

// Nearly everything in the published configs is transformers' default.
ModelConfig PublishedConfig(const std::string& model_type) {
  const std::string text = R"({"model_type": ")" + model_type + R"(", "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840, "quantization_config": {"quant_method": "fp8",
    "fmt": "e4m3", "weight_block_size": [128, 128]}})";
  const auto config = ParseModelConfig(text, "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(ModelConfig());
}

void ExpectEveryTensorClaimedOnce(const std::string& model_type, bool indexer, int64_t num_tensors,
                                  int64_t num_draft, double parameters) {
  const std::string dir = ::testing::TempDir() + "/published_" + model_type;
  const std::vector<PublishedTensor> tensors = PublishedV3Tensors::Make(indexer);
  ASSERT_EQ(static_cast<int64_t>(tensors.size()), num_tensors);
  WriteWithoutData(tensors, dir);
  const auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  // A tensor claimed twice would end the process.
  const auto summary = CheckCheckpoint(**checkpoint, PublishedConfig(model_type));
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->used_tensors + summary->draft_tensors, num_tensors);
  EXPECT_EQ(summary->skipped_tensors, summary->draft_tensors);
  EXPECT_EQ(summary->draft_tensors, num_draft);
  EXPECT_NEAR(static_cast<double>(summary->parameters), parameters, 0.01e9);
  std::filesystem::remove_all(dir);
}

// Counts: models.md 2.6; parameters: models.md 10.1.
TEST(PublishedV3Test, EveryTensorOfV32IsClaimedOnce) {
  ExpectEveryTensorClaimedOnce("deepseek_v32", /*indexer=*/true, 92425, 256 * 6 + 21 + 8 + 6,
                               671.878e9);
}

TEST(PublishedV3Test, EveryTensorOfV3IsClaimedOnce) {
  ExpectEveryTensorClaimedOnce("deepseek_v3", /*indexer=*/false, 91991, 256 * 6 + 14 + 8 + 6,
                               671.026e9);
}

}  // namespace
}  // namespace model
