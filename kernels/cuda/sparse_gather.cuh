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

// Finds the row's entries; all threads that gather.  Lists with something between their entries are
// listed anew, by each of the row's blocks with the same outcome.
template <int32_t kBoxes>
__device__ inline void FindEntries(SparseShared<kBoxes>& shared, const SparseArgs& args,
                                   int32_t row) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 2 * kWarpgroupThreads;
  const SparseDecodeParams& params = args.params;
  const RowEntries entries =
      ListRow<kGatherThreads>(params, row, nullptr, thread, SyncGatherers, shared.listers);
  const int32_t* slots[2];
  if (entries.dense) {
    slots[0] = params.sources[0].indices + row * params.sources[0].index_stride;
    slots[1] =
        params.sources[1].indices + row * params.sources[1].index_stride - entries.first_count;
  } else {
    int32_t* list = args.list.slots + row * args.list.stride;
    ListRow<kGatherThreads>(params, row, list, thread, SyncGatherers, shared.listers);
    slots[0] = slots[1] = list;
  }
  if (thread == 0) {
    shared.entries = {{slots[0], slots[1]}, entries.first_count, entries.count};
  }
  SyncGatherers();
}

// Whether keys are sent to the second-level cache a step ahead: V4's rows are few and short.
template <KvFormat kFormat>
inline constexpr bool kFetches = kFormat == KvFormat::kFp8SharedKv;

// Where a part's keys lie, step by step.  Of a group's keys of a step a lane finds one, and the
// others ask it.
template <KvFormat kFormat, int32_t kBoxes, int32_t kBlocks>
class KeyPlaces {
 public:
  __device__ KeyPlaces(const SparseEntries& entries, const SparseArgs& args, const SparsePart& part,
                       int32_t group, int32_t lane)
      : entries_(entries),
        sources_(args.params.sources),
        part_(part),
        entry_(part.begin + FirstKey<kBlocks>() + lane % kKeyTurns<kBlocks> * kKeyGroups + group) {
    LoadSlot();
  }

  __device__ void FindNextStep() {
    place_ = PlaceOfSlot();
    entry_ += kSparseKeys;
    LoadSlot();
  }
  // Has the keys of the step that FindNextStep will find set out for the second-level cache: a
  // key's lines are shared out over the lanes that find it.
  __device__ void FetchNextStep(int32_t lane) const {
    constexpr int32_t kLineBytes = 128;
    constexpr int32_t kKeyBytes = (kBoxes - 1) * kBoxColumns + 2 * kSparseRope;
    constexpr int32_t kLanes = kKeyLanes / kKeyTurns<kBlocks>;
    const std::byte* values = PlaceOfSlot().values;
#pragma unroll 1
    for (int32_t at = lane / kKeyTurns<kBlocks> * kLineBytes; at < kKeyBytes;
         at += kLanes * kLineBytes) {
      asm volatile("prefetch.global.L2 [%0];" : : "l"(values + at));
    }
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
  __device__ KeyPlace PlaceOfSlot() const {
    const KvPages& pages = sources_[source_].pages;
    const int32_t block = slot_ / pages.block_size;
    const int32_t entry = slot_ - block * pages.block_size;
    const std::byte* base = pages.base + block * pages.block_stride;
    if constexpr (kFormat == KvFormat::kFp8SharedKv) {
      constexpr int32_t kRowBytes = (kBoxes - 1) * kBoxColumns + 2 * kSparseRope;
      return {base + entry * kRowBytes, (pages.block_size - entry) * kRowBytes + 8 * entry};
    } else {
      return {base + entry * pages.entry_bytes, 0};
    }
  }
  // Behind the part's last key stands its first one again: a number that weighs nothing.
  __device__ void LoadSlot() {
    const int32_t entry = entry_ < part_.end ? entry_ : part_.begin;
    source_ = entry < entries_.first_count ? 0 : 1;
    slot_ = entries_.slots[source_][entry];
  }

  const SparseEntries& entries_;
  const SparseSource* sources_;
  const SparsePart part_;
  int32_t entry_;       // of the next step, this lane's
  int32_t source_ = 0;  // its, and its slot
  int32_t slot_ = 0;
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
__device__ inline void CopyKeys(SparseShared<kBoxes>& shared, const SparseArgs& args,
                                const SparsePart& part) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 2 * kWarpgroupThreads;
  const int32_t lane = thread % kKeyLanes, group = thread / kKeyLanes;
  KeyPlaces<kFormat, kBoxes, 1> places(shared.entries, args, part, group, lane);
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
// other block if there is one.  A lane has its share of a step in registers, and sends for the next
// step's when it has widened it.
template <KvFormat kFormat, int32_t kBlocks, int32_t kBoxes>
__device__ inline void WidenKeys(SparseShared<kBoxes>& shared, const SparseArgs& args,
                                 const SparsePart& part) {
  constexpr int32_t kTurns = kKeyTurns<kBlocks>;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 2 * kWarpgroupThreads;
  const int32_t lane = thread % kKeyLanes, group = thread / kKeyLanes;
  uint16_t* const rows =
      shared.k[0][0] + FirstKey<kBlocks>() * kBoxColumns + PlaceInBox(group, lane);
  const uint32_t peer = (blockIdx.x + 1) % kBlocks;
  const ClusterAddress peer_rows = AddressInRank(rows, peer);
  const ClusterAddress peer_full = AddressInRank(shared.full, peer);
  KeyPlaces<kFormat, kBoxes, kBlocks> places(shared.entries, args, part, group, lane);
  LaneKey<kFormat, kBoxes> keys[kTurns];
  const auto load = [&] {
    places.FindNextStep();
#pragma unroll
    for (int32_t turn = 0; turn < kTurns; ++turn) keys[turn].Load(places.Of(turn), lane);
  };
  load();
  const int32_t num_steps = part.num_steps();
  RingPosition<kSparseStages> at;
#pragma unroll 1
  for (int32_t step = 0; step < num_steps; ++step, at.Advance()) {
    WaitFor(&shared.empty[at.stage], at.parity ^ 1);
    if constexpr (kFetches<kFormat>) {
      if (step + 1 < num_steps) places.FetchNextStep(lane);
    }
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
    }
    PublishShared();
    __syncwarp();
    if (kBlocks > 1 && thread == 0) {  // what the other block stores here counts too
      ArriveAndExpect(&shared.full[at.stage],
                      kSparseKeys / kBlocks * kBoxes * kBoxColumns * sizeof(uint16_t));
    } else if (thread % kWarpSize == 0) {
      Arrive(&shared.full[at.stage]);
    }
    // Not key by key as registers become free: to wait for one of a warp's loads is to wait for
    // all that it has under way.
    if (step + 1 < num_steps) load();
  }
}

template <KvFormat kFormat, int32_t kBlocks, int32_t kBoxes>
__device__ inline void GatherKeys(SparseShared<kBoxes>& shared, const SparseArgs& args,
                                  const SparsePart& part) {
  if constexpr (kFormat == KvFormat::kBfloat16) {
    static_assert(kBlocks == 1);
    CopyKeys<kFormat>(shared, args, part);
  } else {
    WidenKeys<kFormat, kBlocks>(shared, args, part);
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
