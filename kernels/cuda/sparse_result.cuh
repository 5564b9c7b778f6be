// What becomes of attention's values: sinks, the way back of the rotation, and where they go.

#ifndef KERNELS_CUDA_SPARSE_RESULT_CUH_
#define KERNELS_CUDA_SPARSE_RESULT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/fault.h"
#include "kernels/cuda/sparse_block.cuh"

namespace kernels::cuda {

// Where this block's values go, from its first head on.
struct SparseTarget {
  float* values;
  int64_t head_stride;
  const float* sink;  // of these heads; null: none
  float* lse;         // of these heads, lse_stride apart; null: nowhere
  int64_t lse_stride;
  bool rotate_back;
};

// What a sink with this logit leaves of the values.
__device__ inline float SinkFactor(float sink, float lse) {
  return lse == -INFINITY ? 1.0f : 1.0f / (1.0f + expf(sink - lse));
}

// The pair i of the last values, rotated back.
__device__ inline float2 RotateBack(const RopeTable& rope, int32_t position, int32_t i,
                                    float2 pair) {
  const int64_t at = int64_t{position} * (kSparseRope / 2) + i;
  const float cos = rope.cos[at], sin = -rope.sin[at];
  return make_float2(pair.x * cos - pair.y * sin, pair.y * cos + pair.x * sin);
}

// Whether the row's values are to be rotated back; a position outside the table is noted.
__device__ inline bool RotatesBack(const SparseArgs& args, int32_t row, bool notes) {
  const RopeTable& rope = args.params.inverse_rope;
  if (rope.rope_dim == 0) return false;
  const int32_t position = args.params.positions[row];
  if (position < rope.max_positions) return position >= 0;
  if (notes) NoteFault(args.fault, FaultKind::kPosition, row, position);
  return false;
}

// Of heads from `first_head` on: the row's, or this block's part of it if another kernel combines
// them.
__device__ inline SparseTarget TargetOf(const SparseArgs& args, int32_t row, int32_t first_head) {
  const SparseDecodeParams& params = args.params;
  const auto num_parts = static_cast<int32_t>(gridDim.y);
  if (num_parts > 1 && !args.folds) {
    const int64_t vector = (int64_t{row} * num_parts + blockIdx.y) * params.num_heads + first_head;
    return {args.parts.values + vector * kSparseValueDim,
            kSparseValueDim,
            nullptr,
            args.parts.lse + vector,
            1,
            false};
  }
  return {args.values + row * args.row_stride + first_head * args.head_stride,
          args.head_stride,
          params.sink == nullptr ? nullptr : params.sink + first_head,
          params.lse == nullptr ? nullptr : params.lse + first_head * params.lse_stride + row,
          params.lse_stride,
          RotatesBack(args, row, first_head == 0 && threadIdx.x == 0)};
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_RESULT_CUH_
