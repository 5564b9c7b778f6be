// The choice of experts within the kernel for gate_up, for gates that are small: the first blocks
// multiply the rows with the gate's matrix and publish the logits, every block awaits all of them
// and chooses by itself.  moe_route.cu is the kernel of its own for the other gates.
//
// A logit travels as a word of memory that is zero until it is there.  The kernel for down, which
// runs when nobody awaits a word any more, leaves them zero.  Blocks that publish await nobody but
// the kernel before, so it does not matter which blocks run at once.

#ifndef KERNELS_CUDA_MOE_CHOICE_CUH_
#define KERNELS_CUDA_MOE_CHOICE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe_stream_args.h"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/weight_stream.cuh"

namespace kernels::cuda {

inline constexpr int32_t kRowPadding = 32;  // of a row of activations: rows lie in different banks

struct ChoiceShared {
  alignas(16) std::byte choosing[kMaxStreamTokens * RowShared::Bytes(kMaxChoiceExperts)];
  // Of each warp's part of a row: its products with this block's experts, and its square.
  float parts[kStreamWarps][kMaxStreamTokens][kBlockExperts + 1];
  float logits[kMaxStreamTokens][kMaxChoiceExperts];
  float inverses[kMaxStreamTokens];  // 1 / rms of each row
  float weights[kMaxStreamTokens * kMaxChoiceTopK];
  int32_t ids[kMaxStreamTokens * kMaxChoiceTopK];
  ActiveExpert active[kMaxChoiceExperts];               // ascending
  int32_t pairs[kMaxChoiceExperts * kMaxStreamTokens];  // [active, rows]
  int32_t num_active;
};

__device__ inline void PublishLogit(uint32_t* word, float logit) {
  constexpr uint32_t kMinusZero = 0x80000000u;
  const uint32_t bits = __float_as_uint(logit);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;"
               :
               : "l"(word), "r"(bits == 0 ? kMinusZero : bits)
               : "memory");
}
__device__ inline float AwaitLogit(const uint32_t* word) {
  uint32_t bits = 0;
  while (bits == 0) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(bits) : "l"(word) : "memory");
  }
  return __uint_as_float(bits);
}

// Sums of each of 8 values over the warp; lane l gets that of value PlaceOfLane(l).
__device__ inline int32_t PlaceOfLane(int32_t lane) {
  return (lane & 1) * 4 + (lane & 2) + (lane >> 2 & 1);
}
__device__ inline float WarpSumOf8(float (&values)[8]) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int32_t half = 4, bit = 1; half > 0; half /= 2, bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int32_t i = 0; i < half; ++i) {
      const float sent = upper ? values[i] : values[i + half];
      const float kept = upper ? values[i + half] : values[i];
      values[i] = kept + __shfl_xor_sync(kFullWarp, sent, bit);
    }
  }
  float sum = values[0];
  sum += __shfl_xor_sync(kFullWarp, sum, 8);
  return sum + __shfl_xor_sync(kFullWarp, sum, 16);
}

// A thread has 8 columns of the rows, and of the gate's rows that are this block's.
class BlockChoice {
 public:
  // Sends for what no kernel writes.
  __device__ BlockChoice(const MoeStreamArgs& args, const GateArgs& gate)
      : args_(args), gate_(gate), hidden_(static_cast<int32_t>(args.experts.hidden_size)) {
#pragma unroll
    for (int32_t e = 0; e < kBlockExperts; ++e) {
      const int32_t expert = first_expert_ + e;
      weights_[e] = {};
      if (column_ < hidden_ && expert < args.num_experts) {
        weights_[e] = LoadStreaming(gate.weight + int64_t{expert} * hidden_ + column_);
      }
    }
    if (column_ < hidden_) {
      norm_[0] = *reinterpret_cast<const float4*>(gate.params.norm_weight + column_);
      norm_[1] = *reinterpret_cast<const float4*>(gate.params.norm_weight + column_ + 4);
    }
#pragma unroll
    for (int32_t i = 0; i < kLaneExperts; ++i) {
      const int32_t expert = i * kWarpSize + static_cast<int32_t>(threadIdx.x);
      if (threadIdx.x < kWarpSize && expert < args.num_experts) {
        experts_[i] = args.experts.routed[expert];
      }
    }
  }

  // Waits for the kernel before.  `rows` [num_rows][hidden + kRowPadding] get the rows times the
  // norm's weight in bf16: a product of normed rows is that of these, scaled.  The first block also
  // writes what the kernel for down reads; that one starts only then.  Ends in a barrier.
  __device__ void Choose(uint16_t* rows, ChoiceShared& shared) const {
    asm volatile("griddepcontrol.wait;" : : : "memory");
    MultiplyRows(rows, shared);
    __syncthreads();
    ShareLogits(shared);
    __syncthreads();
    if (warp_ < args_.num_rows) SelectExperts(shared);
    __syncthreads();
    if (warp_ == 0) ListActive(shared);
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
  }

 private:
  static constexpr int32_t kLaneExperts = kMaxChoiceExperts / kWarpSize;

