#include "model/weight_reader.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "model/safetensors_header.h"
#include "status/status_macros.h"

namespace model {
namespace {

using kernels::DType;
using kernels::ExpertTensors;
using kernels::WeightTensor;

int64_t CeilDiv(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

float HalfToFloat(uint16_t half) {
  const int exponent = (half >> 10) & 0x1f;
  const int mantissa = half & 0x3ff;
  const float sign = (half & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 0x1f) return mantissa == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
}

absl::Status Mismatch(const TensorView& tensor, const std::string& expected,
                      const std::string& found) {
  return absl::InvalidArgumentError(absl::StrCat(tensor.file, ": tensor ", tensor.name,
                                                 ": expected ", expected, ", found ", found));
}

// Rows [begin, begin + count) of `matrix`.
WeightTensor Rows(const WeightTensor& matrix, int64_t begin, int64_t count) {
  WeightTensor rows = matrix;
  rows.rows = count;
  rows.data = static_cast<const std::byte*>(matrix.data) +
              begin * matrix.cols * kernels::DTypeBits(matrix.dtype) / 8;
  if (matrix.scales != nullptr) {
    rows.scales = static_cast<const std::byte*>(matrix.scales) +
                  begin / matrix.scale_block_rows * CeilDiv(matrix.cols, matrix.scale_block_cols) *
                      kernels::DTypeBits(matrix.scale_dtype) / 8;
  }
  return rows;
}

}  // namespace

absl::StatusOr<const TensorView*> WeightReader::Take(const std::string& name,
                                                     const std::vector<int64_t>& shape,
                                                     bool fp8_allowed, bool scales) {
  absl::StatusOr<const TensorView*> found = checkpoint_.Get(name);
  if (!found.ok()) {
    return absl::NotFoundError(absl::StrCat(std::string(found.status().message()),
                                            ", expected shape ", ShapeString(shape)));
  }
  const TensorView* tensor = *found;
  if (tensor->shape != shape) {
    return Mismatch(*tensor, absl::StrCat("shape ", ShapeString(shape)),
                    ShapeString(tensor->shape));
  }
  const bool plain = tensor->dtype == DType::kBfloat16 || tensor->dtype == DType::kFloat16 ||
                     tensor->dtype == DType::kFloat32;
  if (!plain && !(fp8_allowed && tensor->dtype == DType::kFloat8E4m3)) {
    return Mismatch(*tensor,
                    fp8_allowed ? "dtype BF16, F16, F32 or F8_E4M3" : "dtype BF16, F16 or F32",
                    tensor->dtype_name);
  }
  Use(*tensor, scales);
  return tensor;
}

void WeightReader::Use(const TensorView& tensor, bool scales) {
  if (!used_.insert(&tensor).second) return;
  const auto bytes = static_cast<int64_t>(tensor.data.size());
  used_bytes_ += bytes;
  if (!scales) used_parameters_ += bytes * 8 / kernels::DTypeBits(tensor.dtype);
}

absl::StatusOr<WeightTensor> WeightReader::UnscaledMatrix(const std::string& name, int64_t rows,
                                                          int64_t cols) {
  ASSIGN_OR_RETURN(const TensorView* tensor, Take(name, {rows, cols}, /*fp8_allowed=*/false));
  return WeightTensor{
      .data = tensor->data.data(), .dtype = tensor->dtype, .rows = rows, .cols = cols};
}

absl::StatusOr<WeightTensor> WeightReader::Matrix(const std::string& name, int64_t rows,
                                                  int64_t cols) {
  ASSIGN_OR_RETURN(const TensorView* tensor, Take(name, {rows, cols}, /*fp8_allowed=*/true));
  WeightTensor matrix{
      .data = tensor->data.data(), .dtype = tensor->dtype, .rows = rows, .cols = cols};
  if (tensor->dtype != DType::kFloat8E4m3) return matrix;
  matrix.scale_block_rows = config_.weight_block_rows;
  matrix.scale_block_cols = config_.weight_block_cols;
  const std::vector<int64_t> scale_shape = {CeilDiv(rows, matrix.scale_block_rows),
                                            CeilDiv(cols, matrix.scale_block_cols)};
  ASSIGN_OR_RETURN(const TensorView* scales, checkpoint_.Get(name + "_scale_inv"));
  if (scales->shape != scale_shape) {
    return Mismatch(*scales, absl::StrCat("shape ", ShapeString(scale_shape)),
                    ShapeString(scales->shape));
  }
  if (scales->dtype != DType::kFloat32 && scales->dtype != DType::kFloat8E8m0) {
    return Mismatch(*scales, "dtype F32 or F8_E8M0", scales->dtype_name);
  }
  Use(*scales, /*scales=*/true);
  matrix.scales = scales->data.data();
  matrix.scale_dtype = scales->dtype;
  return matrix;
}

absl::StatusOr<std::vector<float>> WeightReader::Vector(const std::string& name, int64_t size) {
  ASSIGN_OR_RETURN(const TensorView* tensor, Take(name, {size}, /*fp8_allowed=*/false));
  std::vector<float> values(size);
  if (tensor->dtype == DType::kFloat32) {
    std::memcpy(values.data(), tensor->data.data(), size * sizeof(float));
    return values;
  }
  const auto* halves = reinterpret_cast<const uint16_t*>(tensor->data.data());
  for (int64_t i = 0; i < size; ++i) {
    values[i] = tensor->dtype == DType::kBfloat16 ? std::bit_cast<float>(uint32_t{halves[i]} << 16)
                                                  : HalfToFloat(halves[i]);
  }
  return values;
}

absl::StatusOr<ExpertTensors> WeightReader::Mlp(const std::string& prefix,
                                                int64_t intermediate_size) {
  ExpertTensors mlp;
  const int64_t hidden_size = config_.hidden_size;
  ASSIGN_OR_RETURN(mlp.gate, Matrix(prefix + "gate_proj.weight", intermediate_size, hidden_size));
  ASSIGN_OR_RETURN(mlp.up, Matrix(prefix + "up_proj.weight", intermediate_size, hidden_size));
  ASSIGN_OR_RETURN(mlp.down, Matrix(prefix + "down_proj.weight", hidden_size, intermediate_size));
  return mlp;
}

absl::StatusOr<std::vector<ExpertTensors>> WeightReader::RoutedExperts(const std::string& prefix) {
  const int32_t num_experts = config_.gate.num_experts;
  const int64_t intermediate_size = config_.moe_intermediate_size;
  std::vector<ExpertTensors> experts(num_experts);
  if (!Has(prefix + "gate_up_proj")) {
    for (int32_t i = 0; i < num_experts; ++i) {
      ASSIGN_OR_RETURN(experts[i], Mlp(absl::StrCat(prefix, i, "."), intermediate_size));
    }
    return experts;
  }
  // The fused form that newer transformers save: gate rows first, then up rows.
  ASSIGN_OR_RETURN(
      const std::vector<WeightTensor> gate_up,
      FusedMatrices(prefix + "gate_up_proj", 2 * intermediate_size, config_.hidden_size));
  ASSIGN_OR_RETURN(const std::vector<WeightTensor> down,
                   FusedMatrices(prefix + "down_proj", config_.hidden_size, intermediate_size));
  if (gate_up[0].scales != nullptr && intermediate_size % config_.weight_block_rows != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", prefix, "gate_up_proj: expected moe_intermediate_size to be a multiple of the ",
        config_.weight_block_rows, " rows of a scale block, found ", intermediate_size));
  }
  for (int32_t i = 0; i < num_experts; ++i) {
    experts[i].gate = Rows(gate_up[i], 0, intermediate_size);
    experts[i].up = Rows(gate_up[i], intermediate_size, intermediate_size);
    experts[i].down = down[i];
  }
  return experts;
}

