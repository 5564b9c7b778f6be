// Forms a V4 checkpoint may have, and what is said about one that is wrong.

#include "model/deepseek_v4_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/kv_entry.h"
#include "status/check.h"
#include "tests/model/editable_checkpoint.h"
#include "tests/model/network_runner.h"
#include "tests/model/published_v4.h"
#include "tests/numerics/compare.h"

namespace model {
namespace {

using ::testing::HasSubstr;

TEST(PublishedV4FlashTest, EveryTensorIsClaimedOnce) {
  const std::string dir = ::testing::TempDir() + "/published_v4_flash";
  const std::vector<PublishedTensor> tensors = PublishedV4FlashTensors::Make();
  ASSERT_EQ(tensors.size(), 69187u);  // models.md 2.6
  WriteWithoutData(tensors, dir);
  const auto config = ParseModelConfig(PublishedV4Flash().dump(), "config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  const auto checkpoint = Checkpoint::Open(dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  // A tensor claimed twice would end the process.
  const auto summary = CheckCheckpoint(**checkpoint, *config);
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->used_tensors + summary->draft_tensors, 69187);
  EXPECT_EQ(summary->skipped_tensors, summary->draft_tensors);
  EXPECT_EQ(summary->draft_tensors, 256 * 6 + 29 + 10);
  EXPECT_NEAR(static_cast<double>(summary->parameters), 284.33e9, 0.01e9);  // models.md 10.1
  std::filesystem::remove_all(dir);
}

class DeepseekV4WeightsTest : public ::testing::Test {
 protected:
  std::string dir_ = ::testing::TempDir() + "/deepseek_v4_weights_test_" +
                     ::testing::UnitTest::GetInstance()->current_test_info()->name();

  // What the loader says about `checkpoint`.
  absl::Status Check(const EditableCheckpoint& checkpoint) {
    checkpoint.Write(dir_);
    const auto config = LoadModelConfig(dir_);
    if (!config.ok()) return config.status();
    const auto opened = Checkpoint::Open(dir_);
    if (!opened.ok()) return opened.status();
    return CheckCheckpoint(**opened, *config).status();
  }
};

// A name as transformers saves it -> as it calls the module (models.md 2.4); experts stay as they
// are.
std::string ModuleName(std::string name) {
  if (name == "head.weight") return "lm_head.weight";
  const std::pair<const char*, const char*> parts[] = {
      {"hc_attn_", "attn_hc."},
      {"hc_ffn_", "ffn_hc."},
      {".attn_norm.", ".input_layernorm."},
      {".ffn_norm.", ".post_attention_layernorm."},
      {".attn.attn_sink", ".attn.sinks"},
      {".indexer.compressor.", ".indexer."},
      {".indexer.", ".compressor.indexer."},
      {".indexer.weights_proj.", ".indexer.scorer.weights_proj."},
      {".indexer.norm.", ".indexer.kv_norm."},
      {".compressor.norm.", ".compressor.kv_norm."},
      {".attn.q_norm.", ".attn.q_a_norm."},
      {".attn.norm.", ".attn.kv_norm."},
      {".wq_a.", ".q_a_proj."},
      {".wq_b.", ".q_b_proj."},
      {".wkv.", ".kv_proj."},
      {".wgate.", ".gate_proj."},
      {".wo_a.", ".o_a_proj."},
      {".wo_b.", ".o_b_proj."},
      {".ape", ".position_bias"},
      {".gate.bias", ".gate.e_score_correction_bias"},
      {".shared_experts.w1.", ".shared_experts.gate_proj."},
      {".shared_experts.w3.", ".shared_experts.up_proj."},
      {".shared_experts.w2.", ".shared_experts.down_proj."},
      {".attn.", ".self_attn."},
      {".ffn.", ".mlp."}};
  for (const auto& [from, to] : parts) {
    if (const size_t at = name.find(from); at != std::string::npos) {
      name.replace(at, std::strlen(from), to);
    }
  }
  return name;
}

std::vector<float> Logits(const std::string& model_dir) {
  NetworkRunner runner(model_dir);
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 140; ++i) tokens.push_back(i * 37 % runner.vocab_size());
  engine::Sequence seq = runner.NewSequence(tokens);
  return runner.Run(seq, 512);
}

TEST_F(DeepseekV4WeightsTest, ModuleNamesAndFusedExpertsGiveTheSameBits) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v4_odd"));
  const auto released = std::exchange(checkpoint.tensors, {});
  for (const auto& [name, tensor] : released) {
    if (name.find(".experts.") == std::string::npos) checkpoint.tensors[ModuleName(name)] = tensor;
  }
  for (int layer = 0; layer < 4; ++layer) {
    const std::string number = std::to_string(layer);
    const std::string prefix = "model.layers." + number + ".ffn.experts.";
    EditableCheckpoint::Tensor gate_up{"BF16", {8, 128, 96}, ""}, down{"BF16", {8, 96, 64}, ""};
    for (int e = 0; e < 8; ++e) {
      const std::string expert = prefix + std::to_string(e);
      gate_up.bytes += released.at(expert + ".w1.weight").bytes;
      gate_up.bytes += released.at(expert + ".w3.weight").bytes;
      down.bytes += released.at(expert + ".w2.weight").bytes;
    }
    checkpoint.tensors["model.layers." + number + ".mlp.experts.gate_up_proj"] = gate_up;
    checkpoint.tensors["model.layers." + number + ".mlp.experts.down_proj"] = down;
  }
  ASSERT_TRUE(checkpoint.tensors.contains(
      "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight"));
  ASSERT_TRUE(
      checkpoint.tensors.contains("model.layers.1.self_attn.compressor.indexer.kv_proj.weight"));
  checkpoint.Write(dir_, /*num_shards=*/2);
  EXPECT_TRUE(numerics::BitEqual(Logits(dir_), Logits(GoldenModel("v4_odd"))));
  EXPECT_EQ(NetworkRunner(dir_).network().skipped_tensors(), 0);
}

