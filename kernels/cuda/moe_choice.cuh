// First part of the kernel of moe_stream.h: norm, gate logits and choice.

#ifndef KERNELS_CUDA_MOE_CHOICE_CUH_
#define KERNELS_CUDA_MOE_CHOICE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/grid_barrier.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_stream_args.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/tile_product.cuh"

namespace kernels::cuda {

// A warp's row of the gate's matrix.
class GateRow {
 public:
  // Its first weights set out.
  __device__ GateRow(const MatrixStack& gate, int64_t hidden, int32_t expert)
      : gate_(gate), hidden_(hidden), expert_(expert) {
    const StoredMatrix& matrix = gate.parts[0];
    streams_ = matrix.dtype == DType::kBfloat16 && matrix.scales == nullptr && hidden % 8 == 0;
    if (!streams_) return;
    const int64_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    row_ = static_cast<const uint16_t*>(matrix.data) + expert * hidden + 8 * lane;
#pragma unroll
    for (int32_t i = 0; i < kPrefetched; ++i) {
      const int64_t k = int64_t{i} * 8 * kWarpSize;
      if (8 * lane + k < hidden) ahead_[i] = LoadStreaming(row_ + k);
    }
  }

  // The logit, in every lane of the warp.
  __device__ float Multiply(const float* x) const {
    const int64_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
    float sum = 0;
    if (!streams_) {
      for (int64_t k = lane; k < hidden_; k += kWarpSize) {
        sum = fmaf(x[k], LoadWeight(gate_, expert_, k), sum);
      }
      return WarpSum(sum);
    }
#pragma unroll
    for (int32_t i = 0; i < kPrefetched; ++i) {
      const int64_t k = int64_t{i} * 8 * kWarpSize + 8 * lane;
      if (k < hidden_) sum = Add(ahead_[i], x + k, sum);
    }
    for (int64_t k = int64_t{kPrefetched} * 8 * kWarpSize; k + 8 * lane < hidden_;
         k += 8 * kWarpSize) {
      sum = Add(LoadStreaming(row_ + k), x + k + 8 * lane, sum);
    }
    return WarpSum(sum);
  }

 private:
  static constexpr int32_t kPrefetched = 8;  // loads of a lane before the row is known

  static __device__ float Add(const Words4& w, const float* x, float sum) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const float2 v = *reinterpret_cast<const float2*>(x + 2 * j);
      sum = fmaf(v.x, __uint_as_float(words[j] << 16), sum);
      sum = fmaf(v.y, __uint_as_float(words[j] & 0xffff0000u), sum);
    }
    return sum;
  }

  const MatrixStack& gate_;
  const int64_t hidden_;
  const int64_t expert_;
  bool streams_;
  const uint16_t* row_ = nullptr;
  Words4 ahead_[kPrefetched];
};

// Norms rows: a thread holds its values of the first kHeld times the block's threads.
class RowNorm {
 public:
  // The weights set out.
  __device__ explicit RowNorm(const MoeStreamArgs& args) : args_(args) {
    Load(args.params.norm_weight, weights_);
  }

  // Row `row`, normed, to x in shared memory; `store`: also, rounded, to the workspace.
  __device__ void Norm(int64_t row, float* x, bool store) const {
    __shared__ float scratch[33];
    const MoeParams& params = args_.params;
    const int64_t hidden = args_.experts.hidden_size;
    const float* input = params.input + row * params.input_row_stride;
    uint16_t* normed = args_.work.normed + row * hidden;
    float values[kHeld];
    Load(input, values);
    float sum = 0;
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) sum = fmaf(values[i], values[i], sum);
    for (int64_t i = kBegin + threadIdx.x; i < hidden; i += kStreamThreads) {
      sum = fmaf(input[i], input[i], sum);
    }
    sum = BlockSum(sum, scratch);
    const float inverse = __frcp_rn(__fsqrt_rn(sum / static_cast<float>(hidden) + params.norm_eps));
    const auto put = [&](int64_t i, float value, float weight) {
      if (i >= hidden) return;
      x[i] = value * inverse * weight;
      if (store) normed[i] = static_cast<uint16_t>(PackBfloat16(x[i], 0));
    };
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) {
      put(int64_t{i} * kStreamThreads + threadIdx.x, values[i], weights_[i]);
    }
    for (int64_t i = kBegin + threadIdx.x; i < hidden; i += kStreamThreads) {
      put(i, input[i], params.norm_weight[i]);
    }
    __syncthreads();
  }

 private:
  static constexpr int32_t kHeld = 8;
  static constexpr int64_t kBegin = int64_t{kHeld} * kStreamThreads;

  __device__ void Load(const float* from, float (&values)[kHeld]) const {
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) {
      const int64_t at = int64_t{i} * kStreamThreads + threadIdx.x;
      values[i] = at < args_.experts.hidden_size ? from[at] : 0;
    }
  }

  const MoeStreamArgs& args_;
  float weights_[kHeld];
};

