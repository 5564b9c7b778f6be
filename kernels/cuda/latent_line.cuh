// The line of key tiles that the thread blocks of LatentDecode share: sequence after sequence; of a
// sequence, vector tile after vector tile, each kVectors of its (row, head); of these, its keys in
// tiles of 64.  A block takes an even share of the line, whatever sequences it meets there.
//
// Where a row's heads are several whole vector tiles, each of these has a line of its own, a
// "lane", and every num_lines-th block: so they read a key at about the same time, all but one from
// the second-level cache.

#ifndef KERNELS_CUDA_LATENT_LINE_CUH_
#define KERNELS_CUDA_LATENT_LINE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/absorbed_decode.h"
#include "kernels/cuda/latent_decode.h"
#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {

inline constexpr int32_t kLatentTileKeys = 64;
inline constexpr int32_t kMaxLatentSeqs = 1024;

__device__ inline int32_t NumKeyTiles(int32_t kv_len) {
  return CeilDiv(max(kv_len, 0), kLatentTileKeys);
}

inline bool HasWholeTiles(int64_t num_heads, int64_t vectors) { return num_heads % vectors == 0; }
inline int32_t NumLines(int32_t num_heads, int32_t vectors) {
  return HasWholeTiles(num_heads, vectors) ? num_heads / vectors : 1;
}

// tiles_before[s]: tiles of a line before sequence s; [num_seqs]: its length.  All threads of the
// block; ends in a barrier.
template <int32_t kVectors>
__device__ void CountTiles(const AbsorbedDecodeParams& params, int32_t num_lines,
                           int32_t* tiles_before) {
  for (int32_t seq = threadIdx.x; seq < params.num_seqs; seq += blockDim.x) {
    const int32_t q_len = params.cu_seqlens_q[seq + 1] - params.cu_seqlens_q[seq];
    tiles_before[seq + 1] =
        CeilDiv(q_len * params.num_heads, kVectors) / num_lines * NumKeyTiles(params.kv_len[seq]);
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    // A lane has neighbouring sequences.
    const int32_t count = CeilDiv(params.num_seqs, kWarpSize);
    const int32_t begin = min(static_cast<int32_t>(threadIdx.x) * count, params.num_seqs);
    const int32_t end = min(begin + count, params.num_seqs);
    int32_t own = 0;
    for (int32_t seq = begin; seq < end; ++seq) own += tiles_before[seq + 1];
    int32_t before = own;
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const int32_t other = __shfl_up_sync(kFullWarp, before, offset);
      if (static_cast<int32_t>(threadIdx.x) >= offset) before += other;
    }
    before -= own;
    for (int32_t seq = begin; seq < end; ++seq) {
      before += tiles_before[seq + 1];
      tiles_before[seq + 1] = before;
    }
    if (threadIdx.x == 0) tiles_before[0] = 0;
  }
  __syncthreads();
}

// The number of a segment's partial, in the `share`-th block of its line.  Segments of a line
// differ in the vector tile, in the block, or in both, and both ascend: so their sum tells them
// apart.
template <int32_t kVectors>
__device__ int32_t PartialNumber(const AbsorbedDecodeParams& params, int32_t num_lines, int32_t seq,
                                 int32_t vector_tile, int32_t share) {
  const int32_t before = params.cu_seqlens_q[seq] * params.num_heads / kVectors;
  const int32_t rounding = params.num_heads % kVectors == 0 ? 0 : seq;
  return before + rounding + vector_tile + share * num_lines;
}

