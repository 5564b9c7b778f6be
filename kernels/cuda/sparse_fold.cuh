// Parts of a row, folded by the blocks of a cluster: each leaves its part's values in its shared
// memory, and folds those of its share of the heads from all of them.

#ifndef KERNELS_CUDA_SPARSE_FOLD_CUH_
#define KERNELS_CUDA_SPARSE_FOLD_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sparse_block.cuh"
#include "kernels/cuda/sparse_result.cuh"

namespace kernels::cuda {

// The largest of the warp's values, in every lane.
__device__ inline float WarpMax(float value) {
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// Four numbers that the cluster's block `rank` has where `shared` is here, and one.
__device__ inline float4 LoadFourFromRank(const float* shared, uint32_t rank) {
  float4 four;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(AddressInRank(shared, rank))
               : "memory");
  return four;
}
__device__ inline float LoadFloatFromRank(const float* shared, uint32_t rank) {
  return __uint_as_float(LoadFromRank(reinterpret_cast<const uint32_t*>(shared), rank));
}

// A block's part of a row, where its keys were.
struct SparsePartResult {
  // [kSparseHeads, kSparseValueDim]; eights of a head's values change places by PlaceInPart.
  float* values;
  float* lse;  // [kSparseHeads]
};
template <int32_t kBoxes>
__device__ inline SparsePartResult PartResult(SparseShared<kBoxes>& shared) {
  static_assert(sizeof(shared.k) >= kSparseHeads * kSparseValueDim * sizeof(float));
  static_assert(sizeof(shared.bases) >= kSparseHeads * sizeof(float));
  return {reinterpret_cast<float*>(shared.k), reinterpret_cast<float*>(shared.bases)};
}
// So that threads with neighbouring heads reach different banks.
__device__ inline int32_t PlaceInPart(int32_t head, int32_t column) {
  return head * kSparseValueDim + (column ^ head % 8 * 8);
}

// Stores a part as it is, whole lines at a time: threads that attend have eight rows of a line's
// quarter each.  Of all warps that attend, after a barrier of theirs.
__device__ inline void StorePart(const SparsePartResult& own, int32_t num_heads,
                                 const SparseTarget& target) {
  constexpr int32_t kPieces = kSparseValueDim / 4 / kWarpSize;  // of a lane, 4 values each
  const int32_t column = 4 * (static_cast<int32_t>(threadIdx.x) % kWarpSize);
#pragma unroll 2
  for (int32_t head = static_cast<int32_t>(threadIdx.x) / kWarpSize; head < num_heads;
       head += kSparseProductWarps) {
    float* to = target.values + head * target.head_stride;
#pragma unroll
    for (int32_t j = 0; j < kPieces; ++j) {
      const int32_t at = column + 4 * kWarpSize * j;
      *reinterpret_cast<float4*>(to + at) =
          *reinterpret_cast<const float4*>(own.values + PlaceInPart(head, at));
    }
  }
  if (target.lse == nullptr) return;
  for (int32_t head = static_cast<int32_t>(threadIdx.x); head < num_heads;
       head += 2 * kWarpgroupThreads) {
    target.lse[head * target.lse_stride] = own.lse[head];
  }
}

// Folds this block's share of the heads into `target`, which is the row's.  Of all
// warps that attend, between two barriers of the cluster.
__device__ inline void FoldParts(const SparsePartResult& own, const SparseArgs& args, int32_t row,
                                 int32_t num_heads, const SparseTarget& target) {
  constexpr int32_t kPieces = kSparseValueDim / 4 / kWarpSize;  // of a lane, 4 values each
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t column = 4 * lane;  // of the first piece; the next ones are 128 further on each
  const auto num_parts = static_cast<int32_t>(gridDim.y);
#pragma unroll 1
  for (int32_t head = static_cast<int32_t>(blockIdx.y) + num_parts * warp; head < num_heads;
       head += num_parts * kSparseProductWarps) {
    // Lane i has what part i counts for.
    const float part_lse = lane < num_parts ? LoadFloatFromRank(own.lse + head, lane) : -INFINITY;
    const float max = WarpMax(part_lse);
    const float weight = part_lse == -INFINITY ? 0.0f : expf(part_lse - max);
    const float sum = WarpSum(weight);
    float4 out[kPieces] = {};
#pragma unroll 2
    for (int32_t part = 0; part < num_parts; ++part) {
      const float of_part = __shfl_sync(kFullWarp, weight, part);
      if (of_part == 0) continue;  // it may have no values
#pragma unroll
      for (int32_t j = 0; j < kPieces; ++j) {
        const float4 value =
            LoadFourFromRank(own.values + PlaceInPart(head, column + 4 * kWarpSize * j), part);
        out[j].x = fmaf(of_part, value.x, out[j].x);
        out[j].y = fmaf(of_part, value.y, out[j].y);
        out[j].z = fmaf(of_part, value.z, out[j].z);
        out[j].w = fmaf(of_part, value.w, out[j].w);
      }
    }
    const float lse = sum == 0 ? -INFINITY : max + logf(sum);
    float scale = sum == 0 ? 0.0f : 1.0f / sum;
    if (target.sink != nullptr) scale *= SinkFactor(target.sink[head], lse);
    constexpr int32_t kLastColumn = 4 * kWarpSize * (kPieces - 1);
    const int32_t pair = (kLastColumn + column - (kSparseValueDim - kSparseRope)) / 2;
    if (target.rotate_back && pair >= 0) {
      const RopeTable& rope = args.params.inverse_rope;
      const int32_t position = args.params.positions[row];
      float4& last = out[kPieces - 1];
      const float2 a = RotateBack(rope, position, pair, make_float2(last.x, last.y));
      const float2 b = RotateBack(rope, position, pair + 1, make_float2(last.z, last.w));
      last = make_float4(a.x, a.y, b.x, b.y);
    }
    auto* to = reinterpret_cast<float4*>(target.values + head * target.head_stride + column);
#pragma unroll
    for (int32_t j = 0; j < kPieces; ++j) {
      to[j * kWarpSize] =
          make_float4(out[j].x * scale, out[j].y * scale, out[j].z * scale, out[j].w * scale);
    }
    if (lane == 0 && target.lse != nullptr) target.lse[head * target.lse_stride] = lse;
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_FOLD_CUH_