// The scales of `tensor`, F8_E8M0, as numbers.
std::vector<float> ScaleValues(const EditableCheckpoint::Tensor& tensor) {
  std::vector<float> values;
  for (const char byte : tensor.bytes) {
    values.push_back(std::ldexp(1.0f, static_cast<uint8_t>(byte) - 127));
  }
  return values;
}
EditableCheckpoint::Tensor Float32(std::vector<int64_t> shape, const std::vector<float>& values) {
  return {"F32", std::move(shape),
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float))};
}

// models.md 1.2: Base checkpoints have float32 scales, and experts in fp8.
TEST_F(DeepseekV4WeightsTest, Float32ScalesGiveTheSameBits) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v4_native"));
  int converted = 0;
  for (auto& [name, tensor] : checkpoint.tensors) {
    if (tensor.dtype != "F8_E8M0") continue;
    tensor = Float32(tensor.shape, ScaleValues(tensor));
    ++converted;
  }
  EXPECT_GT(converted, 100);
  checkpoint.Write(dir_);
  EXPECT_TRUE(numerics::BitEqual(Logits(dir_), Logits(GoldenModel("v4_native"))));
}

TEST_F(DeepseekV4WeightsTest, ExpertsInFloat8ComputeTheSameAsTheirFloat4) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v4_native"));
  const float kFloat4[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  int converted = 0;
  for (auto& [name, packed] : checkpoint.tensors) {
    if (packed.dtype != "I8") continue;
    const std::string scale_name = name.substr(0, name.size() - std::strlen("weight")) + "scale";
    const std::vector<float> rows = ScaleValues(checkpoint.tensors.at(scale_name));
    const int64_t bytes_per_row = packed.shape[1];
    ASSERT_LE(std::max(packed.shape[0], 2 * bytes_per_row), 128) << "one tile";
    // Largest value 6 * 64 (models.md 2.5): exact.
    const float scale = *std::max_element(rows.begin(), rows.end()) / 64;
    EditableCheckpoint::Tensor wide{"F8_E4M3", {packed.shape[0], 2 * bytes_per_row}, ""};
    for (int64_t at = 0; at < 2 * static_cast<int64_t>(packed.bytes.size()); ++at) {
      const int nibble = static_cast<uint8_t>(packed.bytes[at / 2]) >> (at % 2 * 4) & 15;
      const float value = (nibble < 8 ? 1 : -1) * kFloat4[nibble & 7] * rows[at / 32];
      wide.bytes.push_back(static_cast<char>(kernels::cpu::E4m3FromFloat(value / scale)));
    }
    packed = wide;
    checkpoint.tensors[scale_name] = Float32({1, 1}, {scale});
    ++converted;
  }
  EXPECT_GT(converted, 50);
  checkpoint.Write(dir_);
  // The weights are equal; their products may be summed in another order.
  EXPECT_TRUE(
      numerics::AllClose<float>(Logits(dir_), Logits(GoldenModel("v4_native")), {.abs = 1e-4}));
}

TEST_F(DeepseekV4WeightsTest, LayersForDraftingAreSkippedAndCounted) {
  const NetworkRunner runner(GoldenModel("v4_native"));
  int64_t draft = 0;
  for (const auto& [name, tensor] : EditableCheckpoint::Read(GoldenModel("v4_native")).tensors) {
    draft += name.substr(0, 4) == "mtp.";
  }
  EXPECT_GT(draft, 0);
  EXPECT_EQ(runner.network().skipped_tensors(), draft);
}

