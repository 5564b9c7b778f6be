// Forms a checkpoint may have, and what is said about one that is wrong.

#include "model/weights.h"

#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/editable_checkpoint.h"
#include "tests/model/network_runner.h"
#include "tests/numerics/compare.h"

namespace model {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class WeightsTest : public ::testing::Test {
 protected:
  std::string dir_ = ::testing::TempDir() + "/weights_test_" +
                     ::testing::UnitTest::GetInstance()->current_test_info()->name();

  static std::vector<float> Logits(const std::string& model_dir) {
    NetworkRunner runner(model_dir);
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 70; ++i) tokens.push_back(i * 37 % runner.vocab_size());
    engine::Sequence seq = runner.NewSequence(tokens);
    return runner.Run(seq, 512);
  }
  absl::Status LoadStatus() {
    const auto backend = kernels::cpu::CreateCpuBackend(1);
    return LoadNetwork(dir_, NetworkRunner::Options(), *backend).status();
  }
};

TEST_F(WeightsTest, ShardsGiveTheSameBitsAsOneFile) {
  EditableCheckpoint::Read(GoldenModel("v3_fp8")).Write(dir_, /*num_shards=*/3);
  EXPECT_TRUE(numerics::BitEqual(Logits(dir_), Logits(GoldenModel("v3_fp8"))));
}

TEST_F(WeightsTest, FusedExpertsGiveTheSameBitsAsSingleOnes) {
  const std::pair<const char*, std::vector<int>> models[] = {{"v2_group", {1, 2}}, {"v3_fp8", {1}}};
  for (const auto& [name, layers] : models) {
    EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel(name));
    for (const int layer : layers) {
      checkpoint.FuseExperts("model.layers." + std::to_string(layer) + ".mlp.experts.", 8);
    }
    checkpoint.Write(dir_);
    EXPECT_TRUE(numerics::BitEqual(Logits(dir_), Logits(GoldenModel(name)))) << name;
  }
}

TEST_F(WeightsTest, Float32WeightsComputeTheSame) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v3_odd"));
  for (auto& [name, tensor] : checkpoint.tensors) {
    if (tensor.dtype == "BF16") tensor = EditableCheckpoint::Widened(tensor);
  }
  checkpoint.Write(dir_);
  const std::vector<float> expected = Logits(GoldenModel("v3_odd"));
  EXPECT_TRUE(numerics::AllClose<float>(Logits(dir_), expected, {.abs = 1e-4}));
}

TEST_F(WeightsTest, TiedEmbeddingsAreTheHead) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v2_group"));
  checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"];
  checkpoint.Write(dir_);
  const std::vector<float> expected = Logits(dir_);
  checkpoint.tensors.erase("lm_head.weight");
  checkpoint.config["tie_word_embeddings"] = true;
  checkpoint.Write(dir_);
  EXPECT_TRUE(numerics::BitEqual(Logits(dir_), expected));
}

// Rows of bf16 weights: the rotary rows of every group of `group_rows` go from pairs (x0 x1)(x2 x3)
// to halves (x0 x2 ..)(x1 x3 ..).
void SplitRotaryRows(EditableCheckpoint::Tensor& tensor, int64_t group_rows, int64_t rope_dim) {
  const size_t row_bytes = tensor.bytes.size() / static_cast<size_t>(tensor.shape[0]);
  const std::string before = tensor.bytes;
  for (int64_t group = 0; group < tensor.shape[0]; group += group_rows) {
    const int64_t first = group + group_rows - rope_dim;
    for (int64_t i = 0; i < rope_dim; ++i) {
      const int64_t from = first + (i < rope_dim / 2 ? 2 * i : 2 * (i - rope_dim / 2) + 1);
      tensor.bytes.replace((first + i) * row_bytes, row_bytes, before, from * row_bytes, row_bytes);
    }
  }
}

// rope_interleave false pairs x_i with x_{i + rope / 2}: with the rotary rows rearranged so, the
// scores and with them the logits are those of the interleaved model.
TEST_F(WeightsTest, HalfSplitRopeOfRearrangedRowsIsTheSameModel) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v3_odd"));
  checkpoint.config["rope_interleave"] = false;
  const std::vector<float> expected = Logits(GoldenModel("v3_odd"));
  checkpoint.Write(dir_);
  EXPECT_FALSE(numerics::AllClose<float>(Logits(dir_), expected, {.abs = 1e-2}));
  for (int layer = 0; layer < 3; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
    SplitRotaryRows(checkpoint.tensors.at(prefix + "q_proj.weight"), 40, 16);
    SplitRotaryRows(checkpoint.tensors.at(prefix + "kv_a_proj_with_mqa.weight"), 64, 16);
  }
  checkpoint.Write(dir_);
  EXPECT_TRUE(numerics::AllClose<float>(Logits(dir_), expected, {.abs = 1e-4}));
}

