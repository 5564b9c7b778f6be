// WeightReader: takes tensors out of a checkpoint by name, with the shape and dtypes the model
// expects, and remembers what it took.
//
// Errors are kNotFound (missing) or kInvalidArgument, one sentence naming file, tensor, expected
// and found.  Thread-compatible.  What it returns points into the checkpoint.

#ifndef MODEL_WEIGHT_READER_H_
#define MODEL_WEIGHT_READER_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe.h"
#include "kernels/tensor.h"
#include "model/config.h"
#include "model/safetensors.h"

namespace model {

class WeightReader final {
 public:
  // Both must outlive the reader.
  WeightReader(const Checkpoint& checkpoint, const ModelConfig& config)
      : checkpoint_(checkpoint), config_(config) {}

  bool Has(const std::string& name) const { return checkpoint_.Find(name) != nullptr; }

  // [rows, cols] in bf16, f16, float32, or fp8 with `name` + "_scale_inv" beside it.
  absl::StatusOr<kernels::WeightTensor> Matrix(const std::string& name, int64_t rows, int64_t cols);
  // The same without fp8 (embeddings).
  absl::StatusOr<kernels::WeightTensor> UnscaledMatrix(const std::string& name, int64_t rows,
                                                       int64_t cols);
  // [size] of bf16, f16 or float32, widened.
  absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t size);

  // gate_proj, up_proj and down_proj under `prefix` ("...mlp.", "...shared_experts.").
  absl::StatusOr<kernels::ExpertTensors> Mlp(const std::string& prefix, int64_t intermediate_size);
  // The routed experts under `prefix` ("...mlp.experts."), one by one or fused.
  absl::StatusOr<std::vector<kernels::ExpertTensors>> RoutedExperts(const std::string& prefix);

  int64_t used_bytes() const { return used_bytes_; }
  int64_t used_parameters() const { return used_parameters_; }  // scales not counted
  int64_t num_unused() const {
    return static_cast<int64_t>(checkpoint_.tensors().size() - used_.size());
  }

 private:
  absl::StatusOr<const TensorView*> Take(const std::string& name, const std::vector<int64_t>& shape,
                                         bool fp8_allowed, bool scales = false);
  void Use(const TensorView& tensor, bool scales);
  // [experts, rows, cols] -> one matrix per expert.
  absl::StatusOr<std::vector<kernels::WeightTensor>> FusedMatrices(const std::string& name,
                                                                   int64_t rows, int64_t cols);

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  std::set<const TensorView*> used_;
  int64_t used_bytes_ = 0;
  int64_t used_parameters_ = 0;
};

}  // namespace model

#endif  // MODEL_WEIGHT_READER_H_
