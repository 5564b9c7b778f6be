// TopKSlots by radix select: the top_k-th largest logit is found digit by digit from histograms,
// then keys are emitted in position order by counting.  A cluster of blocks shares a row; each has
// a contiguous part of its keys and keeps them in shared memory as far as they fit.

#include <algorithm>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/indexer.h"
#include "kernels/cuda/indexer_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 1024;
constexpr int32_t kWarps = kThreads / kWarpSize;
constexpr int32_t kMaxCluster = 8;
constexpr int32_t kBatch = 4;  // vectors of 4 logits that a thread loads at a time
// A logit as a 32-bit number, in digits from the top.
constexpr int32_t kDigits = 3;
__device__ constexpr int32_t DigitShift(int32_t digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__device__ constexpr int32_t DigitBits(int32_t digit) { return digit == 2 ? 10 : 11; }
constexpr int32_t kBins = 2048;
constexpr int32_t kBinsPerThread = kBins / kThreads;
// A warp's lanes count in different copies of a histogram: logits share their leading digits.
constexpr int32_t kCopies = 4;

struct Shared {
  uint32_t histogram[kBins][kCopies];
  uint32_t counts[2][kBins];  // of this block; the other one may still be read by other blocks
  uint32_t warp_sums[2][kWarps];
  uint32_t totals[2];  // of this block: larger keys, ties
  uint32_t bin, above, in_bin;
};
constexpr int32_t kMaxCached =
    static_cast<int32_t>((kMaxSharedBytes - sizeof(Shared)) / sizeof(uint32_t)) / 4 * 4;

// Numbers in the order of the logits: -0 where 0 is, NaN below everything.
__device__ uint32_t RankOf(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  if (logit != logit) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// This block's part of a row: keys [begin, begin + count).
struct Part {
  const float* logits;
  uint32_t* cached;  // ranks of the first num_cached
  int32_t begin;
  int32_t count;
  int32_t num_cached;

  __device__ uint32_t Rank(int32_t i) const {
    return i < num_cached ? cached[i] : RankOf(logits[i]);
  }
};

// What the chosen keys have: a rank above `least`, or that rank while ties are left.
struct Threshold {
  uint32_t least;
  uint32_t ties;
};

__device__ void CountDigit(Shared& shared, uint32_t rank, int32_t digit, uint32_t prefix) {
  const int32_t shift = DigitShift(digit), bits = DigitBits(digit);
  if (digit > 0 && rank >> (shift + bits) != prefix) return;
  const uint32_t bin = rank >> shift & ((1u << bits) - 1);
  atomicAdd(&shared.histogram[bin][threadIdx.x % kCopies], 1u);
}

// The first digit's histogram, while the logits come in.
__device__ void CountLogits(Shared& shared, const Part& part) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const auto take = [&](int32_t i, float logit) {
    const uint32_t rank = RankOf(logit);
    if (i < part.num_cached) part.cached[i] = rank;
    CountDigit(shared, rank, 0, 0);
  };
  int32_t taken = 0;
  if (reinterpret_cast<uintptr_t>(part.logits) % 16 == 0) {
    const auto* vectors = reinterpret_cast<const float4*>(part.logits);
    const int32_t num_vectors = part.count / 4;
    taken = 4 * num_vectors;
    for (int32_t first = thread; first < num_vectors; first += kBatch * kThreads) {
      float4 batch[kBatch];
#pragma unroll
      for (int32_t b = 0; b < kBatch; ++b) {
        if (first + b * kThreads < num_vectors) batch[b] = vectors[first + b * kThreads];
      }
#pragma unroll
      for (int32_t b = 0; b < kBatch; ++b) {
        const int32_t i = 4 * (first + b * kThreads);
        if (i >= taken) continue;
        take(i, batch[b].x);
        take(i + 1, batch[b].y);
        take(i + 2, batch[b].z);
        take(i + 3, batch[b].w);
      }
    }
  }
  for (int32_t i = taken + thread; i < part.count; i += kThreads) take(i, part.logits[i]);
}

// Inclusive sums over the block's threads, from the last one down.  A barrier inside.
__device__ uint32_t SumFromLast(uint32_t value, uint32_t* warp_sums) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
    const uint32_t more = __shfl_down_sync(kFullWarp, value, offset);
    if (lane + offset < kWarpSize) value += more;
  }
  if (lane == 0) warp_sums[warp] = value;
  __syncthreads();
  for (int32_t w = warp + 1; w < kWarps; ++w) value += warp_sums[w];
  return value;
}

