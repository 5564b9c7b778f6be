// Tiles of A W^T for many rows: 128 rows by 128 or 256 columns, bf16 operands and float32 sums.
// A block stays and takes tile after tile.  One thread has the copy engine fill a ring of stages,
// 64 of the depth each, and runs ahead of the warpgroups that multiply, into the next tile too; a
// warpgroup stores its rows while the others multiply theirs.
//
// Every sum is over the depth in ascending order, in a tree that the hardware fixes: a row's bits
// do not depend on the other rows, nor on its place in the tile.

#ifndef KERNELS_CUDA_GEMM_TILE_CUH_
#define KERNELS_CUDA_GEMM_TILE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

inline constexpr int32_t kGemmRows = 2 * kProductRows;  // 64 a warpgroup
inline constexpr int32_t kGemmDepth = kBoxColumns;
inline constexpr int32_t kGemmWarps = 8;                        // that multiply
inline constexpr int32_t kGemmThreads = 3 * kWarpgroupThreads;  // the last ones copy
inline constexpr size_t kBoxAlignment = 1024;                   // bytes

template <int32_t kColumns>
struct GemmShared {
  static constexpr int32_t kStages = kColumns == 128 ? 6 : 4;
  uint16_t a[kStages][kGemmRows * kGemmDepth];
  uint16_t w[kStages][kColumns * kGemmDepth];
  Barrier full[kStages];
  Barrier empty[kStages];
};
template <int32_t kColumns>
inline constexpr size_t kGemmSharedBytes = sizeof(GemmShared<kColumns>) + kBoxAlignment;

template <typename T>
__device__ T& AlignedShared() {
  const auto address = reinterpret_cast<uintptr_t>(DynamicShared());
  return *reinterpret_cast<T*>((address + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment);
}

// A thread's part in a block's tiles.  All threads take the same tiles, in the same order: those of
// the warpgroup that copies by Copy, the others by Multiply.
template <int32_t kColumns>
class GemmThread {
 public:
  using Shared = GemmShared<kColumns>;
  static constexpr int32_t kSums = kColumns / 2;  // of a thread

  // Every thread of the block.
  __device__ explicit GemmThread(Shared& shared) : shared_(shared) {
    if (threadIdx.x == 0) {
      for (int32_t s = 0; s < Shared::kStages; ++s) {
        InitBarrier(&shared.full[s], 1);
        InitBarrier(&shared.empty[s], kGemmWarps);
      }
      PublishBarriers();
    }
    __syncthreads();
  }

  __device__ bool copies() const { return warp_ >= kGemmWarps; }
  // What sums[4 j + 2 i] and the one after it belong to: row Row(i) of the tile, i < 2; columns
  // Column(j) and + 1, j < kColumns / 8.
  __device__ int32_t Row(int32_t i) const { return 16 * warp_ + lane_ / 4 + 8 * i; }
  __device__ int32_t Column(int32_t j) const { return 8 * j + 2 * (lane_ % 4); }

  // copy_a(to, barrier, k, r) fetches the box of rows r .. r + 63 of the tile from depth k on,
  // copy_w(to, barrier, k, c) that of its columns c .. c + 63.
  template <typename CopyA, typename CopyW>
  __device__ void Copy(int64_t depth, int32_t num_rows, CopyA copy_a, CopyW copy_w) {
    if (threadIdx.x % kWarpgroupThreads != 0) return;
    const int32_t row_boxes = CeilDiv(num_rows, kBoxRows);
    const auto bytes =
        static_cast<uint32_t>((row_boxes + kColumns / kBoxRows) * kBoxElements * sizeof(uint16_t));
    for (int64_t begin = 0; begin < depth; begin += kGemmDepth, at_.Advance()) {
      const int32_t k = static_cast<int32_t>(begin);
      Barrier* full = &shared_.full[at_.stage];
      WaitFor(&shared_.empty[at_.stage], at_.parity ^ 1);
      ArriveAndExpect(full, bytes);
      for (int32_t column = 0; column < kColumns; column += kBoxRows) {
        copy_w(shared_.w[at_.stage] + column * kGemmDepth, full, k, column);
      }
      for (int32_t box = 0; box < row_boxes; ++box) {
        copy_a(shared_.a[at_.stage] + box * kBoxElements, full, k, box * kBoxRows);
      }
    }
  }

  // The block's registers go to those who need them; before the first tile.
  __device__ void BeginCopying() const { GiveRegisters<40>(); }
  __device__ void BeginMultiplying() const { TakeRegisters<232>(); }

  // The sums of the tile's first `num_rows` rows; of others nothing that can be used.
  __device__ void Multiply(int64_t depth, int32_t num_rows, float (&sums)[kSums]) {
    const int32_t a_begin = warp_ / 4 * kBoxElements;
    const bool multiplies = warp_ / 4 * kProductRows < num_rows;
    Barrier* previous = nullptr;
    for (int64_t begin = 0; begin < depth; begin += kGemmDepth, at_.Advance()) {
      WaitFor(&shared_.full[at_.stage], at_.parity);
      if (multiplies) {
        KeepSums(sums);
        BeginProducts();
#pragma unroll
        for (int32_t k = 0; k < kGemmDepth; k += kProductDepth) {
          cuda::Multiply(sums, DescribeRows(shared_.a[at_.stage] + a_begin + k),
                         DescribeRows(shared_.w[at_.stage] + k), begin > 0 || k > 0);
        }
        CommitProducts();
        KeepSums(sums);
        WaitForProducts<1>();  // the products before these are done, and their stage is free
      }
      if (previous != nullptr && lane_ == 0) Arrive(previous);
      previous = &shared_.empty[at_.stage];
    }
    WaitForProducts<0>();
    KeepSums(sums);
    if (previous != nullptr && lane_ == 0) Arrive(previous);
  }

 private:
  Shared& shared_;
  const int32_t warp_ = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane_ = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  RingPosition<Shared::kStages> at_;
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GEMM_TILE_CUH_
