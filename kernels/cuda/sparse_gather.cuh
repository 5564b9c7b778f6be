// The warpgroup that gathers a part's keys into shared memory, in boxes as the copy engine would
// have written them.

#ifndef KERNELS_CUDA_SPARSE_GATHER_CUH_
#define KERNELS_CUDA_SPARSE_GATHER_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sparse_block.cuh"
#include "kernels/cuda/sparse_key.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

inline constexpr int32_t kKeyGroups = kGatherThreads / kKeyLanes;  // of lanes, one key each
// Of a step, in each of the kBlocks blocks that share the gathering.
template <int32_t kBlocks>
inline constexpr int32_t kKeyTurns = kSparseKeys / kBlocks / kKeyGroups;

// Of a step, this block's first.
template <int32_t kBlocks>
__device__ inline int32_t FirstKey() {
  return static_cast<int32_t>(blockIdx.x) % kBlocks * (kSparseKeys / kBlocks);
}

// Where a part's keys lie, step by step.  Of a group's keys of a step a lane finds one, and the
// others ask it.
template <KvFormat kFormat, int32_t kBoxes, int32_t kBlocks>
class KeyPlaces {
 public:
  __device__ KeyPlaces(const SparseArgs& args, int32_t row, const SparsePart& part, int32_t group,
                       int32_t lane)
      : sources_(args.params.sources),
        slots_(args.list.slots + row * args.list.stride + part.begin),
        count_(part.end - part.begin),
        first_count_(args.list.counts[2 * row] - part.begin),
        key_(FirstKey<kBlocks>() + lane % kKeyTurns<kBlocks> * kKeyGroups + group) {
    LoadSlot();
  }

  __device__ void FindNextStep() {
    const KvPages& pages = sources_[at_ < first_count_ ? 0 : 1].pages;
    const int32_t block = slot_ / pages.block_size;
    const int32_t entry = slot_ - block * pages.block_size;
    const std::byte* base = pages.base + block * pages.block_stride;
    if constexpr (kFormat == KvFormat::kFp8SharedKv) {
      constexpr int32_t kRowBytes = (kBoxes - 1) * kBoxColumns + 2 * kSparseRope;
      place_ = {base + entry * kRowBytes, (pages.block_size - entry) * kRowBytes + 8 * entry};
    } else {
      place_ = {base + entry * pages.entry_bytes, 0};
    }
    key_ += kSparseKeys;
    LoadSlot();
  }
  // Of the group's key of this turn.
  __device__ KeyPlace Of(int32_t turn) const {
    const auto values = reinterpret_cast<unsigned long long>(place_.values);
    KeyPlace place = {
        reinterpret_cast<const std::byte*>(__shfl_sync(kFullWarp, values, turn, kKeyLanes)), 0};
    if constexpr (kFormat == KvFormat::kFp8SharedKv) {
      place.to_scales = __shfl_sync(kFullWarp, place_.to_scales, turn, kKeyLanes);
    }
    return place;
  }

 private:
  // Behind the last key stands the first one again: a number that weighs nothing.
  __device__ void LoadSlot() {
    at_ = key_ < count_ ? key_ : 0;
    slot_ = __ldg(slots_ + at_);
  }

  const SparseSource* sources_;
  const int32_t* slots_;
  const int32_t count_;
  const int32_t first_count_;  // of the first source
  int32_t key_;                // of the next step, this lane's
  int32_t at_ = 0;             // the same, or one that exists
  int32_t slot_ = 0;           // its
  KeyPlace place_ = {};
};

// Where a lane's 8 values of the first key of its group lie in a box.  Groups are two eights of
// rows, so the swizzle is the same for all of its keys.
__device__ inline int32_t PlaceInBox(int32_t group, int32_t lane) {
  static_assert(kKeyGroups % 8 == 0);
  return group * kBoxColumns + (lane ^ group % 8) * 8;
}
inline constexpr int32_t kKeyTurnElements = kKeyGroups * kBoxColumns;  // from turn to turn

// The third warpgroup, keys that are bf16 numbers: copies those of every step.
template <KvFormat kFormat, int32_t kBoxes>
__device__ inline void CopyKeys(SparseShared<kBoxes>& shared, const SparseArgs& args, int32_t row,
                                const SparsePart& part) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 2 * kWarpgroupThreads;
  const int32_t lane = thread % kKeyLanes, group = thread / kKeyLanes;
  KeyPlaces<kFormat, kBoxes, 1> places(args, row, part, group, lane);
  RingPosition<kSparseStages> at;
