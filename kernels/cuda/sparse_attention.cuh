// The two warpgroups that attend.  Both have all heads and half of the values, and take turns with
// the keys: the first one multiplies queries with those of even steps and weighs them, the second
// one with those of odd steps, and tells the other what they weigh.  So products of the one go on
// while the other weighs.

#ifndef KERNELS_CUDA_SPARSE_ATTENTION_CUH_
#define KERNELS_CUDA_SPARSE_ATTENTION_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/narrow_product.cuh"
#include "kernels/cuda/sparse_block.cuh"
#include "kernels/cuda/sparse_fold.cuh"
#include "kernels/cuda/sparse_gather.cuh"
#include "kernels/cuda/sparse_result.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup_product.cuh"

namespace kernels::cuda {

// The block's query vectors, rounded; both warpgroups that multiply.
template <int32_t kBoxes>
__device__ inline void LoadQueries(SparseShared<kBoxes>& shared, const SparseDecodeParams& params,
                                   int32_t row, int32_t first_head) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 8;
  const float* q = params.q + row * params.q_row_stride;
  const float* q_rope = params.q_rope + row * params.q_rope_row_stride;
#pragma unroll
  for (int32_t i = 0; i < kSparseHeads / 32; ++i) {
    const int32_t box_row = static_cast<int32_t>(threadIdx.x) / 8 + 32 * i;
    const int64_t head = first_head + box_row;
    const bool exists = head < params.num_heads;
#pragma unroll
    for (int32_t box = 0; box < kBoxes; ++box) {
      const float* from = box < kBoxes - 1 ? q + head * params.q_head_stride + box * kBoxColumns
                                           : q_rope + head * params.q_rope_head_stride;
      const auto* values = reinterpret_cast<const float4*>(from) + 2 * lane;
      const float4 zeros = make_float4(0, 0, 0, 0);
      const float4 a = exists ? values[0] : zeros, b = exists ? values[1] : zeros;
      *reinterpret_cast<uint4*>(shared.q[box] + box_row * kBoxColumns + (lane ^ box_row % 8) * 8) =
          make_uint4(PackBfloat16(a.x, a.y), PackBfloat16(a.z, a.w), PackBfloat16(b.x, b.y),
                     PackBfloat16(b.z, b.w));
    }
  }
  PublishShared();
  Sync(kBothGroups);
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A thread's two rows, of which it has every fourth pair of columns.
struct RowState {
  // What scores are relative to, not scaled; -inf before the first key.
  float base[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // of this thread's columns of the steps that its warpgroup weighs
};

// One of the two warpgroups, and a part of a row's keys.
template <KvFormat kFormat, int32_t kBoxes, int32_t kBlocks, int32_t kGroup>
class SparseAttention {
 public:
  __device__ SparseAttention(SparseShared<kBoxes>& shared, float softmax_scale, int32_t num_keys)
      : shared_(shared), scale_log2_(softmax_scale * 1.44269504f), num_keys_(num_keys) {}

  __device__ void AttendKeys() {
    uint32_t parity = 0;
    for (int32_t left = num_keys_; left > 0; left -= 2 * kSparseKeys, parity ^= 1) {
      const bool has_odd_step = left > kSparseKeys;
      if constexpr (kGroup == 0) {
        WeighOwn(0, left, parity);
        if (has_odd_step) TakeOthers(1, parity);
      } else {
        TakeOthers(0, parity);
        if (has_odd_step) WeighOwn(1, left - kSparseKeys, parity);
      }
    }
  }

  // Divides by the sums, with the sinks of these heads (null: none), and gives the rows' lse.
  __device__ void Divide(float softmax_scale, const float* sink, int32_t num_heads,
                         float (&lse)[2]) {
    float total[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      total[i] = state_.sum[i] + __shfl_xor_sync(kFullWarp, state_.sum[i], 1);
      total[i] += __shfl_xor_sync(kFullWarp, total[i], 2);
    }
    Sync(kBothGroups);  // weights are read
    shared_.weights[kGroup][thread_] =
        make_uint4(__float_as_uint(total[0]), __float_as_uint(total[1]), 0, 0);
    Sync(kBothGroups);
    const uint4 others = shared_.weights[1 - kGroup][thread_];
    total[0] += __uint_as_float(others.x);
    total[1] += __uint_as_float(others.y);
    float scale[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      lse[i] = fmaf(state_.base[i], softmax_scale, logf(total[i]));
      scale[i] = 1.0f / total[i];
      if (sink != nullptr && Head(i) < num_heads) scale[i] *= SinkFactor(sink[Head(i)], lse[i]);
    }
    Rescale(scale);
  }

