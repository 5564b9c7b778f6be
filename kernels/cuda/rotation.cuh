// The rotation by position, pair by pair.

#ifndef KERNELS_CUDA_ROTATION_CUH_
#define KERNELS_CUDA_ROTATION_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/tensor.h"

namespace kernels::cuda {

__device__ inline bool HasPosition(const RopeTable& rope, int32_t position) {
  return rope.rope_dim == 0 || (position >= 0 && position < rope.max_positions);
}

// A pair of values after its rotation, on its way back to where it was.
struct RotatedPair {
  float* first;
  float* second;
  float values[2];

  __device__ void Store() const {
    *first = values[0];
    *second = values[1];
  }
};

// Pair i of the rope_dim values at x, rotated, or back where direction is -1.
// REQUIRES: the position is in the table, i < rope_dim / 2.
__device__ inline RotatedPair Rotated(const RopeTable& rope, int32_t position, float direction,
                                      int32_t i, float* x) {
  const int32_t half = rope.rope_dim / 2;
  const bool interleaved = rope.layout == RopeLayout::kInterleaved;
  float* first = x + (interleaved ? 2 * i : i);
  float* second = first + (interleaved ? 1 : half);
  const int64_t at = int64_t{position} * half + i;
  const float cos = rope.cos[at], sin = direction * rope.sin[at];
  const float a = *first, b = *second;
  return {first, second, {a * cos - b * sin, b * cos + a * sin}};
}
// The same where it lies.
__device__ inline void RotatePair(const RopeTable& rope, int32_t position, float direction,
                                  int32_t i, float* x) {
  Rotated(rope, position, direction, i, x).Store();
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_ROTATION_CUH_