absl::StatusOr<std::vector<WeightTensor>> WeightReader::FusedMatrices(const std::string& name,
                                                                      int64_t rows, int64_t cols) {
  const int64_t num_experts = config_.gate.num_experts;
  ASSIGN_OR_RETURN(const TensorView* tensor, Take(name, {num_experts, rows, cols}, true));
  const TensorView* scales = nullptr;
  const int64_t scale_rows = CeilDiv(rows, config_.weight_block_rows);
  const int64_t scale_cols = CeilDiv(cols, config_.weight_block_cols);
  if (tensor->dtype == DType::kFloat8E4m3) {
    ASSIGN_OR_RETURN(scales, Take(name + "_scale_inv", {num_experts, scale_rows, scale_cols},
                                  /*fp8_allowed=*/false, /*scales=*/true));
    if (scales->dtype != DType::kFloat32) return Mismatch(*scales, "dtype F32", scales->dtype_name);
  }
  std::vector<WeightTensor> matrices(num_experts);
  const int64_t matrix_bytes = static_cast<int64_t>(tensor->data.size()) / num_experts;
  for (int64_t i = 0; i < num_experts; ++i) {
    WeightTensor& matrix = matrices[i];
    matrix.data = tensor->data.data() + i * matrix_bytes;
    matrix.dtype = tensor->dtype;
    matrix.rows = rows;
    matrix.cols = cols;
    if (scales == nullptr) continue;
    matrix.scales = scales->data.data() + i * scale_rows * scale_cols * sizeof(float);
    matrix.scale_block_rows = config_.weight_block_rows;
    matrix.scale_block_cols = config_.weight_block_cols;
  }
  return matrices;
}

}  // namespace model
