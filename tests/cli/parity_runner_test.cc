// Every fixture over every path: what `ferry parity` prints and returns.

#include "cli/parity_runner.h"

#include <cstdlib>
#include <sstream>

#include "absl/strings/str_cat.h"
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

struct Fixture {
  const char* name;
  // Means over the cases of the fixtures README's tables: transformers' bf16 run (v3_fp8 is judged
  // as v3, v32_native as v32, V4 within v32), and an fp8 cache.
  double bfloat16_mean;
  double fp8_mean;
  int32_t num_cases = 5;
};
constexpr double kV32Bfloat16 = (0.0122 + 0.0155 + 0.0727 + 0.1405 + 0.2011 + 0.3832) / 6;
constexpr double kV32Fp8 = (0.0677 + 0.0410 + 0.1439 + 0.3072 + 0.4455 + 0.4942) / 6;
const Fixture kFixtures[] = {
    {"v2_lite", (0.0110 + 0.0122 + 0.0186 + 0.0244 + 0.0221) / 5,
     (0.0315 + 0.0514 + 0.0618 + 0.0723 + 0.0590) / 5},
    {"v2_group", (0.0258 + 0.0327 + 0.0274 + 0.0527 + 0.0288) / 5,
     (0.0574 + 0.2722 + 0.1468 + 0.1159 + 0.1094) / 5},
    {"v3", (0.0118 + 0.0176 + 0.0361 + 0.0549 + 0.0612) / 5,
     (0.4195 + 0.1229 + 0.1250 + 0.1160 + 0.1122) / 5},
    {"v3_odd", (0.0122 + 0.0182 + 0.0616 + 0.0439 + 0.0296) / 5,
     (0.0524 + 0.0673 + 0.0885 + 0.1172 + 0.1362) / 5},
    {"v3_fp8", (0.0118 + 0.0176 + 0.0361 + 0.0549 + 0.0612) / 5,
     (0.4195 + 0.1229 + 0.1250 + 0.1160 + 0.1122) / 5},
    {"v32", kV32Bfloat16, kV32Fp8, 6},
    {"v32_odd", (0.0098 + 0.0145 + 0.0745 + 0.3299 + 0.3678 + 0.5432) / 6,
     (0.0516 + 0.2057 + 0.2097 + 0.5525 + 0.6812 + 0.7061) / 6, 6},
    {"v32_native", kV32Bfloat16, kV32Fp8, 6},
    {"v4_odd", kV32Bfloat16, (0.0697 + 0.0398 + 0.0498 + 0.0952 + 0.0999 + 0.1282) / 6, 6},
    // v4's table for an fp8 cache.
    {"v4_native", kV32Bfloat16, (0.0292 + 0.0719 + 0.0711 + 0.0597 + 0.0504 + 0.0558) / 6, 6},
};

class ParityRunnerTest : public ::testing::TestWithParam<Fixture> {};

TEST_P(ParityRunnerTest, Float32PassesOnEveryPath) {
  ParityOptions options;
  options.model_dir = GoldenModel(GetParam().name);
  std::ostringstream out;
  const absl::StatusOr<Verdict> verdict = RunParity(options, out);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->failed, 0) << out.str();
  EXPECT_EQ(verdict->passed, GetParam().num_cases * 4) << out.str();
  for (const char* path : {"whole", "chunked", "decode", "transfer"}) {
    EXPECT_THAT(out.str(), HasSubstr(path));
  }
  EXPECT_THAT(out.str(),
              ::testing::EndsWith(absl::StrCat("\n", verdict->passed, " passed, 0 failed\n")));
}

TEST_P(ParityRunnerTest, ABfloat16CacheIsWithinItsBound) {
  ParityOptions options;
  options.model_dir = GoldenModel(GetParam().name);
  options.kv_cache_dtype = "bfloat16";
  options.max_mean_delta = 1.25 * GetParam().bfloat16_mean;
  std::ostringstream out;
  const absl::StatusOr<Verdict> verdict = RunParity(options, out);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->failed, 0) << out.str();
  EXPECT_EQ(verdict->passed, GetParam().num_cases * 4);
}

TEST_P(ParityRunnerTest, AnFp8CacheIsWithinItsBound) {
  ParityOptions options;
  options.model_dir = GoldenModel(GetParam().name);
  options.kv_cache_dtype = "fp8";
  options.max_mean_delta = 1.25 * GetParam().fp8_mean;
  std::ostringstream out;
  const absl::StatusOr<Verdict> verdict = RunParity(options, out);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->failed, 0) << out.str();
  EXPECT_EQ(verdict->passed, GetParam().num_cases * 4);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, ParityRunnerTest, ::testing::ValuesIn(kFixtures),
                         [](const auto& info) { return std::string(info.param.name); });

// The golden files that ship with the demo models, found beside them.
class ParityDemoTest : public ::testing::TestWithParam<const char*> {};

TEST_P(ParityDemoTest, ADemoModelPassesOnEveryPath) {
  const char* dir = std::getenv("FERRY_DEMO_MODEL");
  FERRY_CHECK(dir != nullptr) << "FERRY_DEMO_MODEL is not set";
  ParityOptions options;
  options.model_dir = std::string(dir).append(GetParam());
  std::ostringstream out;
  const absl::StatusOr<Verdict> verdict = RunParity(options, out);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_EQ(verdict->failed, 0) << out.str();
  EXPECT_EQ(verdict->passed, 3 * 4) << out.str();
}

INSTANTIATE_TEST_SUITE_P(Models, ParityDemoTest, ::testing::Values("", "-sparse"));

TEST(ParityVerdictTest, ADamagedCheckpointFails) {
  const std::string dir = ::testing::TempDir() + "/parity_damaged";
  model::EditableCheckpoint checkpoint = model::EditableCheckpoint::Read(GoldenModel("v2_group"));
  // One weight of one expert, from bf16 x to -x.
  std::string& bytes =
      checkpoint.tensors.at("model.layers.2.mlp.shared_experts.up_proj.weight").bytes;
  bytes[1] = static_cast<char>(bytes[1] ^ 0x80);
  checkpoint.Write(dir);
  ParityOptions options;
  options.model_dir = dir;
  options.golden_file = GoldenModel("v2_group") + "/golden.safetensors";
  options.paths = {ParityPath::kWhole};
  std::ostringstream out;
  const absl::StatusOr<Verdict> verdict = RunParity(options, out);
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_GT(verdict->failed, 0) << out.str();
}

TEST(ParityVerdictTest, SaysWhatKeepsARunFromTakingPlace) {
  ParityOptions options;
  std::ostringstream out;
  options.model_dir = "/nowhere";
  EXPECT_THAT(RunParity(options, out).status().ToString(), HasSubstr("/nowhere/config.json"));
  options.model_dir = GoldenModel("v3");
  options.golden_file = "/nowhere/golden.safetensors";
  EXPECT_THAT(RunParity(options, out).status().ToString(),
              HasSubstr("/nowhere/golden.safetensors"));
  options.golden_file = GoldenModel("v3_odd") + "/golden.safetensors";  // another vocabulary
  EXPECT_THAT(RunParity(options, out).status().ToString(), HasSubstr("expected"));
  options.golden_file.clear();
  options.kv_cache_dtype = "int3";
  EXPECT_THAT(RunParity(options, out).status().ToString(), HasSubstr("int3"));
}

}  // namespace
}  // namespace cli
