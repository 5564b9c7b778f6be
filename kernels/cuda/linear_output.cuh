// Where a Linear's results go: output segments, and the residual that is added.  Passed to kernels
// by value.

#ifndef KERNELS_CUDA_LINEAR_OUTPUT_CUH_
#define KERNELS_CUDA_LINEAR_OUTPUT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/linear.h"

namespace kernels::cuda {

inline constexpr int32_t kMaxSegments = 8;

struct LinearOutput {
  OutputSegment segments[kMaxSegments] = {};
  int32_t num_segments = 0;
  const float* residual = nullptr;  // of kResidual, laid out as the one segment; null: none
  bool in_pairs = false;            // columns 2 i and 2 i + 1 lie side by side, aligned as a pair
};

inline LinearOutput MakeLinearOutput(const LinearParams& params) {
  LinearOutput output{.num_segments = static_cast<int32_t>(params.outputs.size()),
                      .in_pairs = true};
  if (params.epilogue == LinearEpilogue::kResidual) output.residual = params.epilogue_residual;
  for (int32_t s = 0; s < output.num_segments; ++s) {
    const OutputSegment& segment = output.segments[s] = params.outputs[s];
    const auto address =
        reinterpret_cast<uintptr_t>(segment.data) | reinterpret_cast<uintptr_t>(output.residual);
    output.in_pairs = output.in_pairs && segment.columns % 2 == 0 && segment.row_stride % 2 == 0 &&
                      address % 8 == 0;
  }
  return output;
}

// Finds the segment of `column`, which becomes a column of it; null beyond the last.
__device__ inline const OutputSegment* FindSegment(const LinearOutput& output, int64_t& column) {
  for (int32_t s = 0; s < output.num_segments; ++s) {
    if (column < output.segments[s].columns) return &output.segments[s];
    column -= output.segments[s].columns;
  }
  return nullptr;
}

// `value` goes to (row, column) as it is.
__device__ inline void StoreValue(const LinearOutput& output, int64_t row, int64_t column,
                                  float value) {
  const OutputSegment* segment = FindSegment(output, column);
  if (segment == nullptr) return;
  const int64_t at = row * segment->row_stride + column;
  if (segment->dtype == DType::kBfloat16) {
    static_cast<uint16_t*>(segment->data)[at] = Bfloat16FromFloat(value);
  } else {
    static_cast<float*>(segment->data)[at] = value;
  }
}

// What the residual adds to (row, column); zero if there is none.
__device__ inline float LoadResidual(const LinearOutput& output, int64_t row, int64_t column) {
  const OutputSegment& segment = output.segments[0];
  return output.residual != nullptr && column < segment.columns
             ? output.residual[row * segment.row_stride + column]
             : 0.0f;
}

__device__ inline void Store(const LinearOutput& output, int64_t row, int64_t column, float value) {
  StoreValue(output, row, column, value + LoadResidual(output, row, column));
}

// The same for two neighbouring columns, the first of them even.
__device__ inline void StorePair(const LinearOutput& output, int64_t row, int64_t column,
                                 float2 values) {
  if (!output.in_pairs) {
    StoreValue(output, row, column, values.x);
    StoreValue(output, row, column + 1, values.y);
    return;
  }
  const OutputSegment* segment = FindSegment(output, column);
  if (segment == nullptr) return;
  const int64_t at = row * segment->row_stride + column;
  if (segment->dtype == DType::kBfloat16) {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(segment->data) + at) =
        PackBfloat16(values.x, values.y);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(segment->data) + at) = values;
  }
}
__device__ inline float2 LoadResidualPair(const LinearOutput& output, int64_t row, int64_t column) {
  const OutputSegment& segment = output.segments[0];
  if (output.residual == nullptr || column >= segment.columns) return make_float2(0, 0);
  if (!output.in_pairs) {
    return make_float2(LoadResidual(output, row, column), LoadResidual(output, row, column + 1));
  }
  return *reinterpret_cast<const float2*>(output.residual + row * segment.row_stride + column);
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LINEAR_OUTPUT_CUH_
