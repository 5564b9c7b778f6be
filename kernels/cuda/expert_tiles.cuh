// The tiles of an ExpertProduct and their order: tiles of up to tile_tokens rows by a number of the
// output's columns.

#ifndef KERNELS_CUDA_EXPERT_TILES_CUH_
#define KERNELS_CUDA_EXPERT_TILES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cache_policy.h"
#include "kernels/cuda/expert_products.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/moe.h"

namespace kernels::cuda {

struct ExpertTile {
  int32_t expert;     // -1: the shared one
  int32_t row_begin;  // of the operand
  int32_t num_rows;
  int32_t column_begin;
  bool is_down;  // of the second product, where one grid does both

  __device__ bool is_shared() const { return expert < 0; }
};

// Where every expert's slots and row tiles begin; the last entry is their number.
struct TileTable {
  int32_t slot_begin[kMaxExperts + 1];
  int32_t tile_begin[kMaxExperts + 1];
};

// Counts experts' slots from the choices themselves, to where the table will say where their tiles
// begin; the block's work.
__device__ inline void CountSlots(const int32_t* ids, int32_t num_slots, int32_t num_experts,
                                  TileTable& table) {
  const auto threads = static_cast<int32_t>(blockDim.x);
  for (int32_t e = threadIdx.x; e < num_experts; e += threads) table.tile_begin[e] = 0;
  __syncthreads();
  for (int32_t i = threadIdx.x; i < num_slots; i += threads) {
    atomicAdd(&table.tile_begin[ids[i]], 1);
  }
  __syncthreads();
}

// The first warp's work, before the block's barrier.  `counts` may be what CountSlots counted.
__device__ inline void MakeTable(const ExpertProduct& product, const int32_t* counts,
                                 int32_t tile_tokens, TileTable& table) {
  if (threadIdx.x >= kWarpSize) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  int32_t slots = 0, tiles = 0;
  for (int32_t begin = 0; begin < product.num_experts; begin += kWarpSize) {
    const int32_t expert = begin + lane;
    const int32_t count = expert < product.num_experts ? counts[expert] : 0;
    const int32_t num_tiles = CeilDiv(count, tile_tokens);
    int32_t slots_to = count, tiles_to = num_tiles;
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const int32_t more_slots = __shfl_up_sync(kFullWarp, slots_to, offset);
      const int32_t more_tiles = __shfl_up_sync(kFullWarp, tiles_to, offset);
      if (lane >= offset) {
        slots_to += more_slots;
        tiles_to += more_tiles;
      }
    }
    if (expert < product.num_experts) {
      table.slot_begin[expert] = slots + slots_to - count;
      table.tile_begin[expert] = tiles + tiles_to - num_tiles;
    }
    slots += __shfl_sync(kFullWarp, slots_to, kWarpSize - 1);
    tiles += __shfl_sync(kFullWarp, tiles_to, kWarpSize - 1);
  }
  if (lane == 0) {
    table.slot_begin[product.num_experts] = slots;
    table.tile_begin[product.num_experts] = tiles;
  }
}

// Part `index` of `count` rows that `num_parts` tiles share evenly, in steps of kTokenStep.
struct Share {
  __device__ Share(int32_t count_of_all, int32_t num_parts, int32_t index) {
    const int32_t steps = CeilDiv(count_of_all, kTokenStep);
    const int32_t of_each = steps / num_parts, more = steps % num_parts;
    begin = kTokenStep * (index * of_each + min(index, more));
    count = min(kTokenStep * (of_each + (index < more ? 1 : 0)), count_of_all - begin);
  }
  int32_t begin;
  int32_t count;
};

// All tiles of kColumns columns, by turn.
template <int32_t kColumns>
class TileOrder {
 public:
  // The table is made.
  __device__ TileOrder(const ExpertProduct& product, int32_t tile_tokens, const TileTable& table)
      : product_(product), table_(table) {
    const auto column_tiles = [](int64_t columns) {
      return static_cast<int32_t>(CeilDiv(columns, int64_t{kColumns}));
    };
    column_tiles_ = column_tiles(product.columns);
    shared_row_tiles_ = CeilDiv(product.shared_rows, tile_tokens);
    shared_tiles_ = shared_row_tiles_ * column_tiles(product.shared_columns);
    num_turns_ = table.tile_begin[product.num_experts] * column_tiles_ + shared_tiles_;
    const auto blocks = static_cast<int32_t>(gridDim.x);
    shared_end_ = shared_tiles_ <= blocks ? shared_tiles_
                                          : max(shared_tiles_, num_turns_ - kTurnsAtEnd * blocks);
  }