// The grid's blocks share the gate's logits of all rows: a task is as many experts of a row as a
// block has warps.
__host__ __device__ inline int32_t NumRouteTasks(const MoeStreamArgs& args) {
  return CeilDiv(args.params.gate.num_experts, kStreamWarps) * args.params.num_rows;
}

// This block's tasks, and a signal for each.  x: [hidden], shared.
__device__ inline void RouteRows(const MoeStreamArgs& args, float* x) {
  const int64_t hidden = args.experts.hidden_size;
  const int32_t num_experts = args.params.gate.num_experts;
  const int32_t groups = CeilDiv(num_experts, kStreamWarps);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const RowNorm norm(args);
  uint32_t done = 0;
  for (int32_t task = blockIdx.x; task < NumRouteTasks(args); task += gridDim.x) {
    const int32_t row = task / groups, group = task % groups;
    const int32_t expert = group * kStreamWarps + warp;
    const GateRow gate(args.gate, hidden, min(expert, num_experts - 1));
    if (done++ == 0) WaitForPrevious();
    __syncthreads();  // x is free
    norm.Norm(row, x, group == 0);
    const float logit = gate.Multiply(x);
    if (threadIdx.x % kWarpSize == 0 && expert < num_experts) {
      args.work.logits[int64_t{row} * num_experts + expert] = logit;
    }
  }
  if (done > 0) Signal(args.routed, done);
}

// Every block by itself, once all logits are there: a warp a row.
__device__ inline void ChooseRows(const MoeStreamArgs& args, const StreamTables& tables) {
  const MoeParams& params = args.params;
  const int32_t num_experts = params.gate.num_experts, top_k = params.gate.top_k;
  for (int32_t row = static_cast<int32_t>(threadIdx.x) / kWarpSize; row < params.num_rows;
       row += kStreamWarps) {
    const float* logits = args.work.logits + int64_t{row} * num_experts;
    float* held = tables.logits + row * num_experts;
    for (int32_t e = threadIdx.x % kWarpSize; e < num_experts; e += kWarpSize) held[e] = logits[e];
    __syncwarp();
    SelectRow(params, row, held, RowShared(tables.choosing, row, num_experts),
              tables.ids + row * top_k, tables.weights + row * top_k);
  }
  __syncthreads();
  if (blockIdx.x != 0) return;
  for (int32_t i = threadIdx.x; i < args.num_pairs(); i += kStreamThreads) {
    if (params.topk_ids != nullptr) params.topk_ids[i] = tables.ids[i];
    if (params.topk_weights != nullptr) params.topk_weights[i] = tables.weights[i];
  }
}

// ids -> pairs, place, begin and num_active.
__device__ inline void SortPairs(const MoeStreamArgs& args, const StreamTables& tables) {
  const int32_t num_pairs = args.num_pairs();
  for (int32_t pair = threadIdx.x; pair < num_pairs; pair += kStreamThreads) {
    const int32_t id = tables.ids[pair];
    int32_t place = 0;
    for (int32_t other = 0; other < num_pairs; ++other) {
      const int32_t other_id = tables.ids[other];
      place += other_id < id || (other_id == id && other < pair) ? 1 : 0;
    }
    tables.pairs[place] = pair;
    tables.place[pair] = place;
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x);
    int32_t num_active = 0;
    for (int32_t first = 0; first < num_pairs; first += kWarpSize) {
      const int32_t i = first + lane;
      const bool begins = i < num_pairs && (i == 0 || tables.ids[tables.pairs[i]] !=
                                                          tables.ids[tables.pairs[i - 1]]);
      const uint32_t lanes = __ballot_sync(kFullWarp, begins);
      if (begins) tables.begin[num_active + __popc(lanes & ((1u << lane) - 1))] = i;
      num_active += __popc(lanes);
    }
    if (lane == 0) {
      tables.begin[num_active] = num_pairs;
      *tables.num_active = num_active;
    }
  }
  __syncthreads();
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_CHOICE_CUH_