// Goes through [begin, end) of a line by segments: what there is of one sequence and vector tile.
template <int32_t kVectors>
class LineWalk {
 public:
  __device__ LineWalk(const AbsorbedDecodeParams& params, int32_t num_lines, int32_t line,
                      const int32_t* tiles_before, int32_t begin, int32_t end)
      : params_(params), num_lines_(num_lines), line_(line), left_(end - begin) {
    if (done()) return;
    int32_t past = params.num_seqs;  // seq_: the last sequence that begins at or before `begin`
    while (past - seq_ > 1) {
      const int32_t middle = (seq_ + past) / 2;
      if (tiles_before[middle] <= begin) {
        seq_ = middle;
      } else {
        past = middle;
      }
    }
    ReadSequence();
    const int32_t at = begin - tiles_before[seq_];
    vector_tile_ = at / num_tiles_ * num_lines + line;
    tile_begin_ = at % num_tiles_;
    tile_end_ = min(num_tiles_, tile_begin_ + left_);
  }

  __device__ bool done() const { return left_ <= 0; }
  __device__ void Advance() {
    left_ -= tile_end_ - tile_begin_;
    if (done()) return;
    vector_tile_ += num_lines_;
    if (vector_tile_ * kVectors >= num_vectors()) {
      vector_tile_ = line_;
      do {
        ++seq_;
        ReadSequence();
      } while (num_tiles_ == 0 || q_len_ == 0);
    }
    tile_begin_ = 0;
    tile_end_ = min(num_tiles_, left_);
  }

  // Of the segment.
  __device__ int32_t seq() const { return seq_; }
  __device__ int32_t q_begin() const { return q_begin_; }
  __device__ int32_t q_len() const { return q_len_; }
  __device__ int32_t kv_len() const { return kv_len_; }
  __device__ int32_t num_vectors() const { return q_len_ * params_.num_heads; }  // the sequence's
  __device__ int32_t vector_tile() const { return vector_tile_; }
  __device__ int32_t tile_begin() const { return tile_begin_; }  // of the sequence's key tiles
  __device__ int32_t tile_end() const { return tile_end_; }

 private:
  __device__ void ReadSequence() {
    q_begin_ = params_.cu_seqlens_q[seq_];
    q_len_ = params_.cu_seqlens_q[seq_ + 1] - q_begin_;
    kv_len_ = params_.kv_len[seq_];
    num_tiles_ = NumKeyTiles(kv_len_);
  }

  const AbsorbedDecodeParams& params_;
  const int32_t num_lines_;
  const int32_t line_;
  int32_t left_;
  int32_t seq_ = 0;
  int32_t q_begin_ = 0;
  int32_t q_len_ = 0;
  int32_t kv_len_ = 0;
  int32_t num_tiles_ = 0;
  int32_t vector_tile_ = 0;
  int32_t tile_begin_ = 0;
  int32_t tile_end_ = 0;
};

// Where the combining kernel finds the partials of this block's share of the sequences; the work of
// the block's first num_threads.
template <int32_t kVectors>
__device__ void WritePlaces(const AbsorbedDecodeParams& params, int32_t num_lines,
                            const int32_t* tiles_before, int32_t tiles_per_block,
                            int32_t num_threads, int2* places) {
  // From the last block on: with few tiles it has none.
  for (auto seq = static_cast<int32_t>(gridDim.x - 1 - blockIdx.x); seq < params.num_seqs;
       seq += static_cast<int32_t>(gridDim.x)) {
    const int32_t row_begin = params.cu_seqlens_q[seq];
    const int32_t vectors = (params.cu_seqlens_q[seq + 1] - row_begin) * params.num_heads;
    const int32_t tiles = NumKeyTiles(params.kv_len[seq]);
    for (int32_t i = threadIdx.x; i < vectors; i += num_threads) {
      const int32_t vector_tile = i / kVectors;
      const int32_t begin = tiles_before[seq] + vector_tile / num_lines * tiles;
      const int32_t first = begin / tiles_per_block;
      const int32_t last = (begin + tiles - 1) / tiles_per_block;
      const int32_t partial = PartialNumber<kVectors>(params, num_lines, seq, vector_tile, first);
      places[int64_t{row_begin} * params.num_heads + i] =
          make_int2(partial * kVectors + i % kVectors, tiles == 0 ? 0 : last - first + 1);
    }
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_LATENT_LINE_CUH_
