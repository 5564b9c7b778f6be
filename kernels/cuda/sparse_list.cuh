// The entries of a row: its sources' indices, one list after the other, without what is no entry.

#ifndef KERNELS_CUDA_SPARSE_LIST_CUH_
#define KERNELS_CUDA_SPARSE_LIST_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/sparse_decode.h"

namespace kernels::cuda {

// How many entries there are of both sources in the lower half, of the first one in the upper.
using EntryCounts = uint32_t;

// The threads that list a row: all of theirs call ListRow.
template <int32_t kThreads>
struct RowListers {
  static constexpr int32_t kWarps = kThreads / kWarpSize;
  static constexpr int32_t kTurns = 2048 / kThreads;  // indices of a thread under way at once
  static constexpr int32_t kChunk = kTurns * kThreads;
  static_assert(kTurns * kWarps == 2 * kWarpSize && kChunk < 1 << 16);

  struct Shared {
    EntryCounts counts[kTurns * kWarps];  // of a chunk, a warp's and turn's each
    int32_t dense[kWarps];
  };
};

struct RowEntries {
  int32_t first_count = 0;  // of the first source
  int32_t count = 0;        // of both
  bool dense = true;        // each list has its entries at its beginning
};

__device__ inline int32_t LengthOf(const SparseSource& source, int32_t row) {
  if (source.indices == nullptr) return 0;
  return source.lengths == nullptr ? source.width : min(source.lengths[row], source.width);
}

// Counts the row's entries, and lists them in `slots` unless that is null.  `thread`: of kThreads,
// whose barrier is `sync`.
template <int32_t kThreads, typename Sync>
__device__ inline RowEntries ListRow(const SparseDecodeParams& params, int32_t row, int32_t* slots,
                                     int32_t thread, const Sync& sync,
                                     typename RowListers<kThreads>::Shared& shared) {
  using Listers = RowListers<kThreads>;
  const int32_t warp = thread / kWarpSize, lane = thread % kWarpSize;
  const SparseSource& first = params.sources[0];
  const SparseSource& second = params.sources[1];
  const int32_t first_width = first.indices == nullptr ? 0 : first.width;
  const int32_t width = first_width + (second.indices == nullptr ? 0 : second.width);
  const int32_t first_length = LengthOf(first, row);
  const int32_t second_end = first_width + LengthOf(second, row);
  RowEntries entries;
  for (int32_t begin = 0; begin < width; begin += Listers::kChunk) {
    int32_t chunk[Listers::kTurns];
    uint32_t valid[Listers::kTurns];  // lanes
#pragma unroll
    for (int32_t turn = 0; turn < Listers::kTurns; ++turn) {
      const int32_t i = begin + turn * kThreads + thread;
      chunk[turn] = -1;
      if (i < min(first_width, first_length)) {
        chunk[turn] = first.indices[row * first.index_stride + i];
      } else if (i >= first_width && i < second_end) {
        chunk[turn] = second.indices[row * second.index_stride + i - first_width];
      }
    }
#pragma unroll
    for (int32_t turn = 0; turn < Listers::kTurns; ++turn) {
      const bool is_first = begin + turn * kThreads + thread < first_width;
      const bool exists = chunk[turn] >= 0 && chunk[turn] < (is_first ? first : second).num_slots;
      valid[turn] = __ballot_sync(kFullWarp, exists);
      const uint32_t of_first = __ballot_sync(kFullWarp, exists && is_first);
      if (lane == 0) {
        shared.counts[turn * Listers::kWarps + warp] = __popc(valid[turn]) | __popc(of_first) << 16;
      }
    }
    sync();
    // Every warp sums the counts up: a lane has two neighbours and all before them.
    const EntryCounts own[2] = {shared.counts[2 * lane], shared.counts[2 * lane + 1]};
    EntryCounts sum = own[0] + own[1];
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const EntryCounts before = __shfl_up_sync(kFullWarp, sum, offset);
      if (lane >= offset) sum += before;
    }
    const EntryCounts up_to[2] = {sum - own[0] - own[1], sum - own[1]};
    const EntryCounts total = __shfl_sync(kFullWarp, sum, kWarpSize - 1);
    entries.first_count += static_cast<int32_t>(total >> 16);
#pragma unroll
    for (int32_t turn = 0; turn < Listers::kTurns; ++turn) {
      const int32_t of_warp = turn * Listers::kWarps + warp;
      const int32_t before =
          entries.count +
          static_cast<int32_t>(
              __shfl_sync(kFullWarp, warp % 2 == 0 ? up_to[0] : up_to[1], of_warp / 2) & 0xffff);
      const int32_t to = before + __popc(valid[turn] & ((1u << lane) - 1));
      const int32_t i = begin + turn * kThreads + thread;
      if ((valid[turn] >> lane & 1) != 0) {
        if (slots != nullptr) slots[to] = chunk[turn];
        // All entries of the first source come before any of the second one's.
        if (to != (i < first_width ? i : entries.first_count + i - first_width)) {
          entries.dense = false;
        }
      }
    }
    entries.count += static_cast<int32_t>(total & 0xffff);
    sync();
  }
  const bool dense = __all_sync(kFullWarp, entries.dense);
  if (lane == 0) shared.dense[warp] = dense;
  sync();
  for (const int32_t of_warp : shared.dense) entries.dense = entries.dense && of_warp != 0;
  return entries;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_LIST_CUH_