  // Rotates the last 64 values back.  REQUIRES: kGroup is 1; the position is in the table.
  __device__ void RotateValuesBack(const RopeTable& rope, int32_t position) {
#pragma unroll
    for (int32_t j = kProductSums / 8; j < kProductSums / 4; ++j) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        float& a = high_[4 * j + 2 * i];
        float& b = high_[4 * j + 2 * i + 1];
        const float2 pair =
            RotateBack(rope, position, 4 * (j - kProductSums / 8) + thread_ % 4, make_float2(a, b));
        a = pair.x;
        b = pair.y;
      }
    }
  }

  // Leaves the values where keys were, for StorePart or FoldParts.  REQUIRES: Divide, for which
  // both warpgroups have read their keys.
  __device__ void Leave(const SparsePartResult& result, const float (&lse)[2]) const {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t head = Head(i);
      const int32_t column = kGroup * (kSparseValueDim / 2) + 2 * (thread_ % 4);
#pragma unroll
      for (int32_t j = 0; j < kProductSums / 4; ++j) {
        const int32_t at = 4 * j + 2 * i;
        *reinterpret_cast<float2*>(result.values + PlaceInPart(head, column + 8 * j)) =
            make_float2(low_[at], low_[at + 1]);
        *reinterpret_cast<float2*>(result.values +
                                   PlaceInPart(head, column + kProductColumns + 8 * j)) =
            make_float2(high_[at], high_[at + 1]);
      }
      if (kGroup == 0 && thread_ % 4 == 0) result.lse[head] = lse[i];
    }
  }

  // Of a thread's row i.
  __device__ int32_t Head(int32_t i) const {
    return 16 * (thread_ / kWarpSize) + thread_ % kWarpSize / 4 + 8 * i;
  }

 private:
  // A row's base follows its largest score only when that has grown by more than this (base 2):
  // until then weights are larger than 1, and sums need not be rescaled.
  static constexpr float kSlack = 8;

  // A step that is this warpgroup's to weigh, and one that is the other's.
  __device__ void WeighOwn(int32_t stage, int32_t left, uint32_t parity) {
    uint32_t weights[kSparseSteps16][4];
    float shrink[2];
    BeginScores(stage, parity);
    WaitForProducts<0>();
    Weigh(left, weights, shrink);
    RescaleIfNeeded(shrink);
    AddValues(stage, weights);
  }
  __device__ void TakeOthers(int32_t stage, uint32_t parity) {
    uint32_t weights[kSparseSteps16][4];
    float shrink[2];
    TakeBases(shrink);
    TakeWeights(weights);
    RescaleIfNeeded(shrink);
    WaitForKeys<kFormat, kBlocks>(shared_, stage, parity);
    AddValues(stage, weights);
  }

  __device__ void BeginScores(int32_t stage, uint32_t parity) {
    WaitForKeys<kFormat, kBlocks>(shared_, stage, parity);
    KeepSums(scores_);
    BeginProducts();
    uint64_t q = DescribeRows(shared_.q);
    asm volatile("" : "+l"(q));  // or every step of it would occupy registers between calls
    const uint64_t k = DescribeRows(shared_.k[stage]);
#pragma unroll
    for (int32_t d = 0; d < kBoxes * kBoxColumns; d += kProductDepth) {
      const int32_t at = d / kBoxColumns * kBoxElements + d % kBoxColumns;
      MultiplyNarrow<LeftOperand::kBoxRows>(scores_, Further(q, at), Further(k, at), d > 0);
    }
    CommitProducts();
  }

  // Scores -> weights, for both warpgroups.  `left`: how many keys there are from the step's first
  // one on; `shrink`: what earlier weights are worth now.
  __device__ void Weigh(int32_t left, uint32_t (&weights)[kSparseSteps16][4], float (&shrink)[2]) {
    KeepSums(scores_);
    if (left < kSparseKeys) {
#pragma unroll
      for (int32_t j = 0; j < 32; ++j) {
        if (8 * (j / 4) + 2 * (thread_ % 4) + j % 2 >= left) scores_[j] = -INFINITY;
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      float largest[4];  // four lines of comparisons, not one
#pragma unroll
      for (int32_t j = 0; j < kSparseKeys / 8; ++j) {
        const float larger = fmaxf(scores_[4 * j + 2 * i], scores_[4 * j + 2 * i + 1]);
        largest[j % 4] = j < 4 ? larger : fmaxf(largest[j % 4], larger);
      }
      float base = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      base = fmaxf(base, __shfl_xor_sync(kFullWarp, base, 1));
      base = fmaxf(base, __shfl_xor_sync(kFullWarp, base, 2));
      if ((base - state_.base[i]) * scale_log2_ <= kSlack) base = state_.base[i];
      shrink[i] = MoveBase(i, base);
      const float scaled = base == -INFINITY ? 0.0f : base * scale_log2_;
      float sum[2] = {0, 0};
#pragma unroll
      for (int32_t j = 0; j < kSparseKeys / 8; ++j) {
#pragma unroll
        for (int32_t c = 0; c < 2; ++c) {
          float& score = scores_[4 * j + 2 * i + c];
          score = Exp2(fmaf(score, scale_log2_, -scaled));
          sum[c] += score;
        }
      }
      state_.sum[i] += sum[0] + sum[1];
    }
#pragma unroll
    for (int32_t k = 0; k < kSparseSteps16; ++k) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        weights[k][i] = PackBfloat16(scores_[8 * k + 2 * i], scores_[8 * k + 2 * i + 1]);
      }
      shared_.weights[k][thread_] =
          make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
    }
    shared_.bases[thread_] = make_float2(state_.base[0], state_.base[1]);
    Pass(kGroup == 0 ? kFirstWeighs : kSecondWeighs);
  }

  // Waits for the other warpgroup's weights, and takes over their bases.
  __device__ void TakeBases(float (&shrink)[2]) {
    Sync(kGroup == 0 ? kSecondWeighs : kFirstWeighs);
    const float2 bases = shared_.bases[thread_];
    shrink[0] = MoveBase(0, bases.x);
    shrink[1] = MoveBase(1, bases.y);
  }
  __device__ void TakeWeights(uint32_t (&weights)[kSparseSteps16][4]) {
#pragma unroll
    for (int32_t k = 0; k < kSparseSteps16; ++k) {
      const uint4 four = shared_.weights[k][thread_];
      weights[k][0] = four.x;
      weights[k][1] = four.y;
      weights[k][2] = four.z;
      weights[k][3] = four.w;
    }
  }

  // Returns what earlier weights are worth now.
  __device__ float MoveBase(int32_t i, float base) {
    const float shrink =
        base == state_.base[i] ? 1.0f : Exp2((state_.base[i] - base) * scale_log2_);
    state_.base[i] = base;
    state_.sum[i] *= shrink;
    return shrink;
  }

  __device__ void Rescale(const float (&factor)[2]) {
#pragma unroll
    for (int32_t j = 0; j < kProductSums; ++j) {
      low_[j] *= factor[j / 2 % 2];
      high_[j] *= factor[j / 2 % 2];
    }
  }
  __device__ void RescaleIfNeeded(const float (&factor)[2]) {
    if (__any_sync(kFullWarp, factor[0] != 1 || factor[1] != 1)) Rescale(factor);
  }

  // This warpgroup's half of the values.  Then the stage is free, as far as this warpgroup is
  // concerned.
  __device__ void AddValues(int32_t stage, const uint32_t (&weights)[kSparseSteps16][4]) {
    KeepSums(low_);
    KeepSums(high_);
    BeginProducts();
    const uint64_t values = DescribeColumns(shared_.k[stage][kGroup * (kSparseValueBoxes / 2)],
                                            kBoxElements * sizeof(uint16_t));
#pragma unroll
    for (int32_t k = 0; k < kSparseSteps16; ++k) {
      const int32_t at = k * kProductDepth * kBoxColumns;
      MultiplyColumns(low_, weights[k], Further(values, at));
      MultiplyColumns(high_, weights[k], Further(values, at + 2 * kBoxElements));
    }
    CommitProducts();
    WaitForProducts<0>();
    KeepSums(low_);
    KeepSums(high_);
    if (thread_ % kWarpSize == 0) {
      Arrive(&shared_.empty[stage]);
      if constexpr (kBlocks > 1) {
        ArriveInCluster(AddressInRank(&shared_.empty[stage], (blockIdx.x + 1) % kBlocks));
      }
    }
  }

  SparseShared<kBoxes>& shared_;
  const float scale_log2_;
  const int32_t num_keys_;
  const int32_t thread_ = static_cast<int32_t>(threadIdx.x) % kWarpgroupThreads;
  RowState state_;
  float low_[kProductSums] = {};   // columns [0, 128) of its half
  float high_[kProductSums] = {};  // and those after them
  float scores_[kSparseKeys / 2];
};

// A part without keys: zeros and -inf; both warpgroups.
__device__ inline void StoreNothing(const SparseTarget& target, int32_t num_heads) {
  for (int32_t i = threadIdx.x; i < num_heads * kSparseValueDim; i += 2 * kWarpgroupThreads) {
    target.values[i / kSparseValueDim * target.head_stride + i % kSparseValueDim] = 0;
  }
  for (int32_t head = threadIdx.x; target.lse != nullptr && head < num_heads;
       head += 2 * kWarpgroupThreads) {
    target.lse[head * target.lse_stride] = -INFINITY;
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_SPARSE_ATTENTION_CUH_
