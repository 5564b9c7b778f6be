// The tiles of ragged attention: 128 rows of a sequence and the keys that they see.

#ifndef KERNELS_CUDA_FLASH_TILE_CUH_
#define KERNELS_CUDA_FLASH_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/ragged_mha.h"

namespace kernels::cuda {

inline constexpr int32_t kFlashRows = 128;  // 64 a warpgroup
inline constexpr int32_t kMaxSortedSeqs = 4 * kWarpSize;

// A block's rows and the keys that they see.
struct FlashTile {
  int32_t seq = -1;       // -1: there is no such tile
  int32_t row_begin = 0;  // within the sequence
  int32_t num_rows = 0;
  int64_t q_begin = 0;  // of the tile's first row in q and out
  int64_t kv_begin = 0;
  int64_t num_keys = 0;  // that the last row sees
  int64_t kv_len = 0;
  int64_t offset = 0;  // the tile's row r sees keys j <= r + offset
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

// The tile at `row_begin` of a sequence.
__device__ inline FlashTile TileOf(const RaggedMhaParams& params, int32_t seq, int32_t row_begin) {
  const SeqLengths lengths = LengthsOf(params, seq);
  FlashTile tile;
  tile.seq = seq;
  tile.row_begin = row_begin;
  tile.num_rows = min(kFlashRows, lengths.q_len - row_begin);
  tile.q_begin =
      (params.q_row_begin != nullptr ? params.q_row_begin[seq] : params.cu_seqlens_q[seq]) +
      row_begin;
  tile.kv_begin = params.cu_seqlens_kv[seq];
  tile.kv_len = lengths.kv_len;
  tile.offset = int64_t{lengths.offset} + row_begin;
  tile.num_keys = min(max(tile.offset + tile.num_rows, int64_t{0}), tile.kv_len);
  return tile;
}

// Tile `index` in order of the keys that tiles see, most first, so that blocks end together; past
// kMaxSortedSeqs in order of the sequences.  A warp's work: its lanes take the sequences.
__device__ inline FlashTile FindFlashTile(const RaggedMhaParams& params, int32_t index) {
  constexpr int32_t kSeqsPerLane = kMaxSortedSeqs / kWarpSize;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  if (params.num_seqs > kMaxSortedSeqs) {
    for (int32_t seq = 0; seq < params.num_seqs; ++seq) {
      const int32_t count = CeilDiv(LengthsOf(params, seq).q_len, kFlashRows);
      if (index < count) return TileOf(params, seq, (count - 1 - index) * kFlashRows);
      index -= count;
    }
    return {};
  }
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

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_FLASH_TILE_CUH_
