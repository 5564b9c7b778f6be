#include "model/weight_reader.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "model/safetensors_header.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace model {
namespace {

using kernels::DType;
using kernels::ExpertTensors;
using kernels::WeightTensor;

constexpr int64_t kFp4ScaleColumns = 32;

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

// MTP layers: "mtp.*" of V4, layers past the last one elsewhere (models.md 2.3, 2.4).
bool IsDraftTensor(std::string_view name, const ModelConfig& config) {
  if (config.family == ModelFamily::kDeepseekV4) return name.substr(0, 4) == "mtp.";
  for (int32_t i = 0; i < config.num_nextn_predict_layers; ++i) {
    const std::string prefix = absl::StrCat("model.layers.", config.num_hidden_layers + i, ".");
    if (name.substr(0, prefix.size()) == prefix) return true;
  }
  return false;
}

}  // namespace

WeightTensor MatrixRows(const WeightTensor& matrix, int64_t begin, int64_t count) {
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

absl::StatusOr<const TensorView*> WeightReader::Get(const std::string& name,
                                                    const std::vector<int64_t>& shape) {
  absl::StatusOr<const TensorView*> found = checkpoint_.Get(name, shape);
  if (!found.ok()) {
    return absl::NotFoundError(absl::StrCat(std::string(found.status().message()),
                                            ", expected shape ", ShapeString(shape)));
  }
  const TensorView* tensor = *found;
  if (tensor->shape != shape) {
    return Mismatch(*tensor, absl::StrCat("shape ", ShapeString(shape)),
                    ShapeString(tensor->shape));
  }
  return tensor;
}

absl::StatusOr<const TensorView*> WeightReader::Take(const std::string& name,
                                                     const std::vector<int64_t>& shape,
                                                     bool fp8_allowed, bool scales) {
  ASSIGN_OR_RETURN(const TensorView* tensor, Get(name, shape));
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
  FERRY_CHECK(used_.insert(&tensor).second) << tensor.name << " is claimed twice";
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
                                                  int64_t cols, bool fp4_allowed) {
  WeightTensor matrix{.rows = rows, .cols = cols};
  const TensorView* found = checkpoint_.FindMatrix(name, rows, cols);
  if (fp4_allowed && found != nullptr && found->dtype == DType::kFloat4E2m1) {
    ASSIGN_OR_RETURN(const TensorView* tensor, Get(name, {rows, CeilDiv(cols, 2)}));
    if (cols % kFp4ScaleColumns != 0) {
      return Mismatch(*tensor, absl::StrCat("a multiple of ", kFp4ScaleColumns, " fp4 columns"),
                      absl::StrCat(cols));
    }
    Use(*tensor, /*scales=*/false);
    matrix.data = tensor->data.data();
    matrix.dtype = tensor->dtype;
    matrix.scale_block_rows = 1;
    matrix.scale_block_cols = kFp4ScaleColumns;
  } else {
    ASSIGN_OR_RETURN(const TensorView* tensor, Take(name, {rows, cols}, /*fp8_allowed=*/true));
    matrix.data = tensor->data.data();
    matrix.dtype = tensor->dtype;
    if (tensor->dtype != DType::kFloat8E4m3) return matrix;
    matrix.scale_block_rows = config_.weight_block_rows;
    matrix.scale_block_cols = config_.weight_block_cols;
  }
  RETURN_IF_ERROR(TakeScales(name, matrix));
  return matrix;
}

absl::Status WeightReader::TakeScales(const std::string& name, WeightTensor& matrix) {
  std::string scale_name = name + "_scale_inv";
  constexpr absl::string_view kWeight = ".weight";
  if (!Has(scale_name) && absl::EndsWith(name, kWeight)) {
    const std::string other = name.substr(0, name.size() - kWeight.size()) + ".scale";
    if (Has(other)) scale_name = other;
  }
  const std::vector<int64_t> scale_shape = {CeilDiv(matrix.rows, matrix.scale_block_rows),
                                            CeilDiv(matrix.cols, matrix.scale_block_cols)};
  ASSIGN_OR_RETURN(const TensorView* scales, checkpoint_.Get(scale_name));
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
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> WeightReader::Vector(const std::string& name, int64_t size) {
  return Vector(name, std::vector<int64_t>{size});
}

absl::StatusOr<std::vector<float>> WeightReader::Vector(const std::string& name,
                                                        const std::vector<int64_t>& shape) {
  ASSIGN_OR_RETURN(const TensorView* tensor, Take(name, shape, /*fp8_allowed=*/false));
  const auto size =
      static_cast<int64_t>(tensor->data.size()) * 8 / kernels::DTypeBits(tensor->dtype);
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

absl::StatusOr<std::vector<int32_t>> WeightReader::IndexTable(const std::string& name, int64_t rows,
                                                              int64_t cols, int64_t bound) {
  ASSIGN_OR_RETURN(const TensorView* tensor, Get(name, {rows, cols}));
  const bool wide = tensor->dtype == DType::kInt64;
  if (!wide && tensor->dtype != DType::kInt32) {
    return Mismatch(*tensor, "dtype I64 or I32", tensor->dtype_name);
  }
  Use(*tensor, /*scales=*/false);
  std::vector<int32_t> values(rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t value = wide ? reinterpret_cast<const int64_t*>(tensor->data.data())[i]
                               : reinterpret_cast<const int32_t*>(tensor->data.data())[i];
    const auto row = values.begin() + i / cols * cols;
    if (value < 0 || value >= bound || std::count(row, values.begin() + i, value) > 0) {
      return Mismatch(*tensor, absl::StrCat("different values below ", bound, " in a row"),
                      absl::StrCat(value, " in row ", i / cols));
    }
    values[i] = static_cast<int32_t>(value);
  }
  return values;
}

int64_t WeightReader::num_draft() const {
  int64_t count = 0;
  for (const auto& [name, tensor] : checkpoint_.tensors()) {
    if (!used_.contains(&tensor) && IsDraftTensor(name, config_)) ++count;
  }
  return count;
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
  return FusedExperts(prefix);
}

// What newer transformers save: gate rows first, then up rows.
absl::StatusOr<std::vector<ExpertTensors>> WeightReader::FusedExperts(const std::string& prefix) {
  const int64_t intermediate_size = config_.moe_intermediate_size;
  std::vector<ExpertTensors> experts(config_.gate.num_experts);
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
  for (size_t i = 0; i < experts.size(); ++i) {
    experts[i].gate = MatrixRows(gate_up[i], 0, intermediate_size);
    experts[i].up = MatrixRows(gate_up[i], intermediate_size, intermediate_size);
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
