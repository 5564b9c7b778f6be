// A row's tokens in descending order of logit, ties to the lower id, without sorting: a place in
// the order is found bin by bin, digit by digit.  Masses are integers, so that their sums do not
// depend on who adds them first.

#ifndef KERNELS_CUDA_DESCENDING_ORDER_CUH_
#define KERNELS_CUDA_DESCENDING_ORDER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sample_cluster.cuh"

namespace kernels::cuda {

inline constexpr int32_t kMassBits = 40;
// Buckets of a token's distance below the best: a lower bucket never holds a lower logit.
inline constexpr int32_t kNumBuckets = 1024;
inline constexpr float kBucketsPerUnit = 32;
inline constexpr int32_t kDigitBits = 8;
inline constexpr int32_t kNumDigits = 1 << kDigitBits;
inline constexpr int32_t kBinsPerThread = kNumBuckets / kSampleThreads;
static_assert(kNumDigits <= kNumBuckets && kNumDigits % kBinsPerThread == 0);

// A bin of tokens in descending order.
struct Bin {
  int32_t index;
  uint32_t count;
  uint64_t mass;
  uint64_t count_before;
  uint64_t mass_before;
};

// Of a block.
struct OrderShared {
  uint32_t bin_count[kNumBuckets];
  unsigned long long bin_mass[kNumBuckets];
  uint64_t warp_counts[kSampleThreads / kWarpSize];
  uint64_t warp_masses[kSampleThreads / kWarpSize];
  Bin chosen;
};

class DescendingOrder {
 public:
  // A place in the order, with the mass of the tokens before it.
  struct Place {
    uint64_t mass_before;
    uint64_t key;
  };

  __device__ DescendingOrder(const Logits& logits, float max, float temperature, Cluster& cluster,
                             OrderShared& shared)
      : logits_(logits), max_(max), temperature_(temperature), cluster_(cluster), shared_(shared) {
    ClearBins(kNumBuckets);
    // The last bucket may hold nearly all tokens: they are counted here first.
    uint32_t last_count = 0;
    uint64_t last_mass = 0;
    ForEach(logits_, [&](int32_t, float logit) {
      const int32_t bucket = Bucket(logit);
      if (bucket < kNumBuckets - 1) return AddToBin(bucket, 1, Mass(logit));
      ++last_count;
      last_mass += Mass(logit);
    });
    AddToBin(kNumBuckets - 1, last_count, last_mass);
    total_mass_ = SumBins(kNumBuckets, buckets_);
  }

  __device__ uint64_t Mass(float logit) const {
    return static_cast<uint64_t>(
        static_cast<int64_t>(Exp(Distance(logit)) * static_cast<float>(uint64_t{1} << kMassBits)));
  }
  __device__ uint64_t total_mass() const { return total_mass_; }
  // REQUIRES: 0 <= count < vocab_size.
  __device__ uint64_t MassOfFirst(uint64_t count) {
    return Find(/*by_mass=*/false, count).mass_before;
  }
  // The token whose mass covers unit `target`.  REQUIRES: target < total_mass().
  __device__ Place FindMass(uint64_t target) { return Find(/*by_mass=*/true, target); }
  // The mass of the tokens with a logit of at least `limit`, a beginning of the order.
  __device__ uint64_t MassAtLeast(float limit) {
    uint64_t mass = 0;
    ForEach(logits_, [&](int32_t, float logit) {
      if (logit >= limit) mass += Mass(logit);
    });
    return cluster_.Sum(mass);
  }

 private:
  __device__ float Distance(float logit) const { return (logit - max_) / temperature_; }
  __device__ int32_t Bucket(float logit) const {
    const float scaled = Distance(logit) * -kBucketsPerUnit;
    return static_cast<int32_t>(scaled < kNumBuckets - 1 ? scaled : kNumBuckets - 1);
  }

  __device__ void ClearBins(int32_t num_bins) {
    for (int32_t bin = threadIdx.x; bin < num_bins; bin += kSampleThreads) {
      shared_.bin_count[bin] = 0;
      shared_.bin_mass[bin] = 0;
    }
    __syncthreads();
  }
  __device__ void AddToBin(int32_t bin, uint32_t count, uint64_t mass) {
    if (count > 0) atomicAdd(&shared_.bin_count[bin], count);
    if (mass > 0) atomicAdd(&shared_.bin_mass[bin], static_cast<unsigned long long>(mass));
  }
  __device__ uint64_t SumBins(int32_t num_bins, Bin (&bins)[kBinsPerThread]);
  __device__ Bin Choose(const Bin (&bins)[kBinsPerThread], bool by_mass, uint64_t target);
  __device__ Place Find(bool by_mass, uint64_t target);

