// What ragged attention's blocks keep in shared memory, and the warps that fill it: one finds the
// block's tiles, one sends for keys and values, two bring the queries.
//
//   barrier        arrivals                          and then
//   full_tile      the finding warp                  a tile may be read
//   empty_tile     all other warps but the spare     its place may be written
//   full_k, _v     the copying warp, all bytes       a step's keys, values may be multiplied
//   empty_k, _v    every multiplying warp            they may be overwritten
//   full_q         every thread that brings queries  a warpgroup's queries may be read
//   empty_q        that warpgroup's warps            they may be overwritten, by the other's

#ifndef KERNELS_CUDA_FLASH_FEED_CUH_
#define KERNELS_CUDA_FLASH_FEED_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/flash_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"
#include "kernels/ragged_mha.h"

namespace kernels::cuda {

inline constexpr int32_t kFlashNope = 128;
inline constexpr int32_t kFlashRope = 64;
inline constexpr int32_t kFlashValue = 128;
inline constexpr int32_t kKeyBoxes = (kFlashNope + kFlashRope) / kBoxColumns;  // along a key
inline constexpr int32_t kValueBoxes = kFlashValue / kBoxColumns;
inline constexpr int32_t kBlockElements = kFlashKeys * kBoxColumns;  // 64 columns of a step's keys
inline constexpr int32_t kStages = 2;
inline constexpr int32_t kTilePlaces = 2;
inline constexpr int32_t kProductWarps = 8;
inline constexpr int32_t kQueryWarps = 2;
inline constexpr int32_t kQueryPitch = kFlashNope + kFlashRope;
inline constexpr int32_t kChunkValues = 4;  // of 16 bytes
// What a warp stages of its result at a time: 128 bytes of each of its rows.
inline constexpr int32_t kStagedRows = 16;
inline constexpr int32_t kStagedChunks = 8;

struct FlashShared {
  uint16_t k[kStages][kKeyBoxes][kBlockElements];
  uint16_t v[kStages][kValueBoxes][kBlockElements];
  float q[kProductRows][kQueryPitch];  // of one warpgroup's next tile, chunks rotated
  uint4 staged[kProductWarps][kStagedRows][kStagedChunks];  // chunks rotated
  FlashTile tiles[kTilePlaces];
  Barrier full_tile[kTilePlaces], empty_tile[kTilePlaces];
  Barrier full_k[kStages], empty_k[kStages];
  Barrier full_v[kStages], empty_v[kStages];
  Barrier full_q[2], empty_q;
};

struct FlashArgs {
  CUtensorMap k_nope = {};
  CUtensorMap k_rope = {};
  CUtensorMap v = {};
  RaggedMhaParams mha;
  int32_t heads_at_a_time = 1;
  uint32_t* ticket = nullptr;  // counts the tiles that blocks have asked for, and ends at 0
};

// Where chunk `chunk` of a row lies: within its 128 bytes, so that four rows' chunks 2 c and 2 c +
// 1 are in different banks.
__device__ constexpr int32_t RotateChunk(int32_t chunk, int32_t row) {
  return chunk / 8 * 8 + (chunk + 2 * row) % 8;
}

// One thread's work.
__device__ inline void InitBarriers(FlashShared& shared) {
  for (int32_t i = 0; i < kTilePlaces; ++i) {
    InitBarrier(&shared.full_tile[i], 1);
    InitBarrier(&shared.empty_tile[i], kProductWarps + kQueryWarps + 1);
  }
  for (int32_t i = 0; i < kStages; ++i) {
    InitBarrier(&shared.full_k[i], 1);
    InitBarrier(&shared.full_v[i], 1);
    InitBarrier(&shared.empty_k[i], kProductWarps);
    InitBarrier(&shared.empty_v[i], kProductWarps);
  }
  for (Barrier& full : shared.full_q) InitBarrier(&full, kQueryWarps * kWarpSize);
  InitBarrier(&shared.empty_q, kProductWarps / 2);
  PublishBarriers();
}

// A warp's work: the tiles of this block from `tile` on, then one that is none.
__device__ inline void FindTiles(FlashShared& shared, const FlashArgs& args, int32_t tiles_per_head,
                                 FlashTile tile) {
  const bool leads = threadIdx.x % kWarpSize == 0;
  const auto num_tiles = static_cast<uint32_t>(tiles_per_head * args.mha.num_heads);
  RingPosition<kTilePlaces> at;
  for (;; at.Advance()) {
    WaitFor(&shared.empty_tile[at.stage], at.parity ^ 1);
    if (leads) {
      shared.tiles[at.stage] = tile;
      Arrive(&shared.full_tile[at.stage]);
    }
    if (tile.seq < 0) return;
    // As many calls as there are tiles: the last one wraps it to 0.
    uint32_t index = 0;
    if (leads) index = gridDim.x + atomicInc(args.ticket, num_tiles - 1);
    index = __shfl_sync(kFullWarp, index, 0);
    tile = FindTile(args.mha, args.heads_at_a_time, tiles_per_head, index);
  }
}

// One thread's work: the boxes of every step, in the order in which they are used.
__device__ inline void CopySteps(FlashShared& shared, const FlashArgs& args) {
  constexpr uint32_t kKeyBytes = kKeyBoxes * kBlockElements * sizeof(uint16_t);
  constexpr uint32_t kValueBytes = kValueBoxes * kBlockElements * sizeof(uint16_t);
  RingPosition<kTilePlaces> tile_at;
  RingPosition<kStages> at;
  for (;; tile_at.Advance()) {
    WaitFor(&shared.full_tile[tile_at.stage], tile_at.parity);
    const FlashTile& tile = shared.tiles[tile_at.stage];
    if (tile.seq < 0) return;
    const auto nope_column = static_cast<int32_t>(tile.head * args.mha.k_nope_head_stride);
    const auto value_column = static_cast<int32_t>(tile.head * args.mha.v_head_stride);
    const int32_t num_steps = tile.num_steps;
    int32_t row = tile.kv_begin;
    Arrive(&shared.empty_tile[tile_at.stage]);
    for (int32_t step = 0; step < num_steps; ++step, row += kFlashKeys, at.Advance()) {
      Barrier* full = &shared.full_k[at.stage];
      WaitFor(&shared.empty_k[at.stage], at.parity ^ 1);
      ArriveAndExpect(full, kKeyBytes);
      for (int32_t half = 0; half < 2; ++half) {
        for (int32_t box = 0; box < kKeyBoxes; ++box) {
          uint16_t* to = shared.k[at.stage][box] + half * kBoxElements;
          const int32_t column = box * kBoxColumns;
          if (column < kFlashNope) {
            CopyBox(to, &args.k_nope, full, nope_column + column, row + half * kBoxRows);
          } else {
            CopyBox(to, &args.k_rope, full, column - kFlashNope, row + half * kBoxRows);
          }
        }
      }
      full = &shared.full_v[at.stage];
      WaitFor(&shared.empty_v[at.stage], at.parity ^ 1);
      ArriveAndExpect(full, kValueBytes);
      for (int32_t half = 0; half < 2; ++half) {
        for (int32_t box = 0; box < kValueBoxes; ++box) {
          CopyBox(shared.v[at.stage][box] + half * kBoxElements, &args.v, full,
                  value_column + box * kBoxColumns, row + half * kBoxRows);
        }
      }
    }
  }
}

// The work of kQueryWarps warps, of which this is `warp`: the queries of every tile, those of the
// first warpgroup and then those of the second; rows past the tile's are zeros.
__device__ inline void CopyQueries(FlashShared& shared, const RaggedMhaParams& params,
                                   int32_t warp) {
  constexpr int32_t kRowsAtATime = 2 * kQueryWarps;
  static_assert(RotateChunk(0, kRowsAtATime) == 0);
  constexpr int32_t kNopeChunks = kFlashNope / kChunkValues;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t half = lane / (kWarpSize / 2), chunk_of_half = lane % (kWarpSize / 2);
  // Chunks of every kRowsAtATime-th row are rotated alike.
  float* to_first = shared.q[2 * warp] + RotateChunk(lane, 2 * warp) * kChunkValues;
  float* to_second = shared.q[2 * warp + 1] + RotateChunk(lane, 2 * warp + 1) * kChunkValues;
  float* to_rope = shared.q[2 * warp + half] +
                   RotateChunk(kNopeChunks + chunk_of_half, 2 * warp + half) * kChunkValues;
  RingPosition<kTilePlaces> tile_at;
  uint32_t empty_parity = 1;
  for (bool is_first = true;; is_first = false, tile_at.Advance()) {
    WaitFor(&shared.full_tile[tile_at.stage], tile_at.parity);
    const FlashTile& tile = shared.tiles[tile_at.stage];
    if (tile.seq < 0) return;
    if (is_first) {  // its queries are read by those who multiply them
      if (lane == 0) Arrive(&shared.empty_tile[tile_at.stage]);
      continue;
    }
    // Two rows at a time; the first 128 values of a row take a warp's copies, the last 64 half.
    int32_t rows_left = tile.num_rows - 2 * warp;  // from the two rows on
    const int64_t first_row = tile.q_begin + 2 * warp;
    const float* nope = params.q_nope + first_row * params.q_nope_row_stride +
                        tile.head * params.q_nope_head_stride + kChunkValues * lane;
    const float* rope = params.q_rope + (first_row + half) * params.q_rope_row_stride +
                        tile.head * params.q_rope_head_stride + kChunkValues * chunk_of_half;
    for (int32_t warpgroup = 0; warpgroup < 2; ++warpgroup, empty_parity ^= 1) {
      WaitFor(&shared.empty_q, empty_parity);
#pragma unroll 2
      for (int32_t r = 0; r < kProductRows; r += kRowsAtATime) {
        CopyAsync(to_first + r * kQueryPitch, nope, rows_left > 0);
        CopyAsync(to_second + r * kQueryPitch, nope + params.q_nope_row_stride, rows_left > 1);
        CopyAsync(to_rope + r * kQueryPitch, rope, rows_left > half);
        nope += kRowsAtATime * params.q_nope_row_stride;
        rope += kRowsAtATime * params.q_rope_row_stride;
        rows_left -= kRowsAtATime;
      }
      ArriveAfterCopies(&shared.full_q[warpgroup]);
    }
    __syncwarp();
    if (lane == 0) Arrive(&shared.empty_tile[tile_at.stage]);
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLASH_FEED_CUH_