#pragma unroll 1
  for (int32_t step = 0; step < part.num_steps(); ++step, at.Advance()) {
    places.FindNextStep();
    WaitFor(&shared.empty[at.stage], at.parity ^ 1);
#pragma unroll
    for (int32_t turn = 0; turn < kKeyTurns<1>; ++turn) {
      uint16_t* to = shared.k[at.stage][0] + turn * kKeyTurnElements + PlaceInBox(group, lane);
      const std::byte* from = places.Of(turn).values + 16 * lane;
#pragma unroll
      for (int32_t box = 0; box < kBoxes; ++box) {
        CopyAsync(to + box * kBoxElements, from + box * 2 * kBoxColumns, true);
      }
    }
    ArriveAfterCopies(&shared.full[at.stage]);
  }
}

// The third warpgroup, fp8: widens this block's share of every step's keys, for itself and for the
// other block if there is one.  A lane has its share of a step in registers; where a key was, the
// next step's is sent for.
template <KvFormat kFormat, int32_t kBlocks, int32_t kBoxes>
__device__ inline void WidenKeys(SparseShared<kBoxes>& shared, const SparseArgs& args, int32_t row,
                                 const SparsePart& part) {
  constexpr int32_t kTurns = kKeyTurns<kBlocks>;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 2 * kWarpgroupThreads;
  const int32_t lane = thread % kKeyLanes, group = thread / kKeyLanes;
  uint16_t* const rows =
      shared.k[0][0] + FirstKey<kBlocks>() * kBoxColumns + PlaceInBox(group, lane);
  const uint32_t peer = (blockIdx.x + 1) % kBlocks;
  const ClusterAddress peer_rows = AddressInRank(rows, peer);
  const ClusterAddress peer_full = AddressInRank(shared.full, peer);
  KeyPlaces<kFormat, kBoxes, kBlocks> places(args, row, part, group, lane);
  LaneKey<kFormat, kBoxes> keys[kTurns];
  places.FindNextStep();
#pragma unroll
  for (int32_t turn = 0; turn < kTurns; ++turn) keys[turn].Load(places.Of(turn), lane);
  const int32_t num_steps = part.num_steps();
  RingPosition<kSparseStages> at;
#pragma unroll 1
  for (int32_t step = 0; step < num_steps; ++step, at.Advance()) {
    places.FindNextStep();
    WaitFor(&shared.empty[at.stage], at.parity ^ 1);
#pragma unroll
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const int32_t turn_at = at.stage * kBoxes * kBoxElements + turn * kKeyTurnElements;
      keys[turn].Widen([&](int32_t box, const uint4& unit) {
        const int32_t to = turn_at + box * kBoxElements;
        *reinterpret_cast<uint4*>(rows + to) = unit;
        if constexpr (kBlocks > 1) {
          StoreAsync(peer_rows + to * sizeof(uint16_t), unit,
                     peer_full + at.stage * sizeof(Barrier));
        }
      });
      keys[turn].Load(places.Of(turn), lane);
    }
    PublishShared();
    __syncwarp();
    if (kBlocks > 1 && thread == 0) {  // what the other block stores here counts too
      ArriveAndExpect(&shared.full[at.stage],
                      kSparseKeys / kBlocks * kBoxes * kBoxColumns * sizeof(uint16_t));
    } else if (thread % kWarpSize == 0) {
      Arrive(&shared.full[at.stage]);
    }
  }
}

template <KvFormat kFormat, int32_t kBlocks, int32_t kBoxes>
__device__ inline void GatherKeys(SparseShared<kBoxes>& shared, const SparseArgs& args, int32_t row,
                                  const SparsePart& part) {
  if constexpr (kFormat == KvFormat::kBfloat16) {
    static_assert(kBlocks == 1);
    CopyKeys<kFormat>(shared, args, row, part);
  } else {
    WidenKeys<kFormat, kBlocks>(shared, args, row, part);
  }
}
// Arrivals at a stage's `full`.
template <KvFormat kFormat>
inline constexpr int32_t kGatherArrivals =
    kFormat == KvFormat::kBfloat16 ? kGatherThreads : kGatherThreads / kWarpSize;

// Waits for a step's keys.
template <KvFormat kFormat, int32_t kBlocks, int32_t kBoxes>
__device__ inline void WaitForKeys(SparseShared<kBoxes>& shared, int32_t stage, uint32_t parity) {
  WaitFor(&shared.full[stage], parity);
  // Neither copies nor another block's stores publish what they write.
  if constexpr (kFormat == KvFormat::kBfloat16 || kBlocks > 1) PublishShared();
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_GATHER_CUH_