  __device__ void MultiplyRows(uint16_t* rows, ChoiceShared& shared) const {
    const float norm[8] = {norm_[0].x, norm_[0].y, norm_[0].z, norm_[0].w,
                           norm_[1].x, norm_[1].y, norm_[1].z, norm_[1].w};
#pragma unroll 4
    for (int32_t row = 0; row < args_.num_rows; ++row) {
      float x[8] = {};
      if (column_ < hidden_) {
        const float* from = gate_.params.input + row * gate_.params.input_row_stride + column_;
        const auto a = *reinterpret_cast<const float4*>(from);
        const auto b = *reinterpret_cast<const float4*>(from + 4);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
      }
      float square = 0;
#pragma unroll
      for (int32_t i = 0; i < 8; ++i) {
        square = fmaf(x[i], x[i], square);
        x[i] *= norm[i];
      }
      if (column_ < hidden_) {
        *reinterpret_cast<Words4*>(rows + row * (hidden_ + kRowPadding) + column_) = {
            PackBfloat16(x[0], x[1]), PackBfloat16(x[2], x[3]), PackBfloat16(x[4], x[5]),
            PackBfloat16(x[6], x[7])};
      }
      square = WarpSum(square);
      if (lane_ == 0) shared.parts[warp_][row][kBlockExperts] = square;
      if (first_expert_ >= args_.num_experts) continue;
      float sums[kBlockExperts] = {};
#pragma unroll
      for (int32_t e = 0; e < kBlockExperts; ++e) {
        const uint32_t words[4] = {weights_[e].x, weights_[e].y, weights_[e].z, weights_[e].w};
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) {
          sums[e] = fmaf(x[2 * i], __uint_as_float(words[i] << 16), sums[e]);
          sums[e] = fmaf(x[2 * i + 1], __uint_as_float(words[i] & 0xffff0000u), sums[e]);
        }
      }
      const float sum = WarpSumOf8(sums);
      if (lane_ < kBlockExperts) shared.parts[warp_][row][PlaceOfLane(lane_)] = sum;
    }
  }

  // Publishes this block's logits and awaits all.
  __device__ void ShareLogits(ChoiceShared& shared) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    static_assert(kMaxStreamTokens * kBlockExperts <= kStreamThreads);
    const int32_t own_row = thread / kBlockExperts, e = thread % kBlockExperts;
    if (own_row < args_.num_rows) {
      float sum = 0, square = 0;
#pragma unroll
      for (int32_t w = 0; w < kStreamWarps; ++w) {
        sum += shared.parts[w][own_row][e];
        square += shared.parts[w][own_row][kBlockExperts];
      }
      const float inverse =
          __frcp_rn(__fsqrt_rn(square / static_cast<float>(hidden_) + gate_.params.norm_eps));
      if (e == 0) shared.inverses[own_row] = inverse;
      if (first_expert_ + e < args_.num_experts) {
        PublishLogit(gate_.logits + own_row * kMaxChoiceExperts + first_expert_ + e, sum * inverse);
      }
    }
    const int32_t expert = thread % kMaxChoiceExperts;
    for (int32_t row = thread / kMaxChoiceExperts; row < args_.num_rows;
         row += kStreamThreads / kMaxChoiceExperts) {
      if (expert >= args_.num_experts) break;
      shared.logits[row][expert] = AwaitLogit(gate_.logits + row * kMaxChoiceExperts + expert);
    }
  }

  // A warp a row.
  __device__ void SelectExperts(ChoiceShared& shared) const {
    const int32_t top_k = args_.top_k;
    int32_t* ids = shared.ids + warp_ * top_k;
    float* weights = shared.weights + warp_ * top_k;
    SelectRow(gate_.params, warp_, shared.logits[warp_],
              RowShared(shared.choosing, warp_, args_.num_experts), ids, weights);
    __syncwarp();
    if (blockIdx.x != 0) return;
    for (int32_t i = lane_; i < top_k; i += kWarpSize) {
      const int32_t pair = warp_ * top_k + i;
      args_.work.weights[pair] = weights[i];
      if (gate_.params.topk_ids != nullptr) gate_.params.topk_ids[pair] = ids[i];
      if (gate_.params.topk_weights != nullptr) gate_.params.topk_weights[pair] = weights[i];
    }
    __threadfence();
  }

  // Which experts have rows, and which; a warp's work.
  __device__ void ListActive(ChoiceShared& shared) const {
    const int32_t num_rows = args_.num_rows, num_pairs = num_rows * args_.top_k;
    int32_t num_active = 0;
#pragma unroll
    for (int32_t i = 0; i < kLaneExperts; ++i) {
      const int32_t expert = i * kWarpSize + lane_;
      int32_t count = 0;
      for (int32_t p = 0; p < num_pairs; ++p) count += shared.ids[p] == expert ? 1 : 0;
      const uint32_t lanes = __ballot_sync(kFullWarp, count > 0);
      if (count > 0) {
        const int32_t place = num_active + __popc(lanes & ((1u << lane_) - 1));
        shared.active[place] = {experts_[i], count};
        int32_t* to = shared.pairs + place * num_rows;
        for (int32_t p = 0; p < num_pairs; ++p) {
          if (shared.ids[p] == expert) *to++ = p;
        }
      }
      num_active += __popc(lanes);
    }
    __syncwarp();
    if (lane_ == 0) shared.num_active = num_active;
    if (blockIdx.x != 0) return;
    for (int32_t a = lane_; a < args_.bound; a += kWarpSize) {
      args_.work.active[a] = a < num_active ? shared.active[a] : ActiveExpert{};
    }
    for (int32_t i = lane_; i < num_active * num_rows; i += kWarpSize) {
      args_.work.active_pairs[i] = shared.pairs[i];
    }
    __threadfence();
  }

  const MoeStreamArgs& args_;
  const GateArgs& gate_;
  const int32_t hidden_;
  const int32_t column_ = 8 * static_cast<int32_t>(threadIdx.x);
  const int32_t warp_ = static_cast<int32_t>(threadIdx.x) / kWarpSize;
  const int32_t lane_ = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t first_expert_ = static_cast<int32_t>(blockIdx.x) * kBlockExperts;
  Words4 weights_[kBlockExperts];
  float4 norm_[2] = {};
  StreamExpert experts_[kLaneExperts] = {};
};

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_MOE_CHOICE_CUH_
