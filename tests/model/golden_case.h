// Golden checkpoints and the cases of their golden files.

#ifndef TESTS_MODEL_GOLDEN_CASE_H_
#define TESTS_MODEL_GOLDEN_CASE_H_

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "model/safetensors.h"
#include "status/check.h"

namespace model {

inline std::string GoldenModel(const std::string& name) {
  const char* dir = std::getenv("FERRY_GOLDEN_DIR");
  FERRY_CHECK(dir != nullptr) << "FERRY_GOLDEN_DIR is not set";
  return std::string(dir) + "/models/" + name;
}

// One case of a golden file.
struct GoldenCase {
  std::string name;
  std::vector<int32_t> ids;
  absl::Span<const float> logits;  // [min(ids, 64), vocab], of the last positions
  absl::Span<const int64_t> greedy;
  absl::Span<const float> margin;
};

inline std::vector<GoldenCase> GoldenCases(const Checkpoint& golden) {
  std::vector<GoldenCase> cases;
  const auto floats = [&](const std::string& name) {
    const TensorView& tensor = **golden.Get(name);
    return absl::Span<const float>(reinterpret_cast<const float*>(tensor.data.data()),
                                   tensor.data.size() / sizeof(float));
  };
  const auto integers = [&](const std::string& name) {
    const TensorView& tensor = **golden.Get(name);
    return absl::Span<const int64_t>(reinterpret_cast<const int64_t*>(tensor.data.data()),
                                     tensor.data.size() / sizeof(int64_t));
  };
  for (const auto& [name, tensor] : golden.tensors()) {
    if (name.size() < 4 || name.substr(name.size() - 4) != ".ids") continue;
    const std::string prefix = name.substr(0, name.size() - 3);
    const absl::Span<const int64_t> ids = integers(name);
    cases.push_back({.name = name.substr(0, name.size() - 4),
                     .ids = {ids.begin(), ids.end()},
                     .logits = floats(prefix + "logits"),
                     .greedy = integers(prefix + "greedy"),
                     .margin = floats(prefix + "margin")});
  }
  return cases;
}

}  // namespace model

#endif  // TESTS_MODEL_GOLDEN_CASE_H_
