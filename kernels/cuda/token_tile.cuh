// Tiles of W A^T for a few to many rows: 256 rows of weights by up to 128 tokens, bf16 operands and
// float32 sums.  The weights are what a warpgroup's product has 64 rows of, the tokens its columns,
// so that a tile costs what it has tokens, in steps of 16.  A block stays and takes tile after
// tile. One thread has the copy engine fetch weights and another tokens into a ring of stages, 64
// of the depth each; they run ahead of the warpgroups that multiply, into the next tile too.
//
// Every sum is over the depth in ascending order, in a tree that the hardware fixes: a token's bits
// do not depend on the other tokens, nor on its place in the tile.

#ifndef KERNELS_CUDA_TOKEN_TILE_CUH_
#define KERNELS_CUDA_TOKEN_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/expert_tiles.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/token_product.cuh"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

inline constexpr int32_t kTileBoxes = 4;  // of weights: two of 64 rows a warpgroup
inline constexpr int32_t kTileStages = 4;
inline constexpr int32_t kMultiplyWarps = 8;
inline constexpr int32_t kTokenTileThreads = 3 * kWarpgroupThreads;  // the last ones copy

struct TokenTileShared {
  uint16_t weights[kTileStages][kTileBoxes * kBoxElements];
  uint16_t tokens[kTileStages][kTileTokens * kBoxColumns];
  Barrier full[kTileStages];
  Barrier empty[kTileStages];
};
inline constexpr size_t kTokenTileSharedBytes = sizeof(TokenTileShared) + kBoxAlignment;

// A thread's part in a block's tiles.  All threads take the same tiles, in the same order: one
// thread by CopyWeights, one by CopyTokens, the multiplying warps by Multiply.
class TokenTileThread {
 public:
  // Every thread of the block.
  __device__ explicit TokenTileThread(TokenTileShared& shared) : shared_(shared) {
    if (threadIdx.x == 0) {
      for (int32_t s = 0; s < kTileStages; ++s) {
        InitBarrier(&shared.full[s], 2);
        InitBarrier(&shared.empty[s], kMultiplyWarps);
      }
      PublishBarriers();
    }
    __syncthreads();
  }

  __device__ bool multiplies() const { return warp_ < kMultiplyWarps; }
  __device__ bool copies_weights() const { return warp_ == kMultiplyWarps && lane_ == 0; }
  __device__ bool copies_tokens() const { return warp_ == kMultiplyWarps + 1 && lane_ == 0; }

  // copy(to, barrier, k, row) fetches rows row .. row + 63 of the weights from depth k on.
  template <typename CopyBoxOfWeights>
  __device__ void CopyWeights(int64_t depth, CopyBoxOfWeights copy) {
    CopyStages<uint16_t[kTileBoxes * kBoxElements], kBoxElements>(
        shared_.weights, depth, kTileBoxes,
        [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t box) {
          copy(to, barrier, k, box * kBoxRows);
        });
  }
  // copy(to, barrier, k, i) fetches tokens i .. i + 15 of the tile.
  template <typename CopyBoxOfTokens>
  __device__ void CopyTokens(int64_t depth, int32_t num_tokens, CopyBoxOfTokens copy) {
    CopyStages<uint16_t[kTileTokens * kBoxColumns], kTokenStep * kBoxColumns>(
        shared_.tokens, depth, CeilDiv(num_tokens, kTokenStep),
        [&](uint16_t* to, Barrier* barrier, int32_t k, int32_t box) {
          copy(to, barrier, k, box * kTokenStep);
        });
  }

  // Adds to sums[h] the product of this warpgroup's rows of box 2 h and box 2 h + 1, for kTokens
  // tokens.
  template <int32_t kTokens>
  __device__ void Multiply(int64_t depth, float (&sums)[2][kTokens / 2]) {
    const int32_t box = warp_ / 4;
    Barrier* previous = nullptr;
    for (int64_t begin = 0; begin < depth; begin += kBoxColumns) {
      WaitFor(&shared_.full[at_.stage], at_.parity);
      KeepSums(sums[0]);
      KeepSums(sums[1]);
      BeginProducts();
      const uint16_t* weights = shared_.weights[at_.stage] + box * kBoxElements;
#pragma unroll
      for (int32_t k = 0; k < kBoxColumns; k += kProductDepth) {
        const uint64_t tokens = DescribeRows(shared_.tokens[at_.stage] + k);
        MultiplyTokens(sums[0], DescribeRows(weights + k), tokens);
        MultiplyTokens(sums[1], DescribeRows(weights + 2 * kBoxElements + k), tokens);
      }
      CommitProducts();
      KeepSums(sums[0]);
      KeepSums(sums[1]);
      WaitForProducts<1>();  // the products before these are done, and their stage is free
      if (previous != nullptr && lane_ == 0) Arrive(previous);
      previous = &shared_.empty[at_.stage];
      at_.Advance();
      if (!IsDone(&shared_.full[at_.stage], at_.parity)) {
        WaitForProducts<0>();  // there is time to free this stage too
        if (lane_ == 0) Arrive(previous);
        previous = nullptr;
      }
    }
    WaitForProducts<0>();
    KeepSums(sums[0]);
    KeepSums(sums[1]);
    if (previous != nullptr && lane_ == 0) Arrive(previous);
  }

  // Bf16 results at(i, j, c): the product's row i of this thread's two, token 8 j + 2 t + c, t the
  // lane's place of four.  store(column, token, word) takes two neighbouring rows of the first box,
  // which are columns of the output, of one token.
  template <int32_t kTokens, typename At, typename Store>
  __device__ void StoreTransposed(At at, Store store) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int32_t j = 0; j < kTokens / 8; ++j) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        const uint32_t word = TransposeMatrix(PackBfloat16(at(i, j, 0), at(i, j, 1)));
        store(16 * warp_ + 8 * i + 2 * t, 8 * j + g, word);
      }
    }
  }

 private:
  template <typename Stage, int32_t kElements, typename Copy>
  __device__ void CopyStages(Stage (&stages)[kTileStages], int64_t depth, int32_t num_boxes,
                             Copy copy) {
    const auto bytes = static_cast<uint32_t>(num_boxes * kElements * sizeof(uint16_t));
    for (int64_t begin = 0; begin < depth; begin += kBoxColumns, at_.Advance()) {
      Barrier* full = &shared_.full[at_.stage];
      WaitFor(&shared_.empty[at_.stage], at_.parity ^ 1);
      ArriveAndExpect(full, bytes);
      for (int32_t box = 0; box < num_boxes; ++box) {
        copy(stages[at_.stage] + box * kElements, full, static_cast<int32_t>(begin), box);
      }
    }
  }

  TokenTileShared& shared_;
  const int32_t warp_ = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane_ = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  RingPosition<kTileStages> at_;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TOKEN_TILE_CUH_
