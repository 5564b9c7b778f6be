// Tiles handed out while a grid works: a block takes the next one when it gets to it, so that all
// blocks end at about the same time whatever their tiles cost.  One thread of the block draws turns
// from a counter that the grid's blocks share and gives them to the block's other warps.

#ifndef KERNELS_CUDA_TILE_TURNS_CUH_
#define KERNELS_CUDA_TILE_TURNS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/expert_tiles.cuh"
#include "kernels/cuda/launch.cuh"

namespace kernels::cuda {

class TileTurns {
 public:
  struct Shared {
    ExpertTile tiles[2];
    Barrier given[2];
    Barrier taken[2];
  };
  // Every thread of the block; its barrier stands between this and the first turn.  `num_drawn`: 0
  // when the grid starts.  `takers`: how many calls of Take a tile has.
  __device__ TileTurns(Shared& shared, int32_t* num_drawn, int32_t takers)
      : shared_(shared), num_drawn_(num_drawn) {
    if (threadIdx.x != 0) return;
    for (int32_t i = 0; i < 2; ++i) {
      InitBarrier(&shared.given[i], 1);
      InitBarrier(&shared.taken[i], takers);
    }
    PublishBarriers();
  }

  // The giving thread: a block's first turn is its own number, the others are drawn.
  __device__ int32_t Draw() const {
    return static_cast<int32_t>(gridDim.x) + atomicAdd(num_drawn_, 1);
  }
  // A tile without rows ends the block.
  __device__ void Give(const ExpertTile& tile) {
    WaitFor(&shared_.taken[at_.stage], at_.parity ^ 1);
    shared_.tiles[at_.stage] = tile;
    Arrive(&shared_.given[at_.stage]);
    at_.Advance();
  }
  // The others, a thread by itself or a warp: the next tile; false: there is none.
  __device__ bool Take(bool is_warp, ExpertTile& tile) {
    WaitFor(&shared_.given[at_.stage], at_.parity);
    tile = shared_.tiles[at_.stage];
    if (is_warp) __syncwarp();
    if (!is_warp || threadIdx.x % kWarpSize == 0) Arrive(&shared_.taken[at_.stage]);
    at_.Advance();
    return tile.num_rows > 0;
  }

 private:
  Shared& shared_;
  int32_t* const num_drawn_;
  RingPosition<2> at_;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TILE_TURNS_CUH_
