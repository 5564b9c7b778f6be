// From the scores of a step of keys to the weights of its values, in a warpgroup's registers: of
// thread (w, g, t) as warpgroup_product.cuh says, rows 16 w + g and 16 w + g + 8.

#ifndef KERNELS_CUDA_FLASH_SOFTMAX_CUH_
#define KERNELS_CUDA_FLASH_SOFTMAX_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/flash_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

inline constexpr int32_t kKeyProducts = kFlashKeys / kProductDepth;

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A thread's two rows, of which it has every fourth pair of columns.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY};  // of the scores, not scaled
  float base[2] = {0, 0};                 // scaled, in units of log 2; 0 while max is -inf
  float sum[2] = {0, 0};                  // of this thread's columns
};

// The rows' largest scores rise to those of a step.  `shrink`: what earlier weights are worth now.
__device__ inline void RaiseMax(const float (&scores)[kProductSums], float scale_log2,
                                RowState& state, float (&shrink)[2]) {
  float largest[2][2] = {{state.max[0], -INFINITY}, {state.max[1], -INFINITY}};
#pragma unroll
  for (int32_t j = 0; j < kProductSums; ++j) {
    float& of_row = largest[j / 2 % 2][j % 2];
    of_row = fmaxf(of_row, scores[j]);
  }
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    float of_row = fmaxf(largest[i][0], largest[i][1]);
    of_row = fmaxf(of_row, __shfl_xor_sync(kFullWarp, of_row, 1));
    of_row = fmaxf(of_row, __shfl_xor_sync(kFullWarp, of_row, 2));
    state.base[i] = of_row == -INFINITY ? 0.0f : of_row * scale_log2;
    shrink[i] = Exp2(fmaf(state.max[i], scale_log2, -state.base[i]));
    state.max[i] = of_row;
  }
}

// Scores -> weights relative to the largest, rounded, as the left operand of products; what came
// before shrinks.
__device__ inline void Weigh(const float (&scores)[kProductSums], float scale_log2,
                             const float (&shrink)[2], RowState& state,
                             uint32_t (&weights)[kKeyProducts][4], float (&out)[kProductSums]) {
  float sums[2][2] = {{state.sum[0] * shrink[0], 0}, {state.sum[1] * shrink[1], 0}};
#pragma unroll
  for (int32_t j = 0; j < kProductSums / 2; ++j) {  // pairs of columns
    const int32_t i = j % 2;
    const float low = Exp2(fmaf(scores[2 * j], scale_log2, -state.base[i]));
    const float high = Exp2(fmaf(scores[2 * j + 1], scale_log2, -state.base[i]));
    sums[i][0] += low;
    sums[i][1] += high;
    weights[j / 4][j % 4] = PackBfloat16(low, high);
    out[2 * j] *= shrink[i];
    out[2 * j + 1] *= shrink[i];
  }
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) state.sum[i] = sums[i][0] + sums[i][1];
}

// Keys that a row does not see get a score of -inf.  `offset`: of the step's first key, row 0 of
// the tile sees keys j <= offset; `left`: the sequence has so many from there on.
__device__ inline void Mask(float (&scores)[kProductSums], int32_t offset, int32_t left) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  // What the warp's first row sees is seen by all of its rows.
  if (min(offset + 16 * warp + 1, left) >= kFlashKeys) return;
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t count = min(offset + 16 * warp + lane / 4 + 8 * i + 1, left) - 2 * (lane % 4);
#pragma unroll
    for (int32_t j = 0; j < kFlashKeys / 8; ++j) {
#pragma unroll
      for (int32_t c = 0; c < 2; ++c) {
        if (8 * j + c >= count) scores[4 * j + 2 * i + c] = -INFINITY;
      }
    }
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLASH_SOFTMAX_CUH_