  __device__ int32_t num_turns() const { return num_turns_; }
  // Of an expert, -1 the shared one.
  __device__ int32_t TilesOf(int32_t expert) const {
    return expert < 0 ? shared_tiles_
                      : (table_.tile_begin[expert + 1] - table_.tile_begin[expert]) * column_tiles_;
  }
  __device__ ExpertTile TileAt(int32_t turn) const {
    const int32_t before = SharedBefore(turn);
    if (SharedBefore(turn + 1) == before) return RoutedTile(turn - before);
    const Share share(product_.shared_rows, shared_row_tiles_, before % shared_row_tiles_);
    return {-1, share.begin, share.count, before / shared_row_tiles_ * kColumns, false};
  }

 private:
  // Tiles of the shared expert begin, if they are few.  Many of them, whose weights are few, stand
  // spread among the others, whose weights keep the memory busy, but not at the end: they are long.
  static constexpr int32_t kTurnsAtEnd = 2;
  __device__ int32_t SharedBefore(int32_t turn) const {
    if (turn >= shared_end_) return shared_tiles_;
    return static_cast<int32_t>(int64_t{turn} * shared_tiles_ / shared_end_);
  }
  // An expert's tiles with the same weights follow each other.
  __device__ ExpertTile RoutedTile(int32_t index) const {
    const int32_t row_tile = index / column_tiles_;
    int32_t expert = 0,
            end = product_.num_experts;  // tile_begin[expert] <= row_tile < tile_begin[end]
    while (end - expert > 1) {
      const int32_t middle = (expert + end) / 2;
      (table_.tile_begin[middle] <= row_tile ? expert : end) = middle;
    }
    const int32_t count = table_.slot_begin[expert + 1] - table_.slot_begin[expert];
    const int32_t num_tiles = table_.tile_begin[expert + 1] - table_.tile_begin[expert];
    const int32_t within = index - table_.tile_begin[expert] * column_tiles_;
    const Share share(count, num_tiles, within % num_tiles);
    return {expert, table_.slot_begin[expert] + share.begin, share.count,
            within / num_tiles * kColumns, false};
  }

  const ExpertProduct& product_;
  const TileTable& table_;
  int32_t column_tiles_;
  int32_t shared_row_tiles_;
  int32_t shared_tiles_;
  int32_t shared_end_;  // none of them from this turn on
  int32_t num_turns_;
};

// Of a tile's expert.
__device__ inline int64_t DepthOf(const ExpertProduct& product, const ExpertTile& tile) {
  return tile.is_shared() ? product.shared_depth : product.depth;
}
__device__ inline int64_t ColumnsOf(const ExpertProduct& product, const ExpertTile& tile) {
  return tile.is_shared() ? product.shared_columns : product.columns;
}
// The tile's first row of the output.
__device__ inline uint16_t* OutputOf(const ExpertProduct& product, const ExpertTile& tile) {
  return (tile.is_shared() ? product.shared_out : product.out) +
         tile.row_begin * ColumnsOf(product, tile);
}
// The weights' box of 64 rows from `row` of the tile's 256 on: with `swiglu` the first half are
// rows of `first`, the second half the same of `second`.
__device__ inline void CopyWeightBox(const ExpertProduct& product, const ExpertTile& tile,
                                     bool swiglu, uint16_t* to, Barrier* barrier, int32_t k,
                                     int32_t row) {
  constexpr int32_t kHalf = 128;
  const bool is_second = swiglu && row >= kHalf;
  const CUtensorMap* map = tile.is_shared()
                               ? (is_second ? &product.shared_second : &product.shared_first)
                               : (is_second ? &product.second : &product.first);
  const int32_t from = tile.column_begin + row - (is_second ? kHalf : 0);
  if (product.rows_stay && !tile.is_shared()) {
    CopyBox(to, map, barrier, k, from, tile.expert, kEvictFirst);
  } else {
    CopyBox(to, map, barrier, k, from, max(tile.expert, 0));
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_EXPERT_TILES_CUH_