TEST_F(DeepseekV4WeightsTest, SaysWhatIsWrongNamingFileTensorExpectedAndFound) {
  struct BadCheckpoint {
    std::function<void(EditableCheckpoint&)> edit;
    const char* message;
  };
  const auto missing = [](const char* name) {
    return [=](EditableCheckpoint& checkpoint) { checkpoint.Take(name); };
  };
  const auto shape = [](const char* name, std::vector<int64_t> shape) {
    return [=](EditableCheckpoint& checkpoint) { checkpoint.tensors.at(name).shape = shape; };
  };
  const auto table_entry = [](int64_t value) {
    return [=](EditableCheckpoint& checkpoint) {
      std::memcpy(checkpoint.tensors.at("layers.1.ffn.gate.tid2eid").bytes.data() + 7 * 3 * 8,
                  &value, sizeof(value));
      std::memcpy(checkpoint.tensors.at("layers.1.ffn.gate.tid2eid").bytes.data() + (7 * 3 + 1) * 8,
                  &value, sizeof(value));
    };
  };
  const BadCheckpoint cases[] = {
      {missing("embed.weight"), "embed.weight is missing, expected shape [512, 64]"},
      {missing("hc_head_fn"), "hc_head_fn is missing, expected shape [4, 256]"},
      {missing("layers.2.attn.compressor.ape"),
       "layers.2.attn.compressor.ape is missing, expected shape [128, 512]"},
      {missing("layers.1.attn.indexer.compressor.wkv.weight"),
       "layers.1.attn.indexer.compressor.wkv.weight is missing"},
      {missing("layers.2.ffn.gate.bias"), "layers.2.ffn.gate.bias is missing"},
      {missing("layers.1.ffn.gate.tid2eid"), "layers.1.ffn.gate.tid2eid is missing"},
      {missing("layers.0.ffn.experts.3.w2.scale"), "layers.0.ffn.experts.3.w2.weight_scale_inv"},
      {shape("layers.0.ffn.experts.3.w2.weight", {32, 64}),
       "layers.0.ffn.experts.3.w2.weight: expected shape [64, 32], found [32, 64]"},
      {shape("layers.0.ffn.experts.3.w2.scale", {128, 1}),
       "layers.0.ffn.experts.3.w2.scale: expected shape [64, 2], found [128, 1]"},
      {shape("layers.0.attn.wo_a.scale", {8, 1}),
       "layers.0.attn.wo_a.scale: expected shape [1, 8], found [8, 1]"},
      {[](EditableCheckpoint& c) {
         c.config["o_lora_rank"] = 96;  // of two groups
         c.tensors["layers.0.attn.wo_a.weight"].shape = {192, 1024};
         c.tensors["layers.0.attn.wo_a.weight"].bytes.resize(192 * 1024);
         c.tensors["layers.0.attn.wo_a.scale"].shape = {2, 8};
         c.tensors["layers.0.attn.wo_a.scale"].bytes.resize(16);
       },
       "o_lora_rank must divide the 128 rows of a scale block or be a multiple of them, is 96"},
      {[](EditableCheckpoint& c) {
         c.tensors["layers.0.attn.wq_a.weight"] = c.tensors["layers.0.ffn.experts.3.w2.weight"];
         c.tensors["layers.0.attn.wq_a.weight"].shape = {64, 64};
         c.tensors["layers.0.attn.wq_a.weight"].bytes.resize(64 * 64);
       },
       "layers.0.attn.wq_a.weight: expected dtype BF16, F16, F32 or F8_E4M3, found I8"},
      {table_entry(8),
       "layers.1.ffn.gate.tid2eid: expected different values below 8 in a row, found 8 in row 7"},
      {table_entry(3),
       "layers.1.ffn.gate.tid2eid: expected different values below 8 in a row, found 3 in row 7"},
      {table_entry(-1), "found -1 in row 7"},
      {[](EditableCheckpoint& c) {
         c.config["compress_ratios"] = {0, 4, 128, 128};
       },
       "layers.3.attn.compressor.wkv.weight: expected shape [512, 64], found [1024, 64]"},
      {[](EditableCheckpoint& c) { c.config["num_hash_layers"] = 1; },
       "layers.1.ffn.gate.bias is missing"},
  };
  for (const BadCheckpoint& bad : cases) {
    EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v4_native"));
    bad.edit(checkpoint);
    EXPECT_THAT(Check(checkpoint).ToString(), HasSubstr(bad.message));
  }
}

}  // namespace
}  // namespace model
