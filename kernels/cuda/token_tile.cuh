// Tiles of W A^T for a few to many rows: 256 rows of weights by up to 160 or 192 tokens, bf16
// operands and float32 sums.  The weights are what a warpgroup's product has 64 rows of, the tokens
// its columns, so that a tile costs what it has tokens, in steps of 16.  A block stays and takes
// tile after tile.  One thread has the copy engine fetch weights and another tokens into a ring of
// stages, 64 of the depth each; they run ahead of the warpgroups that multiply, into the next tile
// too.
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
inline constexpr int32_t kMultiplyWarps = 8;
inline constexpr int32_t kTokenTileThreads = 3 * kWarpgroupThreads;  // the last ones copy
inline constexpr int32_t kStoreTokens = 32;                          // of results on their way out
inline constexpr int32_t kStoreValues = 8;                           // 16 bytes

// For tiles of up to kTokens tokens: as many stages as there is room for.
template <int32_t kTokens>
struct TokenTileShared {
  static constexpr int32_t kStages = kTokens <= 160 ? 4 : 3;

  uint16_t weights[kStages][kTileBoxes * kBoxElements];
  uint16_t tokens[kStages][kTokens * kBoxColumns];
  uint16_t results[2][kStoreTokens * kBoxRows];  // of a warpgroup
  Barrier full[kStages];
  Barrier empty[kStages];
};

// A thread's part in a block's tiles.  All threads take the same tiles, in the same order: one
// thread by CopyWeights, one by CopyTokens, the multiplying warps by Multiply.
template <int32_t kTileTokens>
class TokenTileThread {
 public:
  using Shared = TokenTileShared<kTileTokens>;
  static constexpr int32_t kStages = Shared::kStages;
  static constexpr int32_t kMaxTokens = kTileTokens;
  static constexpr size_t kSharedBytes = sizeof(Shared) + kBoxAlignment;

  // Every thread of the block.
  __device__ explicit TokenTileThread(Shared& shared) : shared_(shared) {
    if (threadIdx.x == 0) {
      for (int32_t s = 0; s < kStages; ++s) {
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
  // lane's place of four.  store(column, token, values) takes eight neighbouring rows of the first
  // box, which are columns of the output, of one token.
  template <int32_t kTokens, typename At, typename Store>
  __device__ void StoreTransposed(At at, Store store) {
    constexpr int32_t kPieces = kBoxRows / kStoreValues;  // of a token's line
    const int32_t group = warp_ / 4, thread = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
    uint16_t* lines = shared_.results[group];
    const auto piece_at = [&](int32_t token, int32_t piece) {
      return lines + token * kBoxRows + (piece ^ token % kPieces) * kStoreValues;
    };
#pragma unroll
    for (int32_t begin = 0; begin < kTokens; begin += kStoreTokens) {
      WaitForGroup(group);  // the lines before these are read
#pragma unroll
      for (int32_t m = begin; m < min(begin + kStoreTokens, kTokens); m += 16) {
        const int32_t j = m / 8;
        StoreMatricesTransposed(
            piece_at(m - begin + 8 * (lane_ / 16) + lane_ % 8, 2 * (warp_ % 4) + lane_ / 8 % 2),
            PackBfloat16(at(0, j, 0), at(0, j, 1)), PackBfloat16(at(1, j, 0), at(1, j, 1)),
            PackBfloat16(at(0, j + 1, 0), at(0, j + 1, 1)),
            PackBfloat16(at(1, j + 1, 0), at(1, j + 1, 1)));
      }
      WaitForGroup(group);
#pragma unroll
      for (int32_t i = 0; i < min(kStoreTokens, kTokens - begin) / 16; ++i) {
        const int32_t token = 16 * i + thread / kPieces, piece = thread % kPieces;
        store(group * kBoxRows + piece * kStoreValues, begin + token,
              *reinterpret_cast<const uint4*>(piece_at(token, piece)));
      }
    }
  }

 private:
  // Of this thread's warpgroup.
  __device__ static void WaitForGroup(int32_t group) {
    asm volatile("bar.sync %0, %1;" : : "r"(1 + group), "n"(kWarpgroupThreads) : "memory");
  }
  template <typename Stage, int32_t kElements, typename Copy>
  __device__ void CopyStages(Stage (&stages)[kStages], int64_t depth, int32_t num_boxes,
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

  Shared& shared_;
  const int32_t warp_ = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane_ = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  RingPosition<kStages> at_;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_TOKEN_TILE_CUH_
