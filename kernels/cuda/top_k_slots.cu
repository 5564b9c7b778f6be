// TopKSlots by selection: a histogram over coarse bins says in which bin the top_k-th largest logit
// lies; the few keys of that bin are ranked by their other digits; keys are emitted in position
// order from masks of 32 keys each.  A cluster of blocks shares a row, each of them a contiguous
// part of its keys.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/indexer.h"
#include "kernels/cuda/indexer_rows.cuh"
#include "kernels/cuda/launch.cuh"
#include "status/status_macros.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kMaxCluster = 8;
constexpr int32_t kMaskKeys = 32;
constexpr int32_t kBatch = 8;  // logits that a thread loads at a time
// Of a histogram; a bin is an octave's 32nd, for magnitudes from 2^-14 to 2^18.
constexpr int32_t kBins = 2048;
constexpr uint32_t kLeastMagnitude = 113u << 23;
constexpr int32_t kBinShift = 18;
// The exact way when too many keys share a bin: a rank in digits from the top.
constexpr int32_t kDigits = 3;
__device__ constexpr int32_t DigitShift(int32_t digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__device__ constexpr int32_t DigitBits(int32_t digit) { return digit == 2 ? 10 : 11; }

// Keys of the threshold's bin that are gathered, and the digits of their ranks within it.
constexpr int32_t kMaxCandidates = 1024;
constexpr int32_t kLowDigitBits = 7;
static_assert(1 << (kBinShift - kLowDigitBits) == kBins);

template <int32_t kThreads>
struct Shared {
  uint32_t histogram[2][kBins];         // in turns: other blocks may still read the one before
  uint32_t candidates[kMaxCandidates];  // ranks, of this block
  uint32_t num_candidates;
  uint32_t warp_sums[2][kThreads / kWarpSize];
  uint32_t totals[2];  // of this block: larger keys, ties
  uint32_t bin, above, in_bin;
};

// Of 32 keys, a bit each.
struct Masks {
  uint32_t larger;
  uint32_t ties;  // at first, the threshold's bin
};

// Numbers in the order of the logits: -0 where 0 is, NaN below everything.
__device__ uint32_t RankOf(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  if (logit != logit) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ uint32_t BinOf(uint32_t rank) {
  const bool positive = (rank & 0x80000000u) != 0;
  const uint32_t magnitude = (positive ? rank : ~rank) & 0x7fffffffu;
  const uint32_t beyond = max(magnitude, kLeastMagnitude) - kLeastMagnitude;
  const uint32_t code = min(beyond >> kBinShift, kBins / 2 - 1u);
  return positive ? kBins / 2 + code : kBins / 2 - 1 - code;
}
// The least rank of a bin; of the one behind the last, a rank that no logit has.
__device__ uint32_t LeastRank(uint32_t bin) {
  if (bin == 0) return 0;
  if (bin == kBins / 2) return 0x80000000u;
  if (bin == kBins) return 0xffffffffu;
  if (bin > kBins / 2) return 0x80000000u | (kLeastMagnitude + ((bin - kBins / 2) << kBinShift));
  return 0x80000000u - (kLeastMagnitude + ((kBins / 2 - bin) << kBinShift));
}

// This block's part of a row: keys [begin, begin + count).
struct Part {
  const float* logits;
  Masks* masks;
  int32_t begin;
  int32_t count;

  // Calls take(mask, key, rank) for all keys of masks together, a warp's lanes having those of one
  // mask, rank 0 behind the last key.
  template <int32_t kThreads, typename Take>
  __device__ void ForEach(const Take& take) const {
    constexpr int32_t kWarps = kThreads / kWarpSize;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    for (int32_t first = static_cast<int32_t>(threadIdx.x) / kWarpSize; first * kMaskKeys < count;
         first += kBatch * kWarps) {
      float batch[kBatch];
#pragma unroll
      for (int32_t b = 0; b < kBatch; ++b) {
        const int32_t key = (first + b * kWarps) * kMaskKeys + lane;
        batch[b] = key < count ? logits[key] : 0.0f;
      }
#pragma unroll
      for (int32_t b = 0; b < kBatch; ++b) {
        const int32_t mask = first + b * kWarps;
        const int32_t key = mask * kMaskKeys + lane;
        if (mask * kMaskKeys >= count) break;
        take(mask, key, key < count, RankOf(batch[b]));
      }
    }
  }
};

// What the chosen keys have: a rank above `least`, or that rank while ties are left.
struct Threshold {
  uint32_t least;
  uint32_t ties;
};

// Inclusive sums over the block's threads, from the last one down.  A barrier inside.
template <int32_t kThreads>
__device__ uint32_t SumFromLast(uint32_t value, uint32_t* warp_sums) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
    const uint32_t more = __shfl_down_sync(kFullWarp, value, offset);
    if (lane + offset < kWarpSize) value += more;
  }
  if (lane == 0) warp_sums[warp] = value;
  __syncthreads();
  const bool behind = lane > warp && lane < kThreads / kWarpSize;
  return value + __reduce_add_sync(kFullWarp, behind ? warp_sums[lane] : 0);
}

