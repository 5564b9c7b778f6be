#include "kernels/cuda/weight_format.h"

namespace kernels::cuda {
namespace {

// That of all, if they have the same.
std::optional<WeightFormat> CommonFormat(absl::Span<const StoredMatrix> matrices) {
  const std::optional<WeightFormat> format = StreamFormatOf(matrices[0]);
  for (const StoredMatrix& matrix : matrices) {
    if (StreamFormatOf(matrix) != format) return std::nullopt;
  }
  return format;
}

}  // namespace

std::optional<WeightFormat> StreamFormatOf(const StoredMatrix& matrix) {
  const auto scaled = [&](DType scale_dtype, int64_t rows, int64_t cols) {
    return matrix.scales != nullptr && matrix.scale_dtype == scale_dtype &&
           matrix.scale_block_rows == rows && matrix.scale_block_cols == cols;
  };
  if (matrix.dtype == DType::kBfloat16 && matrix.scales == nullptr) return WeightFormat::kBfloat16;
  if (matrix.dtype == DType::kFloat8E4m3 && scaled(DType::kFloat32, 128, 128)) {
    return WeightFormat::kFloat8;
  }
  if (matrix.dtype == DType::kFloat4E2m1 && scaled(DType::kFloat8E8m0, 1, 32)) {
    return WeightFormat::kFloat4;
  }
  return std::nullopt;
}

std::optional<ExpertFormats> ExpertFormatsOf(absl::Span<const StoredMatrix> matrices,
                                             int64_t num_routed) {
  const auto routed_matrices = static_cast<size_t>(3 * num_routed);
  const std::optional<WeightFormat> routed = CommonFormat(matrices.first(routed_matrices));
  if (!routed.has_value()) return std::nullopt;
  const bool has_shared = matrices.size() > routed_matrices;
  for (const ExpertFormats formats :
       {ExpertFormats::kBfloat16, ExpertFormats::kFloat8, ExpertFormats::kFloat4}) {
    if (routed == RoutedFormat(formats) &&
        (!has_shared || CommonFormat(matrices.subspan(routed_matrices)) == SharedFormat(formats))) {
      return formats;
    }
  }
  return std::nullopt;
}

}  // namespace kernels::cuda