// The bin of the whole row's histogram where the `wanted`-th from the top lies, in shared.bin.
template <int32_t kCluster>
__device__ void FindBin(Shared& shared, int32_t digit, uint32_t wanted) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  uint32_t* counts = shared.counts[digit % 2];
  uint32_t bins[kBinsPerThread];
  __syncthreads();
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    const int32_t bin = thread * kBinsPerThread + i;
    bins[i] = 0;
    for (int32_t copy = 0; copy < kCopies; ++copy) {
      bins[i] += shared.histogram[bin][copy];
      shared.histogram[bin][copy] = 0;
    }
    counts[bin] = bins[i];
  }
  if constexpr (kCluster > 1) {
    ClusterBarrier();
    uint32_t theirs[kCluster][kBinsPerThread];  // all under way before the first is added
#pragma unroll
    for (uint32_t rank = 0; rank < kCluster; ++rank) {
#pragma unroll
      for (int32_t i = 0; i < kBinsPerThread; ++i) {
        theirs[rank][i] = LoadFromRank(&counts[thread * kBinsPerThread + i], rank);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kBinsPerThread; ++i) {
      bins[i] = 0;
#pragma unroll
      for (uint32_t rank = 0; rank < kCluster; ++rank) bins[i] += theirs[rank][i];
    }
  }
  uint32_t sum = 0;
  for (int32_t i = 0; i < kBinsPerThread; ++i) sum += bins[i];
  uint32_t above = SumFromLast(sum, shared.warp_sums[digit % 2]) - sum;
  for (int32_t i = kBinsPerThread - 1; i >= 0; --i) {
    if (above < wanted && above + bins[i] >= wanted) {
      shared.bin = static_cast<uint32_t>(thread * kBinsPerThread + i);
      shared.above = above;
      shared.in_bin = bins[i];
    }
    above += bins[i];
  }
  __syncthreads();
}

// REQUIRES: the row has more than top_k keys.
template <int32_t kCluster>
__device__ Threshold FindThreshold(Shared& shared, const Part& part, int32_t top_k) {
  auto wanted = static_cast<uint32_t>(top_k);
  uint32_t prefix = 0;
  for (int32_t digit = 0; digit < kDigits; ++digit) {
    if (digit == 0) {
      CountLogits(shared, part);
    } else {
      for (int32_t i = threadIdx.x; i < part.count; i += kThreads) {
        CountDigit(shared, part.Rank(i), digit, prefix);
      }
    }
    FindBin<kCluster>(shared, digit, wanted);
    prefix = prefix << DigitBits(digit) | shared.bin;
    wanted -= shared.above;
    const uint32_t lowest = prefix << DigitShift(digit);
    // All of the bin: the remaining digits do not matter.
    if (shared.in_bin == wanted && lowest > 0) return {lowest - 1, 0};
  }
  return {prefix, wanted};
}

// Sums of `value` over the warps before this one, of one of the two rows of warp_sums; the block's
// total in shared.totals.  Barriers around it are the caller's.
__device__ uint32_t SumOfWarpsBefore(const uint32_t* warp_sums) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  uint32_t sum = 0;
  for (int32_t w = 0; w < warp; ++w) sum += warp_sums[w];
  return sum;
}

// Writes the slots of the chosen keys in position order; a warp walks over contiguous keys.
template <int32_t kCluster, typename SlotOf>
__device__ void EmitChosen(Shared& shared, const Part& part, const Threshold& threshold,
                           uint32_t rank_in_cluster, int32_t* slots, const SlotOf& slot_of) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t share = CeilDiv(part.count, kThreads) * kWarpSize;
  const int32_t begin = min(warp * share, part.count), end = min(begin + share, part.count);
  uint32_t larger = 0, ties = 0;
  for (int32_t i = begin + lane; i < end; i += kWarpSize) {
    const uint32_t rank = part.Rank(i);
    larger += rank > threshold.least ? 1 : 0;
    ties += rank == threshold.least ? 1 : 0;
  }
  larger = __reduce_add_sync(kFullWarp, larger);
  ties = __reduce_add_sync(kFullWarp, ties);
  if (lane == 0) {
    shared.warp_sums[0][warp] = larger;
    shared.warp_sums[1][warp] = ties;
  }
  __syncthreads();
  uint32_t larger_before = SumOfWarpsBefore(shared.warp_sums[0]);
  uint32_t ties_before = SumOfWarpsBefore(shared.warp_sums[1]);
  if constexpr (kCluster > 1) {
    if (warp == kWarps - 1 && lane == 0) {
      shared.totals[0] = larger_before + larger;
      shared.totals[1] = ties_before + ties;
    }
    ClusterBarrier();
#pragma unroll
    for (uint32_t rank = 0; rank < kCluster; ++rank) {
      const uint32_t their_larger = LoadFromRank(&shared.totals[0], rank);
      const uint32_t their_ties = LoadFromRank(&shared.totals[1], rank);
      larger_before += rank < rank_in_cluster ? their_larger : 0;
      ties_before += rank < rank_in_cluster ? their_ties : 0;
    }
  }
  const uint32_t lower_lanes = (1u << lane) - 1;
  const auto place = [&] { return larger_before + min(ties_before, threshold.ties); };
  const uint32_t first_place = place();
  for (int32_t first = begin; first < end; first += kWarpSize) {
    const int32_t i = first + lane;
    const uint32_t rank = i < end ? part.Rank(i) : 0;
    const bool is_larger = i < end && rank > threshold.least;
    const bool is_tie = i < end && rank == threshold.least;
    const uint32_t larger_lanes = __ballot_sync(kFullWarp, is_larger);
    const uint32_t tie_lanes = __ballot_sync(kFullWarp, is_tie);
    const uint32_t tie = ties_before + __popc(tie_lanes & lower_lanes);
    if (is_larger || (is_tie && tie < threshold.ties)) {
      slots[larger_before + __popc(larger_lanes & lower_lanes) + min(tie, threshold.ties)] =
          part.begin + i;
    }
    larger_before += __popc(larger_lanes);
    ties_before += __popc(tie_lanes);
  }
  // The warp's keys become slots all at once, their blocks being far away.
  __syncwarp();
  const uint32_t end_place = place();
