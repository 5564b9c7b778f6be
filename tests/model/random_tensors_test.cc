#include "model/random_tensors.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "model/network.h"

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
  RandomTensors tensors, others;
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
  RandomTensors tensors;
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

TEST(RandomTensorsTest, ANetworkLoadsFromAConfigAlone) {
  const std::string golden =
      std::string(std::getenv("FERRY_GOLDEN_DIR")) + "/models/v2_lite/config.json";
  const std::filesystem::path dir = std::filesystem::path(testing::TempDir()) / "random_tensors";
  std::filesystem::create_directories(dir);
  std::filesystem::copy_file(golden, dir / "config.json",
                             std::filesystem::copy_options::overwrite_existing);
  const auto backend = kernels::cpu::CreateCpuBackend(1);
  NetworkOptions options;
  EXPECT_FALSE(LoadNetwork(dir, options, *backend).ok());
  options.random_weights = true;
  const auto network = LoadNetwork(dir, options, *backend);
  ASSERT_TRUE(network.ok()) << network.status();
  EXPECT_GT((*network)->weight_bytes(), 0);
  EXPECT_EQ((*network)->skipped_tensors(), 0);
}

}  // namespace
}  // namespace model
