// The stored formats that stream from memory into tensor-core fragments (weight_stream.cuh), and a
// matrix in one of them.

#ifndef KERNELS_CUDA_WEIGHT_FORMAT_H_
#define KERNELS_CUDA_WEIGHT_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "kernels/cuda/stored_matrix.h"

namespace kernels::cuda {

enum class WeightFormat : uint8_t {
  kBfloat16,
  kFloat8,  // e4m3, a float32 scale for every 128 x 128
  kFloat4,  // e2m1, an e8m0 scale for every 32 of a row
};

// How a layer's routed and shared experts are stored: the pairs that there are kernels for.
enum class ExpertFormats : uint8_t {
  kBfloat16,
  kFloat8,
  kFloat4,  // the shared ones are fp8
};
constexpr WeightFormat RoutedFormat(ExpertFormats formats) {
  return formats == ExpertFormats::kBfloat16 ? WeightFormat::kBfloat16
         : formats == ExpertFormats::kFloat8 ? WeightFormat::kFloat8
                                             : WeightFormat::kFloat4;
}
constexpr WeightFormat SharedFormat(ExpertFormats formats) {
  return formats == ExpertFormats::kBfloat16 ? WeightFormat::kBfloat16 : WeightFormat::kFloat8;
}

// Rows of `depth` values without gaps.
struct StreamedMatrix {
  const std::byte* data;    // 16-byte aligned
  const std::byte* scales;  // [ceil(rows / 128), ceil(depth / 128)] or [rows, depth / 32]
};

// A step is 64 bytes of a row; this much of the depth.
constexpr int32_t StepDepthOf(WeightFormat format) {
  return format == WeightFormat::kBfloat16 ? 32 : format == WeightFormat::kFloat8 ? 64 : 128;
}

// Where value k of an activation row stands that a step is multiplied with: with codes, of each
// four the second is the third and the third the second, as widening gets them (SpreadFloat8Apart).
constexpr bool SwapsActivations(WeightFormat format) { return format != WeightFormat::kBfloat16; }
constexpr int64_t ActivationPlace(WeightFormat format, int64_t k) {
  return SwapsActivations(format) ? (k / 4 * 4) + k % 2 * 2 + k / 2 % 2 : k;
}

// None: the matrix is stored otherwise.
std::optional<WeightFormat> StreamFormatOf(const StoredMatrix& matrix);
// The formats of gate, up and down of every routed, then of every shared expert.
std::optional<ExpertFormats> ExpertFormatsOf(absl::Span<const StoredMatrix> matrices,
                                             int64_t num_routed);
inline StreamedMatrix AsStreamed(const StoredMatrix& matrix) {
  return {static_cast<const std::byte*>(matrix.data), static_cast<const std::byte*>(matrix.scales)};
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_WEIGHT_FORMAT_H_
