// What the blocks that sample together share: the cluster and its reductions, a row of logits of
// which each block has a slice, and keys that order its tokens.

#ifndef KERNELS_CUDA_SAMPLE_CLUSTER_CUH_
#define KERNELS_CUDA_SAMPLE_CLUSTER_CUH_

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {

inline constexpr int32_t kSampleThreads = 512;
inline constexpr int32_t kSampleBlocks = 8;  // of a cluster, which takes a sample

// Of a block, where reductions take place.
struct ReduceShared {
  double sums[33];
  uint64_t words[33];
  uint64_t said[2];  // to the other blocks, in turns
};

// The blocks that take a sample together, each a slice of the vocabulary.  Every thread of them
// makes the same calls; the last is Sync, so that no block goes while others read what it says.
class Cluster {
 public:
  __device__ explicit Cluster(ReduceShared& shared) : shared_(shared) {}

  __device__ int32_t rank() const { return static_cast<int32_t>(cluster_.block_rank()); }
  __device__ void Sync() const { cluster_.sync(); }
  template <typename T>
  __device__ const T* Of(int32_t rank, T* mine) const {
    return cluster_.map_shared_rank(mine, rank);
  }
  // Over all threads, in a fixed order, the result in each.  `scratch` as BlockReduce's.
  template <typename T, typename Op>
  __device__ T Reduce(T value, T* scratch, Op op) {
    static_assert(sizeof(T) == sizeof(uint64_t));
    value = BlockReduce(value, scratch, op);
    // A slot is written again two calls later, when everyone has read it.
    auto* said = reinterpret_cast<T*>(&shared_.said[turn_]);
    turn_ ^= 1;
    if (threadIdx.x == 0) *said = value;
    Sync();
    value = *Of(0, said);
    for (int32_t other = 1; other < kSampleBlocks; ++other) value = op(value, *Of(other, said));
    return value;
  }
  __device__ uint64_t Sum(uint64_t value) {
    return Reduce(value, shared_.words, [](uint64_t a, uint64_t b) { return a + b; });
  }
  __device__ double Sum(double value) {
    return Reduce(value, shared_.sums, [](double a, double b) { return a + b; });
  }
  __device__ uint64_t Max(uint64_t value) {
    return Reduce(value, shared_.words, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }

 private:
  const cooperative_groups::cluster_group cluster_ = cooperative_groups::this_cluster();
  ReduceShared& shared_;
  int32_t turn_ = 0;
};

// A row of logits and the block's slice of it.
struct Logits {
  const float* row;  // [vocab]
  int32_t begin;
  int32_t end;
};

// Calls use(token, logit) for this thread's tokens; loads of kInFlight are under way.
template <int32_t kInFlight = 4, typename Use>
__device__ void ForEach(const Logits& logits, Use use) {
#pragma unroll kInFlight
  for (int32_t i = logits.begin + static_cast<int32_t>(threadIdx.x); i < logits.end;
       i += kSampleThreads) {
    use(i, logits.row[i]);
  }
}

// Some of a thread's tokens: bit n stands for its tokens n, n + 32, ..
struct TokenSet {
  uint32_t bits = 0;

  // Calls use(token, logit) for the tokens that may be in the set.
  template <typename Use>
  __device__ void ForEach(const Logits& logits, Use use) const {
    const int32_t first = logits.begin + static_cast<int32_t>(threadIdx.x);
    for (uint32_t left = bits; left != 0; left &= left - 1) {
      for (int32_t i = first + (__ffs(left) - 1) * kSampleThreads; i < logits.end;
           i += kWarpSize * kSampleThreads) {
        use(i, logits.row[i]);
      }
    }
  }
};

// exp of x <= 0 as kernels/cpu/logit_scan.cc computes it, bit for bit.
__device__ inline float Exp(float x) {
  const float lowest = -87.33654f;
  const float clamped = x < lowest ? lowest : x;
  const float round = 12582912.0f;  // adding and taking away 1.5 * 2^23 rounds to an integer
  const float n = (clamped * 1.44269504f + round) - round;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  return p * __uint_as_float(x < lowest ? 0u : static_cast<uint32_t>(power));
}

// Larger for a larger logit, then for a lower id; unique in a row.
__device__ inline uint64_t KeyOf(float logit, int32_t token) {
  const uint32_t bits = __float_as_uint(logit == 0 ? 0.0f : logit);  // -0 is 0
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(token);
}
__device__ inline int32_t TokenOf(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

__device__ inline float LogitOf(uint64_t key) {
  const auto order = static_cast<uint32_t>(key >> 32);
  return __uint_as_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

inline constexpr uint64_t kNoKey = ~uint64_t{0};

// The largest key; kNoKey if the logits are no distribution: one is NaN or +inf, or all are -inf.
__device__ inline uint64_t BestKey(const Logits& logits, Cluster& cluster) {
  uint64_t best = 0;
  ForEach<8>(logits, [&](int32_t token, float logit) {
    const uint64_t key = logit < INFINITY ? KeyOf(logit, token) : kNoKey;
    best = key > best ? key : best;
  });
  best = cluster.Max(best);
  return LogitOf(best) == -INFINITY ? kNoKey : best;
}

// The largest key below `limit`; 0 if there is none (no token has key 0).
__device__ inline uint64_t BestKeyBelow(const Logits& logits, uint64_t limit, Cluster& cluster) {
  uint64_t best = 0;
  ForEach(logits, [&](int32_t token, float logit) {
    const uint64_t key = KeyOf(logit, token);
    if (key < limit && key > best) best = key;
  });
  return cluster.Max(best);
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SAMPLE_CLUSTER_CUH_
