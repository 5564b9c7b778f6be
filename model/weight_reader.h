// WeightReader: takes tensors out of a checkpoint by name, with the shape and dtypes the model
// expects, and remembers what it took.
//
// Errors are kNotFound (missing) or kInvalidArgument, one sentence naming file, tensor, expected
// and found.  Thread-compatible.  What it returns points into the checkpoint.

#ifndef MODEL_WEIGHT_READER_H_
#define MODEL_WEIGHT_READER_H_

#include <algorithm>
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

// Rows [begin, begin + count) of `matrix`.  REQUIRES: if it is scaled, `begin` begins a block of
// scales, or all rows lie in one.
kernels::WeightTensor MatrixRows(const kernels::WeightTensor& matrix, int64_t begin, int64_t count);

class WeightReader final {
 public:
  // Both must outlive the reader.
  WeightReader(const Checkpoint& checkpoint, const ModelConfig& config)
      : checkpoint_(checkpoint), config_(config) {}

  bool Has(const std::string& name) const { return checkpoint_.Find(name) != nullptr; }

  // [rows, cols] in bf16, f16, float32, or fp8 with its scales beside it ("X.weight_scale_inv" or
  // "X.scale" of "X.weight").  With `fp4_allowed` also packed fp4, one scale for 32 columns of a
  // row.
  absl::StatusOr<kernels::WeightTensor> Matrix(const std::string& name, int64_t rows, int64_t cols,
                                               bool fp4_allowed = false);
  // The same without fp8 (embeddings).
  absl::StatusOr<kernels::WeightTensor> UnscaledMatrix(const std::string& name, int64_t rows,
                                                       int64_t cols);
  // [size] of bf16, f16 or float32, widened; `shape`: of that many values.
  absl::StatusOr<std::vector<float>> Vector(const std::string& name, int64_t size);
  absl::StatusOr<std::vector<float>> Vector(const std::string& name,
                                            const std::vector<int64_t>& shape);
  // int64 or int32 [rows, cols], each in [0, bound) and different within a row.
  absl::StatusOr<std::vector<int32_t>> IndexTable(const std::string& name, int64_t rows,
                                                  int64_t cols, int64_t bound);

  // gate_proj, up_proj and down_proj under `prefix` ("...mlp.", "...shared_experts.").
  absl::StatusOr<kernels::ExpertTensors> Mlp(const std::string& prefix, int64_t intermediate_size);
  // The routed experts under `prefix` ("...mlp.experts."), one by one or fused.
  absl::StatusOr<std::vector<kernels::ExpertTensors>> RoutedExperts(const std::string& prefix);
  // The fused form: `prefix` + "gate_up_proj" and "down_proj", [experts, rows, cols].
  absl::StatusOr<std::vector<kernels::ExpertTensors>> FusedExperts(const std::string& prefix);

  int64_t used_bytes() const { return used_bytes_; }
  int64_t used_parameters() const { return used_parameters_; }  // scales not counted
  int64_t num_unused() const {
    return std::max<int64_t>(
        0, static_cast<int64_t>(checkpoint_.tensors().size()) - static_cast<int64_t>(used_.size()));
  }
  // Of the unused ones, those of layers for drafting.
  int64_t num_draft() const;

 private:
  absl::StatusOr<const TensorView*> Take(const std::string& name, const std::vector<int64_t>& shape,
                                         bool fp8_allowed, bool scales = false);
  // The tensor, if it has that shape.
  absl::StatusOr<const TensorView*> Get(const std::string& name, const std::vector<int64_t>& shape);
  absl::Status TakeScales(const std::string& name, kernels::WeightTensor& matrix);
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