// The bin of the whole row's histogram where the `wanted`-th from the top lies, in shared.bin; the
// other histogram is cleared.
template <int32_t kThreads, int32_t kCluster>
__device__ void FindBin(Shared<kThreads>& shared, int32_t round, uint32_t wanted) {
  constexpr int32_t kBinsPerThread = kBins / kThreads;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const uint32_t* histogram = shared.histogram[round % 2];
  uint32_t bins[kBinsPerThread];
  if constexpr (kCluster > 1) {
    ClusterBarrier();
    uint32_t theirs[kCluster][kBinsPerThread];  // all under way before the first is added
#pragma unroll
    for (uint32_t rank = 0; rank < kCluster; ++rank) {
#pragma unroll
      for (int32_t i = 0; i < kBinsPerThread; ++i) {
        theirs[rank][i] = LoadFromRank(&histogram[thread * kBinsPerThread + i], rank);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < kBinsPerThread; ++i) {
      bins[i] = 0;
#pragma unroll
      for (uint32_t rank = 0; rank < kCluster; ++rank) bins[i] += theirs[rank][i];
    }
  } else {
    __syncthreads();
#pragma unroll
    for (int32_t i = 0; i < kBinsPerThread; ++i) bins[i] = histogram[thread * kBinsPerThread + i];
  }
  uint32_t sum = 0;
#pragma unroll
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    sum += bins[i];
    shared.histogram[(round + 1) % 2][thread * kBinsPerThread + i] = 0;
  }
  uint32_t above = SumFromLast<kThreads>(sum, shared.warp_sums[round % 2]) - sum;
#pragma unroll
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

// The `wanted`-th of the cluster's candidates, of which there are at most kMaxCandidates, all of
// one bin from `least` on.
template <int32_t kThreads, int32_t kCluster>
__device__ Threshold RankCandidates(Shared<kThreads>& shared, uint32_t wanted, uint32_t least) {
  constexpr int32_t kHeld = kMaxCandidates / kThreads;
  uint32_t held[kHeld];  // of this thread, from `least` on; every block has all of the cluster's
  uint32_t counts[kCluster];
  if constexpr (kCluster > 1) {
    ClusterBarrier();
#pragma unroll
    for (uint32_t rank = 0; rank < kCluster; ++rank) {
      counts[rank] = LoadFromRank(&shared.num_candidates, rank);
    }
  } else {
    __syncthreads();
    counts[0] = shared.num_candidates;
  }
#pragma unroll
  for (int32_t i = 0; i < kHeld; ++i) {
    uint32_t at = threadIdx.x + static_cast<uint32_t>(i) * kThreads;
    held[i] = 0xffffffff;
    for (uint32_t rank = 0; rank < kCluster; ++rank) {
      if (at < counts[rank]) {
        held[i] = LoadFromRank(&shared.candidates[at], rank) - least;
        break;
      }
      at -= counts[rank];
    }
  }
  uint32_t prefix = 0;
  for (int32_t digit = 0; digit < 2; ++digit) {
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) {
      if (held[i] == 0xffffffff || (digit > 0 && held[i] >> kLowDigitBits != prefix)) continue;
      const uint32_t bin = digit == 0 ? held[i] >> kLowDigitBits : held[i] % (1u << kLowDigitBits);
      atomicAdd(&shared.histogram[(digit + 1) % 2][bin], 1u);
    }
    FindBin<kThreads, 1>(shared, digit + 1, wanted);
    prefix = digit == 0 ? shared.bin : prefix << kLowDigitBits | shared.bin;
    wanted -= shared.above;
  }
  return {least + prefix, wanted};
}

