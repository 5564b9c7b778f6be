// The tiles of ragged attention: 128 rows of a sequence and one head, and the order in which blocks
// take them.

#ifndef KERNELS_CUDA_FLASH_TILE_CUH_
#define KERNELS_CUDA_FLASH_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/ragged_mha.h"

namespace kernels::cuda {

inline constexpr int32_t kFlashRows = 128;  // 64 a warpgroup
inline constexpr int32_t kFlashKeys = 128;  // of a step
inline constexpr int32_t kMaxSortedSeqs = 4 * kWarpSize;

// A block's rows and the keys that they see.
struct FlashTile {
  int32_t seq = -1;  // -1: there is no such tile
  int32_t head = 0;
  int32_t q_begin = 0;  // of the tile's first row in q and out
  int32_t num_rows = 0;
  int32_t kv_begin = 0;
  int32_t kv_len = 0;     // 0 also if the last row sees no key
  int32_t offset = 0;     // the tile's row r sees keys j <= r + offset
  int32_t num_steps = 0;  // that hold a key which the last row sees, at least one
};

struct SeqLengths {
  int32_t q_len;
  int32_t kv_len;
  int32_t offset;
};
__device__ inline SeqLengths LengthsOf(const RaggedMhaParams& params, int32_t seq) {
  const int32_t q_len = params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
  const int32_t kv_len = params.cu_seqlens_kv[seq + 1] - params.cu_seqlens_kv[seq];
  return {q_len, kv_len,
          params.causal_offset != nullptr ? params.causal_offset[seq] : kv_len - q_len};
}
// 0 past the last sequence.
__device__ inline int32_t NumTilesOf(const RaggedMhaParams& params, int32_t seq) {
  if (seq >= params.num_seqs) return 0;
  return CeilDiv(params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq], kFlashRows);
}

// The tile at `row_begin` of a sequence, of no head yet.
__device__ inline FlashTile TileOf(const RaggedMhaParams& params, int32_t seq, int32_t row_begin) {
  const SeqLengths lengths = LengthsOf(params, seq);
  FlashTile tile;
  tile.seq = seq;
  tile.q_begin =
      (params.q_row_begin != nullptr ? params.q_row_begin[seq] : params.cu_seqlens_q[seq]) +
      row_begin;
  tile.num_rows = min(kFlashRows, lengths.q_len - row_begin);
  tile.kv_begin = params.cu_seqlens_kv[seq];
  tile.kv_len = lengths.kv_len;
  // Where all rows see all keys or none sees any, it does not matter by how much.
  tile.offset = static_cast<int32_t>(
      min(max(int64_t{lengths.offset} + row_begin, int64_t{-kFlashRows}), int64_t{lengths.kv_len}));
  const int32_t num_keys = min(max(tile.offset + tile.num_rows, 0), tile.kv_len);
  if (num_keys == 0) tile.kv_len = 0;
  tile.num_steps = max(CeilDiv(num_keys, kFlashKeys), 1);
  return tile;
}

// The functions below are a warp's work: its lanes take the sequences.

// Tiles of one head.
__device__ inline int32_t CountTiles(const RaggedMhaParams& params) {
  int32_t count = 0;
  for (int32_t seq = static_cast<int32_t>(threadIdx.x) % kWarpSize; seq < params.num_seqs;
       seq += kWarpSize) {
    count += NumTilesOf(params, seq);
  }
  return WarpSum(count);
}

// Tile `index` of one head in order of the sequences, of each its last rows first.
__device__ inline FlashTile FindTileInOrder(const RaggedMhaParams& params, int32_t index) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t first = 0; first < params.num_seqs; first += kWarpSize) {
    const int32_t count = NumTilesOf(params, first + lane);
    int32_t end = count;  // of this lane's tiles among those of the warp
    for (int32_t distance = 1; distance < kWarpSize; distance *= 2) {
      const int32_t below = __shfl_up_sync(kFullWarp, end, distance);
      if (lane >= distance) end += below;
    }
    const uint32_t lanes = __ballot_sync(kFullWarp, index < end);
    if (lanes == 0) {
      index -= __shfl_sync(kFullWarp, end, kWarpSize - 1);
      continue;
    }
    const int32_t found = __ffs(static_cast<int32_t>(lanes)) - 1;
    const int32_t from_end = __shfl_sync(kFullWarp, end, found) - 1 - index;
    return TileOf(params, first + found, from_end * kFlashRows);
  }
  return {};
}

// Tile `index` of one head in order of the keys that tiles see, most first, so that blocks end
// together; past kMaxSortedSeqs in order of the sequences.
__device__ inline FlashTile FindTile(const RaggedMhaParams& params, int32_t index) {
  constexpr int32_t kSeqsPerLane = kMaxSortedSeqs / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  if (params.num_seqs > kMaxSortedSeqs) return FindTileInOrder(params, index);
  // A sequence has tiles at levels [first, end).
  int32_t first[kSeqsPerLane], end[kSeqsPerLane], level = -1;
#pragma unroll
  for (int32_t i = 0; i < kSeqsPerLane; ++i) {
    const int32_t seq = i * kWarpSize + lane;
    first[i] = end[i] = 0;
    if (seq >= params.num_seqs) continue;
    const SeqLengths lengths = LengthsOf(params, seq);
    first[i] = min(max(lengths.offset, 0), lengths.kv_len) / kFlashRows;
    end[i] = first[i] + CeilDiv(lengths.q_len, kFlashRows);
    level = max(level, end[i] - 1);
  }
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    level = max(level, __shfl_xor_sync(kFullWarp, level, offset));
  }
  for (; level >= 0; --level) {
#pragma unroll
    for (int32_t i = 0; i < kSeqsPerLane; ++i) {
      if (i * kWarpSize >= params.num_seqs) continue;
      uint32_t lanes = __ballot_sync(kFullWarp, level >= first[i] && level < end[i]);
      const int32_t count = __popc(lanes);
      if (index >= count) {
        index -= count;
        continue;
      }
      for (; index > 0; --index) lanes &= lanes - 1;
      const int32_t found = __ffs(static_cast<int32_t>(lanes)) - 1;
      const int32_t first_level = __shfl_sync(kFullWarp, first[i], found);
      return TileOf(params, i * kWarpSize + found, (level - first_level) * kFlashRows);
    }
  }
  return {};
}

// Tile `index` of all heads, `heads_at_a_time` of them one group after the other, so that the keys
// of a group stay in the second-level cache.  `tiles_per_head`: CountTiles.
__device__ inline FlashTile FindTile(const RaggedMhaParams& params, int32_t heads_at_a_time,
                                     int32_t tiles_per_head, int64_t index) {
  if (index >= int64_t{tiles_per_head} * params.num_heads) return {};
  const int64_t per_group = int64_t{tiles_per_head} * heads_at_a_time;
  const auto first_head = static_cast<int32_t>(index / per_group) * heads_at_a_time;
  const auto within = static_cast<int32_t>(index % per_group);
  const int32_t heads = min(heads_at_a_time, params.num_heads - first_head);
  FlashTile tile = FindTile(params, within / heads);
  tile.head = first_head + within % heads;
  return tile;
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLASH_TILE_CUH_
