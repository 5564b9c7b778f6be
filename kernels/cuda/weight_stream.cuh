// Weights that stream from memory straight into tensor-core fragments: 16 rows of a bf16 matrix (K
// contiguous) against a few activation rows, the inner dimension cut over the block's warps.
//
// A step is 32 values of k.  A lane loads 16 contiguous bytes of row g and of row g + 8; of these
// the first 4 values feed one mma and the last 4 another, and the activations are read with the
// same permutation of k.  No shared memory, no transposition on the way.
//
// A result is a sum over the warps' ranges in warp order, so it does not depend on how many
// activation rows there are.

#ifndef KERNELS_CUDA_WEIGHT_STREAM_CUH_
#define KERNELS_CUDA_WEIGHT_STREAM_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"

namespace kernels::cuda {

inline constexpr int32_t kStreamThreads = 256;
inline constexpr int32_t kStreamWarps = kStreamThreads / kWarpSize;
inline constexpr int32_t kStreamRows = 16;    // weight rows of a block
inline constexpr int32_t kStepDepth = 32;     // k of a step
inline constexpr int32_t kStepsInFlight = 8;  // loads of so many steps are under way
inline constexpr int32_t kTokensPerTile = 8;  // activation rows of one mma

// What a lane holds of 16 weight rows for one step.
struct WeightFragment {
  Words4 top;     // row g
  Words4 bottom;  // row g + 8
};

// What a lane holds of 8 activation rows for one step: 8 bf16 values of row g from k 8t on.
using ActivationFragment = Words4;

__device__ inline void MultiplyStep(float (&sums)[4], const WeightFragment& w,
                                    const ActivationFragment& x) {
  Mma(sums, w.top.x, w.bottom.x, w.top.y, w.bottom.y, x.x, x.y);
  Mma(sums, w.top.z, w.bottom.z, w.top.w, w.bottom.w, x.z, x.w);
}

// 8 floats, rounded.
__device__ inline ActivationFragment RoundFragment(const float4& a, const float4& b) {
  return {PackBfloat16(a.x, a.y), PackBfloat16(a.z, a.w), PackBfloat16(b.x, b.y),
          PackBfloat16(b.z, b.w)};
}

struct StepRange {
  int32_t begin;
  int32_t end;
};
// The steps of warp `warp` of `num_steps`.
__device__ inline StepRange StepsOfWarp(int32_t num_steps, int32_t warp) {
  return {num_steps * warp / kStreamWarps, num_steps * (warp + 1) / kStreamWarps};
}

// This lane's part of 16 rows: `top` and `bottom` are its rows, from k 8t on.
__device__ inline WeightFragment LoadWeights(const uint16_t* top, const uint16_t* bottom,
                                             int32_t step) {
  return {LoadStreaming(top + int64_t{step} * kStepDepth),
          LoadStreaming(bottom + int64_t{step} * kStepDepth)};
}

// Adds a warp's steps to sums: 16 weight rows against kTiles tiles of activations.
// load_x(tile, step) gives a fragment; before_use() runs once, when the first loads of weights are
// under way.
template <int32_t kTiles, typename LoadX, typename BeforeUse>
__device__ void StreamRows(float (&sums)[kTiles][4], const uint16_t* top, const uint16_t* bottom,
                           StepRange steps, LoadX load_x, BeforeUse before_use) {
  WeightFragment ring[kStepsInFlight];
#pragma unroll
  for (int32_t i = 0; i < kStepsInFlight; ++i) {
    if (steps.begin + i < steps.end) ring[i] = LoadWeights(top, bottom, steps.begin + i);
  }
  before_use();
  for (int32_t base = steps.begin; base < steps.end; base += kStepsInFlight) {
#pragma unroll
    for (int32_t i = 0; i < kStepsInFlight; ++i) {
      const int32_t step = base + i;
      if (step < steps.end) {
#pragma unroll
        for (int32_t tile = 0; tile < kTiles; ++tile) {
          MultiplyStep(sums[tile], ring[i], load_x(tile, step));
        }
        if (step + kStepsInFlight < steps.end) {
          ring[i] = LoadWeights(top, bottom, step + kStepsInFlight);
        }
      }
    }
  }
}

// Sums of the block's warps: thread (warp w < kTiles, lane) returns those of tile w that lane
// holds, added in warp order.  `reduce` is free to reuse after a barrier.
template <int32_t kTiles>
struct WarpSums {
  float4 parts[kStreamWarps][kTiles][kWarpSize];
};
template <int32_t kTiles>
__device__ float4 ReduceOverWarps(const float (&sums)[kTiles][4], WarpSums<kTiles>& reduce) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int32_t tile = 0; tile < kTiles; ++tile) {
    reduce.parts[warp][tile][lane] =
        make_float4(sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]);
  }
  __syncthreads();
  float4 total = make_float4(0, 0, 0, 0);
  if (warp >= kTiles) return total;
  for (int32_t w = 0; w < kStreamWarps; ++w) {
    const float4 part = reduce.parts[w][warp][lane];
    total.x += part.x;
    total.y += part.y;
    total.z += part.z;
    total.w += part.w;
  }
  return total;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_WEIGHT_STREAM_CUH_