  const Logits& logits_;
  const float max_;
  const float temperature_;
  Cluster& cluster_;
  OrderShared& shared_;
  Bin buckets_[kBinsPerThread];  // this thread's
  uint64_t total_mass_;
};

// Adds the blocks' bins, of which this thread gets its own; returns the mass of all.
__device__ inline uint64_t DescendingOrder::SumBins(int32_t num_bins, Bin (&bins)[kBinsPerThread]) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int32_t first = thread * kBinsPerThread;
#pragma unroll
  for (int32_t i = 0; i < kBinsPerThread; ++i) bins[i] = {first + i, 0, 0, 0, 0};
  cluster_.Sync();
  if (first < num_bins) {
#pragma unroll
    for (int32_t block = 0; block < kSampleBlocks; ++block) {
      const uint32_t* count = cluster_.Of(block, shared_.bin_count) + first;
      const unsigned long long* mass = cluster_.Of(block, shared_.bin_mass) + first;
#pragma unroll
      for (int32_t i = 0; i < kBinsPerThread; ++i) {
        bins[i].count += count[i];
        bins[i].mass += mass[i];
      }
    }
  }
  uint64_t count = 0, mass = 0;
#pragma unroll
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    count += bins[i].count;
    mass += bins[i].mass;
  }
  uint64_t count_end = count, mass_end = mass;  // running totals
  for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t other_count = __shfl_up_sync(kFullWarp, count_end, offset);
    const uint64_t other_mass = __shfl_up_sync(kFullWarp, mass_end, offset);
    if (lane >= offset) {
      count_end += other_count;
      mass_end += other_mass;
    }
  }
  if (lane == kWarpSize - 1) {
    shared_.warp_counts[warp] = count_end;
    shared_.warp_masses[warp] = mass_end;
  }
  cluster_.Sync();  // also: everyone has read the bins
  uint64_t total_mass = 0;
  uint64_t count_before = count_end - count, mass_before = mass_end - mass;
  for (int32_t w = 0; w < kSampleThreads / kWarpSize; ++w) {
    if (w < warp) {
      count_before += shared_.warp_counts[w];
      mass_before += shared_.warp_masses[w];
    }
    total_mass += shared_.warp_masses[w];
  }
#pragma unroll
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    bins[i].count_before = count_before;
    bins[i].mass_before = mass_before;
    count_before += bins[i].count;
    mass_before += bins[i].mass;
  }
  return total_mass;
}

// The bin that the unit `target` (of count or mass) falls into.
__device__ inline Bin DescendingOrder::Choose(const Bin (&bins)[kBinsPerThread], bool by_mass,
                                              uint64_t target) {
#pragma unroll
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    const uint64_t begin = by_mass ? bins[i].mass_before : bins[i].count_before;
    const uint64_t size = by_mass ? bins[i].mass : bins[i].count;
    if (begin <= target && target - begin < size) shared_.chosen = bins[i];
  }
  __syncthreads();
  const Bin chosen = shared_.chosen;
  __syncthreads();
  return chosen;
}

__device__ inline DescendingOrder::Place DescendingOrder::Find(bool by_mass, uint64_t target) {
  Bin bin = Choose(buckets_, by_mass, target);
  const int32_t bucket = bin.index;
  uint64_t mass_before = bin.mass_before;
  TokenSet tokens;  // of the bucket
  int32_t n = 0;
  ForEach(logits_, [&](int32_t, float logit) {
    if (Bucket(logit) == bucket) tokens.bits |= 1u << n % kWarpSize;
    ++n;
  });
  // The digits of the key that are known: those from bit `shift` on.
  uint64_t digits = 0;
  int32_t shift = 64;
  const auto agrees = [&](int32_t token, float logit) {
    return Bucket(logit) == bucket && (shift == 64 || KeyOf(logit, token) >> shift == digits);
  };
  while (shift > 0 && bin.count > 1) {
    target -= by_mass ? bin.mass_before : bin.count_before;
    ClearBins(kNumDigits);
    tokens.ForEach(logits_, [&](int32_t token, float logit) {
      if (!agrees(token, logit)) return;
      const uint64_t digit = KeyOf(logit, token) >> (shift - kDigitBits) & (kNumDigits - 1);
      AddToBin(kNumDigits - 1 - static_cast<int32_t>(digit), 1, Mass(logit));
    });
    Bin bins[kBinsPerThread];
    SumBins(kNumDigits, bins);
    bin = Choose(bins, by_mass, target);
    mass_before += bin.mass_before;
    shift -= kDigitBits;
    digits = digits << kDigitBits | static_cast<uint64_t>(kNumDigits - 1 - bin.index);
  }
  uint64_t key = 0;
  tokens.ForEach(logits_, [&](int32_t token, float logit) {
    if (agrees(token, logit)) key = KeyOf(logit, token);
  });
  return {mass_before, cluster_.Max(key)};
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_DESCENDING_ORDER_CUH_