TEST_F(WeightsTest, SkipsAndCountsWhatItDoesNotKnow) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v3"));
  // The MTP layer of a released checkpoint comes after the last layer.
  for (const char* name : {"model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight",
                           "model.layers.3.self_attn.o_proj.weight", "extra"}) {
    checkpoint.tensors[name] = {"BF16", {2}, "1234"};
  }
  checkpoint.Write(dir_);
  EXPECT_EQ(NetworkRunner(dir_).network().skipped_tensors(), 4);
  EXPECT_EQ(NetworkRunner(GoldenModel("v3")).network().skipped_tensors(), 0);
  EXPECT_TRUE(numerics::BitEqual(Logits(dir_), Logits(GoldenModel("v3"))));
}

TEST_F(WeightsTest, DigestFollowsConfigAndTensorList) {
  EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v3"));
  const auto digest = [&] {
    checkpoint.Write(dir_);
    return NetworkRunner(dir_).network().weights_digest();
  };
  const std::string first = digest();
  EXPECT_EQ(first.size(), 32u);
  EXPECT_EQ(digest(), first);
  checkpoint.config["rms_norm_eps"] = 1e-5;
  const std::string second = digest();
  EXPECT_NE(second, first);
  checkpoint.tensors["extra"] = {"BF16", {2}, "1234"};
  EXPECT_NE(digest(), second);
}

TEST_F(WeightsTest, SaysWhatIsWrongNamingFileTensorExpectedAndFound) {
  struct BadCheckpoint {
    std::function<void(EditableCheckpoint&)> edit;
    std::vector<const char*> message;
  };
  const auto shape = [](const char* name, std::vector<int64_t> shape) {
    return [=](EditableCheckpoint& checkpoint) { checkpoint.tensors.at(name).shape = shape; };
  };
  const auto missing = [](const char* name) {
    return [=](EditableCheckpoint& checkpoint) { checkpoint.Take(name); };
  };
  const BadCheckpoint cases[] = {
      {missing("model.embed_tokens.weight"),
       {"model.embed_tokens.weight is missing", "[512, 256]"}},
      {missing("lm_head.weight"), {"lm_head.weight is missing", "[512, 256]"}},
      {missing("model.norm.weight"), {"model.norm.weight is missing", "[256]"}},
      {missing("model.layers.1.self_attn.q_a_layernorm.weight"),
       {"q_a_layernorm.weight is missing"}},
      {missing("model.layers.1.mlp.gate.e_score_correction_bias"),
       {"e_score_correction_bias is missing", "[8]"}},
      {missing("model.layers.1.mlp.experts.7.up_proj.weight"),
       {"model.layers.1.mlp.experts.7.up_proj.weight is missing", "[128, 256]"}},
      {missing("model.layers.0.self_attn.kv_b_proj.weight_scale_inv"),
       {"kv_b_proj.weight_scale_inv is missing"}},
      {shape("model.layers.0.self_attn.o_proj.weight", {128, 512}),
       {"model.safetensors: tensor model.layers.0.self_attn.o_proj.weight: expected shape "
        "[256, 256], found [128, 512]"}},
      {shape("model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", {10}),
       {"kv_a_proj_with_mqa.weight_scale_inv: expected shape [5, 2], found [10]"}},
      {shape("model.layers.0.input_layernorm.weight", {1, 256}),
       {"input_layernorm.weight: expected shape [256], found [1, 256]"}},
      {[](EditableCheckpoint& c) {
         auto& tensor = c.tensors.at("model.layers.0.self_attn.q_b_proj.weight");
         tensor.dtype = "U8";
       },
       {"q_b_proj.weight: expected dtype BF16, F16, F32 or F8_E4M3, found U8"}},
      {[](EditableCheckpoint& c) {
         auto& tensor = c.tensors.at("model.embed_tokens.weight");
         tensor.dtype = "F8_E4M3";
         tensor.bytes.resize(tensor.bytes.size() / 2);
       },
       {"model.embed_tokens.weight: expected dtype BF16, F16 or F32, found F8_E4M3"}},
      {[](EditableCheckpoint& c) {
         auto& tensor = c.tensors.at("model.layers.0.self_attn.o_proj.weight_scale_inv");
         tensor.dtype = "I32";
       },
       {"o_proj.weight_scale_inv: expected dtype F32 or F8_E8M0, found I32"}},
      {[](EditableCheckpoint& c) { c.config["num_hidden_layers"] = 3; },
       {"model.layers.2.input_layernorm.weight is missing"}},
      {[](EditableCheckpoint& c) { c.config["hidden_size"] = 1 << 20; },
       {"model.embed_tokens.weight: expected shape [512, 1048576], found [512, 256]"}},
      {[](EditableCheckpoint& c) { c.config["max_position_embeddings"] = 512; },
       {"max_model_len 1024 is not within the checkpoint's 512 positions"}},
  };
  for (const BadCheckpoint& bad : cases) {
    EditableCheckpoint checkpoint = EditableCheckpoint::Read(GoldenModel("v3_fp8"));
    bad.edit(checkpoint);
    checkpoint.Write(dir_);
    const absl::Status status = LoadStatus();
    ASSERT_FALSE(status.ok()) << bad.message[0];
    for (const char* part : bad.message)
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

}  // namespace
}  // namespace model
