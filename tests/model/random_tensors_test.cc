#include "model/random_tensors.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "model/network.h"
#include "tests/model/published_v4.h"

namespace model {
namespace {

std::vector<float> Values(const TensorView& tensor) {
  std::vector<float> values(tensor.data.size() / 2);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, tensor.data.data() + 2 * i, 2);
    const uint32_t word = uint32_t{half} << 16;
    std::memcpy(&values[i], &word, 4);
  }
  return values;
}

TEST(RandomTensorsTest, MatricesAreSmallNumbersOfBothSignsThatDependOnTheName) {
  RandomTensors tensors(ModelConfig{}), others(ModelConfig{});
  const TensorView* a = tensors.Get("a.weight", {300, 200});
  const TensorView* b = tensors.Get("b.weight", {300, 200});
  EXPECT_EQ(tensors.Get("a.weight", {300, 200}), a);
  EXPECT_EQ(a->shape, (std::vector<int64_t>{300, 200}));
  EXPECT_EQ(a->dtype, kernels::DType::kBfloat16);
  double sum = 0;
  for (const float value : Values(*a)) {
    EXPECT_GE(std::abs(value), 1.0f / 64);
    EXPECT_LT(std::abs(value), 1.0f / 32);
    sum += value;
  }
  EXPECT_LT(std::abs(sum / 60000), 4 * 0.024 / std::sqrt(60000.0));
  EXPECT_NE(Values(*a), Values(*b));
  EXPECT_EQ(Values(*others.Get("a.weight", {300, 200})), Values(*a));
}

TEST(RandomTensorsTest, VectorsAreOnesOrZerosAndAllStayValid) {
  RandomTensors tensors(ModelConfig{});
  const TensorView* norm = tensors.Get("input_layernorm.weight", {5});
  const TensorView* bias = tensors.Get("gate.e_score_correction_bias", {5});
  const TensorView* small = tensors.Get("small", {2, 3});
  const std::vector<float> before = Values(*small);
  const TensorView* large = tensors.Get("large", {1000, 1000});
  EXPECT_EQ(Values(*norm), std::vector<float>(5, 1.0f));
  EXPECT_EQ(Values(*bias), std::vector<float>(5, 0.0f));
  EXPECT_EQ(Values(*small), before);
  EXPECT_EQ(large->data.size(), 2000000u);
}

// What V4-Flash's layers of every kind have, as it is published.
TEST(RandomTensorsTest, MatricesAreStoredAsPublished) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(PublishedV4Flash().dump(), "config");
  ASSERT_TRUE(config.ok()) << config.status();
  RandomTensors tensors(*config);
  int num_matrices = 0, num_scales = 0;
  for (const PublishedTensor& published : PublishedV4FlashTensors::Make()) {
    const std::string& name = published.name;
    const bool seen = name.starts_with("layers.2.") || name.starts_with("layers.3.");
    const bool other_expert = name.find(".experts.") != std::string::npos &&
                              name.find(".experts.7.") == std::string::npos;
    if (!seen || other_expert || published.shape.size() != 2 || name.ends_with("ape")) continue;
    const TensorView* tensor;
    if (name.ends_with(".scale")) {  // of the matrix before it
      tensor = tensors.Find(name);
      ASSERT_NE(tensor, nullptr) << name;
      EXPECT_THAT(tensor->data, testing::Each(std::byte{121}));
      ++num_scales;
    } else if (name.ends_with("tid2eid")) {
      continue;
    } else {
      const bool packed = published.dtype == "I8";
      tensor = tensors.GetMatrix(name, published.shape[0], published.shape[1] * (packed ? 2 : 1));
      ++num_matrices;
    }
    EXPECT_EQ(tensor->dtype_name, published.dtype) << name;
    EXPECT_EQ(tensor->shape, published.shape) << name;
  }
  EXPECT_GT(num_matrices, num_scales);
  EXPECT_GT(num_scales, 20);
}

TEST(RandomTensorsTest, ScaledNumbersAreAsLargeAsPlainOnes) {
  ModelConfig config;
  config.fp8_weights = true;
  RandomTensors tensors(config);
  const TensorView* matrix = tensors.GetMatrix("a.weight", 130, 256);
  EXPECT_EQ(matrix->dtype, kernels::DType::kFloat8E4m3);
  std::set<std::byte> seen;
  for (const std::byte value : matrix->data) {
    // Exponent 0: 1 to 1.875.
    EXPECT_EQ(value & std::byte{0x78}, std::byte{0x38});
    seen.insert(value);
  }
  EXPECT_EQ(seen.size(), 16u);
  const TensorView* scales = tensors.Find("a.weight_scale_inv");
  ASSERT_NE(scales, nullptr);
  EXPECT_EQ(scales->shape, (std::vector<int64_t>{2, 2}));
  float scale;
  std::memcpy(&scale, scales->data.data() + 12, 4);
  EXPECT_EQ(scale, 1.0f / 64);
}

// Loads a network of a golden model's config, and nothing else of it.
void ExpectLoadsFromItsConfig(const std::string& model) {
  const std::string golden =
      std::string(std::getenv("FERRY_GOLDEN_DIR")) + "/models/" + model + "/config.json";
  const std::filesystem::path dir =
      std::filesystem::path(testing::TempDir()) / ("random_tensors_" + model);
  std::filesystem::create_directories(dir);
  std::filesystem::copy_file(golden, dir / "config.json",
                             std::filesystem::copy_options::overwrite_existing);
  const auto backend = kernels::cpu::CreateCpuBackend(1);
  NetworkOptions options;
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(dir);
  ASSERT_TRUE(config.ok()) << config.status();
  options.block_size = DefaultBlockSize(*config);
  options.limits.sliding_window = config->sliding_window;
  EXPECT_FALSE(LoadNetwork(dir, options, *backend).ok());
  options.random_weights = true;
  const auto network = LoadNetwork(dir, options, *backend);
  ASSERT_TRUE(network.ok()) << network.status();
  EXPECT_GT((*network)->weight_bytes(), 0);
  EXPECT_EQ((*network)->skipped_tensors(), 0);
}

TEST(RandomTensorsTest, ANetworkLoadsFromAConfigAlone) {
  for (const char* model : {"v2_lite", "v32_native", "v4_native"}) {
    SCOPED_TRACE(model);
    ExpectLoadsFromItsConfig(model);
  }
}

}  // namespace
}  // namespace model
