// A new row of a latent's cache: norm, rotation and entry, the work of one block of whole warps.

#ifndef KERNELS_CUDA_NEW_ENTRY_CUH_
#define KERNELS_CUDA_NEW_ENTRY_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/kv_entry.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rotation.cuh"
#include "kernels/store_kv.h"

namespace kernels::cuda {

// values [kv_lora_rank + rope_dim] <- the normed row, not yet rotated.  `scratch` as BlockReduce's.
__device__ inline void NormLatent(const StoreKvParams& params, int64_t row, float* values,
                                  double* scratch) {
  const int32_t threads = static_cast<int32_t>(blockDim.x);
  const int32_t rank = params.kv_lora_rank;
  const int32_t size = rank + params.rope.rope_dim;
  const int32_t normed = params.norm_rope ? size : rank;
  const float* kv_a = params.kv_a + row * params.kv_a_row_stride;
  double sum = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < normed; i += threads) {
    sum += static_cast<double>(kv_a[i]) * kv_a[i];
  }
  sum = BlockSum(sum, scratch);
  const float inverse = static_cast<float>(
      1.0 / sqrt(sum / static_cast<double>(normed) + static_cast<double>(params.norm_eps)));
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < size; i += threads) {
    values[i] = i < normed ? kv_a[i] * inverse * params.norm_weight[i] : kv_a[i];
  }
}

// The row's entry goes to `slot`.  `values`: shared, [kv_lora_rank + rope_dim].  REQUIRES: slot >=
// 0; the position is in the rope table.
__device__ inline void StoreNewEntry(const StoreKvParams& params, int64_t row, int64_t slot,
                                     int32_t position, float* values, double* scratch) {
  NormLatent(params, row, values, scratch);
  __syncthreads();
  const RopeTable& rope = params.rope;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < rope.rope_dim / 2;
       i += static_cast<int32_t>(blockDim.x)) {
    RotatePair(rope, position, 1.0f, i, values + params.kv_lora_rank);
  }
  __syncthreads();
  StoreEntry(params.pages, slot, values, params.kv_lora_rank, rope.rope_dim);
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_NEW_ENTRY_CUH_
