// What random checkpoints of all families are made of.

#ifndef TESTS_MODEL_RANDOM_TENSORS_MAKER_H_
#define TESTS_MODEL_RANDOM_TENSORS_MAKER_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "model/config.h"
#include "status/check.h"
#include "tests/model/editable_checkpoint.h"

namespace model {

class RandomTensorsMaker {
 protected:
  // `dtype`: "F32" or "BF16".
  RandomTensorsMaker(const nlohmann::json& config, std::string dtype, uint32_t seed)
      : dtype_(std::move(dtype)), random_(seed) {
    result_.config = config;
    const auto parsed = ParseModelConfig(config.dump(), "config.json");
    FERRY_CHECK(parsed.ok()) << parsed.status().ToString();
    config_ = *parsed;
  }

  void Norm(const std::string& name, int64_t size) { Add(name, {size}, 1, 0.2); }
  void Matrix(const std::string& name, int64_t rows, int64_t cols, double scale = 0) {
    Add(name, {rows, cols}, 0, scale > 0 ? scale : 1.5 / std::sqrt(static_cast<double>(cols)));
  }
  void Add(const std::string& name, const std::vector<int64_t>& shape, double mean, double sigma) {
    std::normal_distribution<float> normal(static_cast<float>(mean), static_cast<float>(sigma));
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    EditableCheckpoint::Tensor tensor{dtype_, shape, {}};
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint32_t>(normal(random_));
      const uint32_t low = dtype_ == "F32" ? 0 : 2;  // bf16: the upper half
      for (uint32_t byte = low; byte < 4; ++byte) {
        tensor.bytes.push_back(static_cast<char>(bits >> (8 * byte)));
      }
    }
    result_.tensors[name] = std::move(tensor);
  }

  const std::string dtype_;
  std::mt19937 random_;
  ModelConfig config_;
  EditableCheckpoint result_;
};

}  // namespace model

#endif  // TESTS_MODEL_RANDOM_TENSORS_MAKER_H_
