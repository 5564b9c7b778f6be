// The general attention kernels' common part: a block carries kTileVectors query vectors through
// tiles of kTileKeys keys, in float32, for any dimensions.
//
// A vector's result depends on its keys and where tiles begin, not on the other vectors of the
// block: what a vector does not see is neither added nor multiplied by zero for it.

#ifndef KERNELS_CUDA_ATTENTION_TILE_CUH_
#define KERNELS_CUDA_ATTENTION_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {

inline constexpr int32_t kTileVectors = 16;
inline constexpr int32_t kTileKeys = 32;
inline constexpr int32_t kAttentionThreads = 128;
inline constexpr int32_t kDimChunk = 64;  // dimensions staged at a time
inline constexpr int32_t kThreadsPerVector = kAttentionThreads / kTileVectors;

struct AttentionShape {
  int32_t key_dim = 0;
  int32_t value_dim = 0;
  float softmax_scale = 0;
};

// Shared memory of one block; `acc` [kTileVectors, value_dim] follows it.
struct AttentionShared {
  float q[kTileVectors][kDimChunk + 1];
  float k[kTileKeys][kDimChunk + 1];
  float scores[kTileVectors][kTileKeys + 1];
  float max[kTileVectors];
  float sum[kTileVectors];
  float correction[kTileVectors];
  int64_t num_seen[kTileVectors];     // keys [0, num_seen) of the sequence are seen
  int32_t num_visible[kTileVectors];  // of the tile at work
};

inline size_t AttentionSharedBytes(int32_t value_dim) {
  return sizeof(AttentionShared) + sizeof(float) * kTileVectors * static_cast<size_t>(value_dim);
}

__device__ inline float* Accumulators(AttentionShared& shared) {
  return reinterpret_cast<float*>(&shared + 1);
}

// exp(a - b), 1 where both are the same (also -inf).
__device__ inline float ExpDifference(float a, float b) { return a == b ? 1.0f : expf(a - b); }

