#include "cli/inspect_command.h"

#include <cstdlib>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/editable_checkpoint.h"

namespace cli {
namespace {

using ::testing::HasSubstr;

std::string GoldenModel(const std::string& name) {
  const char* dir = std::getenv("FERRY_GOLDEN_DIR");
  FERRY_CHECK(dir != nullptr) << "FERRY_GOLDEN_DIR is not set";
  return std::string(dir) + "/models/" + name;
}

TEST(InspectCommandTest, ShowsWhatIsThere) {
  std::ostringstream out;
  const absl::Status status = InspectCheckpoint(GoldenModel("v3_fp8"), out);
  ASSERT_TRUE(status.ok()) << status;
  for (const char* part :
       {"deepseek_v3: 2 layers (1 dense, 1 of experts), hidden size 256",
        "2 heads, query and key 128 + 64 rotary, value 128; latent 512; query rank 128",
        "8 routed, 4 a token, 1 shared, intermediate size 128", "F8_E4M3", "; complete",
        "skipped      0 tensors",
        // 576 values of 4 or 2 bytes; 512 + 4 scales of 4 + 64 of 2; two layers.
        "float32  4608 bytes a token (2304 a layer)", "bfloat16 2304 bytes a token (1152 a layer)",
        "fp8      1312 bytes a token (656 a layer)"}) {
    EXPECT_THAT(out.str(), HasSubstr(part));
  }
}

TEST(InspectCommandTest, ShowsTheIndexerAndItsKeys) {
  std::ostringstream out;
  const absl::Status status = InspectCheckpoint(GoldenModel("v32_native"), out);
  ASSERT_TRUE(status.ok()) << status;
  for (const char* part :
       {"deepseek_v32: 3 layers (1 dense, 2 of experts)", "16 heads of 128; 64 keys attended",
        "; complete",
        // Beside the latents 128 values of 4 or 2 bytes, or 128 + 4 of a scale; three layers.
        "float32  8448 bytes a token (2304 + 512 a layer)",
        "bfloat16 4224 bytes a token (1152 + 256 a layer)",
        "fp8      2364 bytes a token (656 + 132 a layer), 151296 a block of 64 tokens",
        // 64 * 656 and 64 * 132, three layers.
        "a block: latent 125952 useful + 0 padding, index_key 25344 useful + 0 padding\n"}) {
    EXPECT_THAT(out.str(), HasSubstr(part));
  }
}

TEST(InspectCommandTest, ShowsKindsOfLayersAndStateOfV4) {
  std::ostringstream out;
  const absl::Status status = InspectCheckpoint(GoldenModel("v4_native"), out);
  ASSERT_TRUE(status.ok()) << status;
  for (const char* part :
       {"deepseek_v4: 4 layers (0 dense, 4 of experts)",
        "4 heads of 448 + 64 rotary, one key that is the value; query rank 64",
        "1 with a window of 128 tokens only, 2 with the best entries of 4 tokens too, 1 with all "
        "entries of 128",
        "16 heads of 128; 32 keys attended", "(YaRN: 4 times 64)", "; complete",
        // Two layers of 584 and 132 bytes for 4 tokens, one of 584 for 128.
        "fp8      363 bytes a token (584/4 + 584/128 + 132/4 a layer)", "a block of 256 tokens",
        // 64 entries of 584 bytes in 37632, 2 in 1792, 64 keys of 132 in 8448.
        "a block: csa 74752 useful + 512 padding, hca 1168 useful + 624 padding, "
        "csa_index_key 16896 useful + 0 padding\n",
        // Four windows of 128 entries of 584 bytes; sums of 2 * 6 * 640 and 3 * 512 floats.
        "and 335.9 kB of state a sequence"}) {
    EXPECT_THAT(out.str(), HasSubstr(part));
  }
}

TEST(InspectCommandTest, CountsParametersAndSkippedTensors) {
  const std::string dir = ::testing::TempDir() + "/inspect_test";
  model::EditableCheckpoint checkpoint = model::EditableCheckpoint::Read(GoldenModel("v2_group"));
  int64_t parameters = 0;
  for (const auto& [name, tensor] : checkpoint.tensors) parameters += tensor.bytes.size() / 2;
  checkpoint.tensors["model.layers.3.enorm.weight"] = {"BF16", {2}, "1234"};
  checkpoint.Write(dir, /*num_shards=*/2);
  std::ostringstream out;
  ASSERT_TRUE(InspectCheckpoint(dir, out).ok());
  EXPECT_THAT(out.str(), HasSubstr("weights      " + std::to_string(parameters) + " parameters"));
  EXPECT_THAT(out.str(), HasSubstr("skipped      1 tensors"));
  EXPECT_THAT(out.str(), HasSubstr("files        2,"));
  checkpoint.Take("model.norm.weight");
  checkpoint.Write(dir);
  EXPECT_THAT(InspectCheckpoint(dir, out).ToString(), HasSubstr("model.norm.weight is missing"));
}

}  // namespace
}  // namespace cli