// The `wanted`-th of the keys with ranks in [least, end), digit by digit.
template <int32_t kThreads, int32_t kCluster>
__device__ Threshold FindDigits(Shared<kThreads>& shared, const Part& part, uint32_t wanted,
                                uint32_t least, uint32_t end) {
  uint32_t prefix = 0;
  for (int32_t digit = 0; digit < kDigits; ++digit) {
    const int32_t shift = DigitShift(digit), bits = DigitBits(digit);
    uint32_t* histogram = shared.histogram[(digit + 1) % 2];
    part.ForEach<kThreads>([&](int32_t, int32_t, bool exists, uint32_t rank) {
      if (!exists || rank < least || rank >= end) return;
      if (digit > 0 && rank >> (shift + bits) != prefix) return;
      atomicAdd(&histogram[rank >> shift & ((1u << bits) - 1)], 1u);
    });
    FindBin<kThreads, kCluster>(shared, digit + 1, wanted);
    prefix = prefix << bits | shared.bin;
    wanted -= shared.above;
  }
  return {prefix, wanted};
}

// Fills the masks: of the bin's keys too, as ties.  REQUIRES: the row has more than top_k keys.
template <int32_t kThreads, int32_t kCluster>
__device__ Threshold FindThreshold(Shared<kThreads>& shared, const Part& part, int32_t top_k) {
  part.ForEach<kThreads>([&](int32_t, int32_t, bool exists, uint32_t rank) {
    if (exists) atomicAdd(&shared.histogram[0][BinOf(rank)], 1u);
  });
  FindBin<kThreads, kCluster>(shared, 0, static_cast<uint32_t>(top_k));
  const uint32_t wanted = static_cast<uint32_t>(top_k) - shared.above;
  const uint32_t in_bin = shared.in_bin;
  const uint32_t least = LeastRank(shared.bin), end = LeastRank(shared.bin + 1);
  const bool few = in_bin <= kMaxCandidates && end - least <= 1u << kBinShift;
  part.ForEach<kThreads>([&](int32_t mask, int32_t, bool exists, uint32_t rank) {
    const bool is_larger = exists && rank >= end;
    const bool is_in_bin = exists && rank >= least && rank < end;
    const uint32_t larger = __ballot_sync(kFullWarp, is_larger);
    const uint32_t ties = __ballot_sync(kFullWarp, is_in_bin);
    if (threadIdx.x % kWarpSize == 0) part.masks[mask] = {larger, ties};
    if (few && is_in_bin) {
      shared.candidates[atomicAdd(&shared.num_candidates, 1u)] = rank;
    }
  });
  if (few) return RankCandidates<kThreads, kCluster>(shared, wanted, least);
  return FindDigits<kThreads, kCluster>(shared, part, wanted, least, end);
}