// Keys [begin, end) in tiles from `begin` on; num_seen of each vector is set (by any thread, before
// a barrier that the caller need not add).  load_query(vector, dim), load_key(key, dim) and
// load_value(key, dim) are called within bounds only.
// Leaves acc (not yet divided), max and sum in shared memory, ready to read.
template <typename LoadQuery, typename LoadKey, typename LoadValue>
__device__ void AttendKeys(AttentionShared& shared, const AttentionShape& shape,
                           int32_t num_vectors, int64_t begin, int64_t end, LoadQuery load_query,
                           LoadKey load_key, LoadValue load_value) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t vector = thread / kThreadsPerVector;
  const int32_t lane = thread % kThreadsPerVector;
  float* acc = Accumulators(shared) + int64_t{vector} * shape.value_dim;
  for (int32_t d = lane; d < shape.value_dim; d += kThreadsPerVector) acc[d] = 0;
  if (thread < kTileVectors) {
    shared.max[thread] = -INFINITY;
    shared.sum[thread] = 0;
  }
  __syncthreads();
  for (int64_t tile = begin; tile < end; tile += kTileKeys) {
    const int32_t num_keys = end - tile < kTileKeys ? static_cast<int32_t>(end - tile) : kTileKeys;
    if (thread < kTileVectors) {
      const int64_t seen = thread < num_vectors ? shared.num_seen[thread] - tile : 0;
      shared.num_visible[thread] = seen <= 0         ? 0
                                   : seen < num_keys ? static_cast<int32_t>(seen)
                                                     : num_keys;
    }
    // Scores: this thread's vector against every kThreadsPerVector-th key.
    constexpr int32_t kScores = kTileKeys / kThreadsPerVector;
    float scores[kScores] = {};
    for (int32_t dim = 0; dim < shape.key_dim; dim += kDimChunk) {
      const int32_t count = min(kDimChunk, shape.key_dim - dim);
      for (int32_t e = thread; e < kTileVectors * kDimChunk; e += kAttentionThreads) {
        const int32_t i = e / kDimChunk, d = e % kDimChunk;
        shared.q[i][d] = i < num_vectors && d < count ? load_query(i, dim + d) : 0.0f;
      }
      for (int32_t e = thread; e < kTileKeys * kDimChunk; e += kAttentionThreads) {
        const int32_t j = e / kDimChunk, d = e % kDimChunk;
        shared.k[j][d] = j < num_keys && d < count ? load_key(tile + j, dim + d) : 0.0f;
      }
      __syncthreads();
      for (int32_t d = 0; d < count; ++d) {
        for (int32_t s = 0; s < kScores; ++s) {
          scores[s] =
              fmaf(shared.q[vector][d], shared.k[lane + kThreadsPerVector * s][d], scores[s]);
        }
      }
      __syncthreads();
    }
    for (int32_t s = 0; s < kScores; ++s) {
      shared.scores[vector][lane + kThreadsPerVector * s] = scores[s] * shape.softmax_scale;
    }
    __syncthreads();
    if (thread < kTileVectors && shared.num_visible[thread] > 0) {
      float* row = shared.scores[thread];
      const int32_t visible = shared.num_visible[thread];
      const float old_max = shared.max[thread];
      float new_max = old_max;
      for (int32_t j = 0; j < visible; ++j) new_max = row[j] > new_max ? row[j] : new_max;
      float tile_sum = 0;
      for (int32_t j = 0; j < visible; ++j) {
        row[j] = expf(row[j] - new_max);
        tile_sum += row[j];
      }
      const float correction = ExpDifference(old_max, new_max);
      shared.max[thread] = new_max;
      shared.sum[thread] = shared.sum[thread] * correction + tile_sum;
      shared.correction[thread] = correction;
    }
    __syncthreads();
    // Values, kDimChunk dimensions at a time through the room of the keys.
    const int32_t visible = shared.num_visible[vector];
    for (int32_t dim = 0; dim < shape.value_dim; dim += kDimChunk) {
      const int32_t count = min(kDimChunk, shape.value_dim - dim);
      for (int32_t e = thread; e < num_keys * kDimChunk; e += kAttentionThreads) {
        const int32_t j = e / kDimChunk, d = e % kDimChunk;
        if (d < count) shared.k[j][d] = load_value(tile + j, dim + d);
      }
      __syncthreads();
      for (int32_t d = lane; visible > 0 && d < count; d += kThreadsPerVector) {
        float sum = acc[dim + d] * shared.correction[vector];
        for (int32_t j = 0; j < visible; ++j) {
          sum = fmaf(shared.scores[vector][j], shared.k[j][d], sum);
        }
        acc[dim + d] = sum;
      }
      __syncthreads();
    }
  }
}

// A part's weight and the weight of what it is merged into.
struct MergeWeights {
  float part;
  float other;
  float lse;
};
// REQUIRES: neither is -inf.
__device__ inline MergeWeights WeighByLse(float part_lse, float lse) {
  const float max = part_lse > lse ? part_lse : lse;
  const float weight = expf(lse - max);
  const float part_weight = expf(part_lse - max);
  const float sum = weight + part_weight;
  return {part_weight / sum, weight / sum, max + logf(sum)};
}

// The lse of a vector after AttendKeys; -inf if it saw nothing.
__device__ inline float LseOf(const AttentionShared& shared, int32_t vector) {
  const float max = shared.max[vector], sum = shared.sum[vector];
  return max == -INFINITY && sum == 0 ? -INFINITY : max + logf(sum);
}

// What acc is multiplied with to be the vector's output.
__device__ inline float OutputScale(const AttentionShared& shared, int32_t vector) {
  const float max = shared.max[vector], sum = shared.sum[vector];
  return max == -INFINITY && sum == 0 ? 0.0f : 1.0f / sum;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_ATTENTION_TILE_CUH_
