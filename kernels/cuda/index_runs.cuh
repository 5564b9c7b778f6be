// The indexer's rows as work for blocks: tiles of kIndexTileKeys keys, divided evenly, however
// long each row's keys are.
//
// A run is consecutive rows of one sequence, none of them a multiple of kRunRows but the first:
// they score the same keys, so a tile is of a run.  Tiles are numbered over all runs in order.

#ifndef KERNELS_CUDA_INDEX_RUNS_CUH_
#define KERNELS_CUDA_INDEX_RUNS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/indexer_rows.cuh"
#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {

inline constexpr int32_t kIndexTileKeys = 64;

struct IndexRun {
  int32_t first_row = 0;
  int32_t num_rows = 0;
  int32_t seq = 0;
  int32_t num_keys = 0;  // that one of its rows scores
  int32_t first_tile = 0;
  int32_t end_tile = 0;
};

// How many keys of a row are scored: none where all of them are kept.
__device__ inline int32_t ScoredKeys(const IndexerLogitsParams& params, const VisibleKeys& seen) {
  return seen.count > params.rows.top_k && seen.count <= params.logits_stride ? seen.count : 0;
}

// The runs of kWarpSize rows, of which a lane has its row's; tiles count from the first of them.
// Of the whole warp.
template <int32_t kRunRows>
__device__ IndexRun RunOfLane(const IndexerLogitsParams& params, int32_t first_row) {
  static_assert(kWarpSize % kRunRows == 0);
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t row = first_row + lane;
  VisibleKeys seen;
  seen.seq = -1;  // of rows behind the last one
  if (row < params.rows.num_rows) seen = KeysOfRow(params.rows, row);
  const int32_t seq_before = __shfl_up_sync(kFullWarp, seen.seq, 1);
  const uint32_t heads = __ballot_sync(kFullWarp, lane % kRunRows == 0 || seen.seq != seq_before);
  const uint32_t up_to_lane = (2u << lane) - 1;
  const int32_t head = kWarpSize - 1 - __clz(static_cast<int32_t>(heads & up_to_lane));
  const uint32_t next_heads = heads & ~up_to_lane;
  const int32_t end = next_heads == 0 ? kWarpSize : __ffs(static_cast<int32_t>(next_heads)) - 1;
  IndexRun run;
  run.first_row = first_row + head;
  run.num_rows = end - head;
  run.seq = seen.seq;
  run.num_keys = ScoredKeys(params, seen);
  for (int32_t offset = 1; offset < kRunRows; offset *= 2) {
    const int32_t other = __shfl_down_sync(kFullWarp, run.num_keys, offset);
    if (lane + offset < end) run.num_keys = max(run.num_keys, other);
  }
  run.num_keys = __shfl_sync(kFullWarp, run.num_keys, head);
  const int32_t tiles = lane == head ? CeilDiv(run.num_keys, kIndexTileKeys) : 0;
  run.end_tile = tiles;
  for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
    const int32_t other = __shfl_up_sync(kFullWarp, run.end_tile, offset);
    if (lane >= offset) run.end_tile += other;
  }
  run.first_tile = run.end_tile - tiles;
  return run;
}

// Finds runs by their tiles, in ascending order.  Of a whole warp.
template <int32_t kRunRows>
struct RunCursor {
  int32_t window = 0;      // the first row of those looked at
  int32_t first_tile = 0;  // of that row

  // The run with tile `tile`.  REQUIRES: there is one, and not before the one found last.
  __device__ IndexRun Find(const IndexerLogitsParams& params, int32_t tile) {
    for (;; window += kWarpSize) {
      IndexRun run = RunOfLane<kRunRows>(params, window);
      const uint32_t behind = __ballot_sync(kFullWarp, first_tile + run.end_tile > tile);
      if (behind != 0) {
        const int32_t lane = __ffs(static_cast<int32_t>(behind)) - 1;
        const auto of_lane = [&](int32_t value) { return __shfl_sync(kFullWarp, value, lane); };
        return {.first_row = of_lane(run.first_row),
                .num_rows = of_lane(run.num_rows),
                .seq = of_lane(run.seq),
                .num_keys = of_lane(run.num_keys),
                .first_tile = first_tile + of_lane(run.first_tile),
                .end_tile = first_tile + of_lane(run.end_tile)};
      }
      first_tile += __shfl_sync(kFullWarp, run.end_tile, kWarpSize - 1);
    }
  }
};

// A block's tiles, and where to look for their runs.
template <int32_t kRunRows>
struct TileShare {
  int32_t begin = 0;
  int32_t end = 0;
  RunCursor<kRunRows> cursor;
};

// This block's of gridDim.x equal shares.  `warp_tiles`: shared, one a warp.  A barrier inside.
template <int32_t kRunRows, int32_t kWarps>
__device__ TileShare<kRunRows> FindShare(const IndexerLogitsParams& params,
                                         int32_t (&warp_tiles)[kWarps]) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t rows_per_warp = CeilDiv(params.rows.num_rows, kWarps * kWarpSize) * kWarpSize;
  int32_t tiles = 0;
  for (int32_t i = 0; i < rows_per_warp; i += kWarpSize) {
    const IndexRun run = RunOfLane<kRunRows>(params, warp * rows_per_warp + i);
    tiles += __shfl_sync(kFullWarp, run.end_tile, kWarpSize - 1);
  }
  if (threadIdx.x % kWarpSize == 0) warp_tiles[warp] = tiles;
  __syncthreads();
  int64_t total = 0;
  for (int32_t w = 0; w < kWarps; ++w) total += warp_tiles[w];
  const auto edge = [&](uint32_t block) { return static_cast<int32_t>(total * block / gridDim.x); };
  TileShare<kRunRows> share{edge(blockIdx.x), edge(blockIdx.x + 1), {}};
  for (int32_t w = 0; w < kWarps; ++w) {
    if (share.cursor.first_tile + warp_tiles[w] > share.begin) break;
    share.cursor.first_tile += warp_tiles[w];
    share.cursor.window += rows_per_warp;
  }
  return share;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_INDEX_RUNS_CUH_