#pragma unroll 2
  for (uint32_t i = first_place + static_cast<uint32_t>(lane); i < end_place; i += kWarpSize) {
    slots[i] = slot_of(slots[i]);
  }
}

// Grid: a cluster a row.
template <int32_t kCluster>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1)
    TopKSlotsKernel(TopKSlotsParams params, int32_t max_cached, Fault* fault) {
  auto& shared = *reinterpret_cast<Shared*>(DynamicShared());
  const auto rank_in_cluster = static_cast<int32_t>(blockIdx.x);
  const auto row = static_cast<int32_t>(blockIdx.y);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t i = thread; i < kBins * kCopies; i += kThreads) {
    shared.histogram[i / kCopies][i % kCopies] = 0;
  }
  __syncthreads();
  WaitForPrevious();
  const IndexerRows& rows = params.rows;
  VisibleKeys seen = KeysOfRow(rows, row);
  if (seen.count > rows.top_k && seen.count > params.logits_stride) {
    if (thread == 0) NoteFault(fault, FaultKind::kNoBlock, seen.seq, seen.count);
    seen.count = 0;
  }
  int32_t* slots = params.slots + row * params.slots_stride;
  const int32_t count = min(seen.count, rows.top_k);
  for (int32_t i = count + rank_in_cluster * kThreads + thread; i < params.slots_width;
       i += kCluster * kThreads) {
    slots[i] = -1;
  }
  if (rank_in_cluster == 0 && thread == 0 && params.lengths != nullptr) params.lengths[row] = count;
  const auto slot_of = [&](int32_t key) {
    const int32_t block = seen.BlockOf(key, params.block_entries);
    if (block < 0) NoteFault(fault, FaultKind::kNoBlock, seen.seq, key);
    return block < 0 ? -1 : block * params.block_entries + key % params.block_entries;
  };
  if (seen.count <= rows.top_k) {
    for (int32_t i = rank_in_cluster * kThreads + thread; i < count; i += kCluster * kThreads) {
      slots[i] = slot_of(i);
    }
    return;
  }
  const int32_t share = CeilDiv(seen.count, 4 * kCluster) * 4;  // keeps vectors aligned
  Part part;
  part.begin = min(rank_in_cluster * share, seen.count);
  part.count = min(share, seen.count - part.begin);
  part.logits = params.logits + row * params.logits_stride + part.begin;
  part.cached = reinterpret_cast<uint32_t*>(&shared + 1);
  part.num_cached = min(part.count, max_cached);
  const Threshold threshold = FindThreshold<kCluster>(shared, part, rows.top_k);
  EmitChosen<kCluster>(shared, part, threshold, static_cast<uint32_t>(rank_in_cluster), slots,
                       slot_of);
  // Nobody leaves while another block may read its counts.
  if constexpr (kCluster > 1) ClusterBarrier();
}

template <int32_t kCluster>
absl::Status Run(const Launcher& launcher, const TopKSlotsParams& params) {
  const int64_t share = CeilDiv(params.logits_stride, int64_t{4} * kCluster) * 4;
  const auto max_cached = static_cast<int32_t>(std::min<int64_t>(share, kMaxCached));
  return Launch(
      launcher, "top_k_slots", TopKSlotsKernel<kCluster>,
      {.grid = dim3(kCluster, static_cast<uint32_t>(params.rows.num_rows)),
       .threads = kThreads,
       .shared_bytes = sizeof(Shared) + sizeof(uint32_t) * static_cast<size_t>(max_cached),
       .early = true},
      params, max_cached, launcher.device.fault);
}

}  // namespace

absl::Status TopKSlots(const Launcher& launcher, const TopKSlotsParams& params) {
  RETURN_IF_ERROR(CheckTopKSlots(params));
  const int32_t num_rows = params.rows.num_rows;
  if (num_rows == 0) return absl::OkStatus();
  // As many blocks a row as there are multiprocessors for, where a row may be long.
  constexpr int64_t kKeysPerBlock = 4096;
  const int64_t useful =
      std::min<int64_t>(launcher.device.num_sms / num_rows, params.logits_stride / kKeysPerBlock);
  if (useful >= kMaxCluster) return Run<kMaxCluster>(launcher, params);
  if (useful >= 2) return Run<2>(launcher, params);
  return Run<1>(launcher, params);
}

}  // namespace kernels::cuda