// Writes the slots of the chosen keys in position order; a thread has contiguous masks.
template <int32_t kThreads, int32_t kCluster, typename SlotOf>
__device__ void EmitChosen(Shared<kThreads>& shared, const Part& part, const Threshold& threshold,
                           uint32_t rank_in_cluster, int32_t* slots, const SlotOf& slot_of) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int32_t num_masks = CeilDiv(part.count, kMaskKeys);
  const int32_t share = CeilDiv(num_masks, kThreads);
  const int32_t begin = min(thread * share, num_masks), end = min(begin + share, num_masks);
  uint32_t larger = 0, ties = 0;
  for (int32_t m = begin; m < end; ++m) {
    Masks masks = part.masks[m];
    for (uint32_t left = masks.ties; left != 0; left &= left - 1) {
      const int32_t bit = __ffs(static_cast<int32_t>(left)) - 1;
      const uint32_t rank = RankOf(part.logits[m * kMaskKeys + bit]);
      if (rank > threshold.least) masks.larger |= 1u << bit;
      if (rank != threshold.least) masks.ties &= ~(1u << bit);
    }
    part.masks[m] = masks;
    larger += static_cast<uint32_t>(__popc(masks.larger));
    ties += static_cast<uint32_t>(__popc(masks.ties));
  }
  uint32_t larger_end = larger, ties_end = ties;  // running totals of the warp
  for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
    const uint32_t more_larger = __shfl_up_sync(kFullWarp, larger_end, offset);
    const uint32_t more_ties = __shfl_up_sync(kFullWarp, ties_end, offset);
    larger_end += lane >= offset ? more_larger : 0;
    ties_end += lane >= offset ? more_ties : 0;
  }
  if (lane == kWarpSize - 1) {
    shared.warp_sums[0][warp] = larger_end;
    shared.warp_sums[1][warp] = ties_end;
  }
  __syncthreads();
  const auto of_warps_before = [&](const uint32_t* sums) {
    return __reduce_add_sync(kFullWarp, lane < warp ? sums[lane] : 0);
  };
  uint32_t larger_before = of_warps_before(shared.warp_sums[0]) + larger_end - larger;
  uint32_t ties_before = of_warps_before(shared.warp_sums[1]) + ties_end - ties;
  if constexpr (kCluster > 1) {
    if (thread == kThreads - 1) {
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
  for (int32_t m = begin; m < end; ++m) {
    const Masks masks = part.masks[m];
    for (uint32_t left = masks.larger | masks.ties; left != 0; left &= left - 1) {
      const int32_t bit = __ffs(static_cast<int32_t>(left)) - 1;
      const bool is_tie = (masks.ties >> bit & 1) != 0;
      if (!is_tie || ties_before < threshold.ties) {
        slots[larger_before + min(ties_before, threshold.ties)] =
            slot_of(part.begin + m * kMaskKeys + bit);
      }
      larger_before += is_tie ? 0 : 1;
      ties_before += is_tie ? 1 : 0;
    }
  }
}

// Grid: a cluster a row.
template <int32_t kThreads, int32_t kCluster>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads, 1024 / kThreads)
    TopKSlotsKernel(TopKSlotsParams params, Fault* fault) {
  auto& shared = *reinterpret_cast<Shared<kThreads>*>(DynamicShared());
  const auto rank_in_cluster = static_cast<int32_t>(blockIdx.x);
  const auto row = static_cast<int32_t>(blockIdx.y);
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t i = thread; i < kBins; i += kThreads) shared.histogram[0][i] = 0;
  if (thread == 0) shared.num_candidates = 0;
  const IndexerRows& rows = params.rows;
  VisibleKeys seen = KeysOfRow(rows, row);
  __syncthreads();
  WaitForPrevious();
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
  const int32_t share = CeilDiv(seen.count, kMaskKeys * kCluster) * kMaskKeys;
  Part part;
  part.begin = min(rank_in_cluster * share, seen.count);
  part.count = min(share, seen.count - part.begin);
  part.logits = params.logits + row * params.logits_stride + part.begin;
  part.masks = reinterpret_cast<Masks*>(&shared + 1);
  const auto threshold = FindThreshold<kThreads, kCluster>(shared, part, rows.top_k);
  EmitChosen<kThreads, kCluster>(shared, part, threshold, static_cast<uint32_t>(rank_in_cluster),
                                 slots, slot_of);
  // Nobody leaves while another block may read its counts.
  if constexpr (kCluster > 1) ClusterBarrier();
}

// What a block of a cluster needs for its part of a row.
template <int32_t kThreads>
size_t SharedBytes(const TopKSlotsParams& params, int32_t cluster) {
  const int64_t masks = CeilDiv(params.logits_stride, int64_t{kMaskKeys} * cluster);
  return sizeof(Shared<kThreads>) + sizeof(Masks) * static_cast<size_t>(masks);
}

template <int32_t kThreads, int32_t kCluster>
absl::Status Run(const Launcher& launcher, const TopKSlotsParams& params) {
  return Launch(launcher, "top_k_slots", TopKSlotsKernel<kThreads, kCluster>,
                {.grid = dim3(kCluster, static_cast<uint32_t>(params.rows.num_rows)),
                 .threads = kThreads,
                 .shared_bytes = SharedBytes<kThreads>(params, kCluster),
                 .early = true},
                params, launcher.device.fault);
}

}  // namespace

absl::Status TopKSlots(const Launcher& launcher, const TopKSlotsParams& params) {
  RETURN_IF_ERROR(CheckTopKSlots(params));
  const int32_t num_rows = params.rows.num_rows;
  if (num_rows == 0) return absl::OkStatus();
  constexpr int32_t kFew = 1024, kMany = 512;  // threads of a block, of few rows and of many
  if (SharedBytes<kFew>(params, kMaxCluster) > kMaxSharedBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda: top_k_slots: rows of ", params.logits_stride, " logits do not fit"));
  }
  // As many blocks a row as there are multiprocessors for, where a row may be long.
  constexpr int64_t kKeysPerBlock = 4096;
  int64_t blocks =
      std::min<int64_t>(launcher.device.num_sms / num_rows, params.logits_stride / kKeysPerBlock);
  for (int32_t few = 1; few < kMaxCluster; few *= 2) {
    if (SharedBytes<kFew>(params, few) > kMaxSharedBytes) {
      blocks = std::max<int64_t>(blocks, 2 * few);
    }
  }
  if (blocks >= kMaxCluster) return Run<kFew, kMaxCluster>(launcher, params);
  if (blocks >= 4) return Run<kFew, 4>(launcher, params);
  if (blocks >= 2) return Run<kFew, 2>(launcher, params);
  return Run<kMany, 1>(launcher, params);
}

}  // namespace kernels::cuda
