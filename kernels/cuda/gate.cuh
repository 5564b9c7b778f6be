// Choosing a row's experts on the device: models.md 5.1-5.3.

#ifndef KERNELS_CUDA_GATE_CUH_
#define KERNELS_CUDA_GATE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/moe.h"

namespace kernels::cuda {

// Orders floats as unsigned numbers, above 0; NaN is below all others.
__device__ inline uint32_t OrderOf(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 as 0
  if (value != value) return 1;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Marks the `count` largest of values[0 .. n) in shared memory; a warp's work.  marked [n].
__device__ inline void MarkLargest(const float* values, int32_t n, int32_t count, uint8_t* marked) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t i = lane; i < n; i += kWarpSize) marked[i] = 0;
  __syncwarp();
  for (int32_t taken = 0; taken < count; ++taken) {
    uint32_t best = 0;  // none
    int32_t index = kMaxExperts;
    for (int32_t i = lane; i < n; i += kWarpSize) {
      const uint32_t order = marked[i] == 0 ? OrderOf(values[i]) : 0;
      if (order > best) {
        best = order;
        index = i;
      }
    }
    const uint32_t largest = __reduce_max_sync(kFullWarp, best);
    index = static_cast<int32_t>(
        __reduce_min_sync(kFullWarp, static_cast<uint32_t>(best == largest ? index : kMaxExperts)));
    if (lane == 0) marked[index] = 1;
    __syncwarp();
  }
}

// One warp's shared memory, for n experts.
struct RowShared {
  __host__ __device__ static constexpr size_t Bytes(int32_t n) {
    return CeilDiv(static_cast<size_t>(n) * (3 * sizeof(float) + 1), size_t{16}) * 16;
  }
  // Of number `row` of those at `base`.
  __device__ RowShared(std::byte* base, int32_t row, int32_t n)
      : scores(reinterpret_cast<float*>(base + row * Bytes(n))),
        choice(scores + n),
        group_scores(choice + n),
        marked(reinterpret_cast<uint8_t*>(group_scores + n)) {}

  float* scores;  // what becomes the weight
  float* choice;  // what is compared
  float* group_scores;
  uint8_t* marked;
};

__device__ inline float ScoreAlone(GateMethod method, float logit) {
  if (method == GateMethod::kNoAuxTc) return 1.0f / (1.0f + expf(-logit));
  // Beyond 20 the difference to the logit itself is below float's last place.
  return sqrtf(logit > 20 ? logit : log1pf(expf(logit)));
}

__device__ inline void ScoreExperts(const GateConfig& gate, const float* logits, const float* bias,
                                    const RowShared& row) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t n = gate.num_experts;
  if (gate.method == GateMethod::kNoAuxTc || gate.method == GateMethod::kSqrtSoftplus) {
    for (int32_t e = lane; e < n; e += kWarpSize) {
      row.scores[e] = ScoreAlone(gate.method, logits[e]);
      row.choice[e] = bias != nullptr ? row.scores[e] + bias[e] : row.scores[e];
    }
    __syncwarp();
    return;
  }
  float max = -INFINITY;
  for (int32_t e = lane; e < n; e += kWarpSize) max = fmaxf(max, logits[e]);
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  }
  float sum = 0;
  for (int32_t e = lane; e < n; e += kWarpSize) {
    row.scores[e] = expf(logits[e] - max);
    sum += row.scores[e];
  }
  sum = WarpSum(sum);
  for (int32_t e = lane; e < n; e += kWarpSize) {
    row.scores[e] = row.scores[e] / sum;
    row.choice[e] = row.scores[e];
  }
  __syncwarp();
}

// Leaves candidates outside the best groups with -inf.
__device__ inline void LimitToGroups(const GateConfig& gate, const RowShared& row) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const int32_t group_size = gate.num_experts / gate.num_groups;
  for (int32_t g = lane; g < gate.num_groups; g += kWarpSize) {
    float first = -INFINITY, second = -INFINITY;
    for (int32_t i = 0; i < group_size; ++i) {
      const float value = row.choice[g * group_size + i];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    row.group_scores[g] =
        gate.method == GateMethod::kNoAuxTc && group_size > 1 ? first + second : first;
  }
  __syncwarp();
  MarkLargest(row.group_scores, gate.num_groups, gate.top_k_groups, row.marked);
  for (int32_t e = lane; e < gate.num_experts; e += kWarpSize) {
    if (row.marked[e / group_size] == 0) row.choice[e] = -INFINITY;
  }
  __syncwarp();
}

// Marks the experts that the row's token has in the table.
__device__ inline void MarkChosen(const MoeParams& params, int64_t row, uint8_t* marked) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const GateConfig& gate = params.gate;
  for (int32_t e = lane; e < gate.num_experts; e += kWarpSize) marked[e] = 0;
  __syncwarp();
  const int32_t id = params.token_ids[row];
  const int64_t token = id >= 0 && id < params.vocab_size ? id : 0;
  for (int32_t i = lane; i < gate.top_k; i += kWarpSize) {
    const int32_t expert = params.expert_table[token * gate.top_k + i];
    if (expert >= 0 && expert < gate.num_experts) marked[expert] = 1;
  }
  __syncwarp();
}

// Whether SelectOfFew chooses: a softmax without groups, of no more experts than two a lane.
__device__ inline bool CanSelectOfFew(const MoeParams& params) {
  const GateConfig& gate = params.gate;
  return gate.method == GateMethod::kGreedy && !gate.norm_topk_prob &&
         gate.num_experts <= 2 * kWarpSize && params.expert_table == nullptr;
}
// As SelectRow, in registers and by little code: at one row most of a choice's time goes to what
// it has to fetch of it.
__device__ inline void SelectOfFew(const GateConfig& gate, const float* logits, int32_t* ids,
                                   float* weights) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  const bool has_low = lane < gate.num_experts, has_high = lane + kWarpSize < gate.num_experts;
  float low = has_low ? logits[lane] : -INFINITY;
  float high = has_high ? logits[lane + kWarpSize] : -INFINITY;
  float largest_logit = fmaxf(low, high);
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    largest_logit = fmaxf(largest_logit, __shfl_xor_sync(kFullWarp, largest_logit, offset));
  }
  low = has_low ? expf(low - largest_logit) : 0;
  high = has_high ? expf(high - largest_logit) : 0;
  const float sum = WarpSum(low + high);
  low /= sum;
  high /= sum;
  uint32_t low_order = has_low ? OrderOf(low) : 0, high_order = has_high ? OrderOf(high) : 0;
  const uint32_t mine = 1u << lane;
  uint32_t low_chosen = 0, high_chosen = 0;  // lanes
#pragma unroll 1
  for (int32_t i = 0; i < gate.top_k; ++i) {
    const uint32_t largest = __reduce_max_sync(kFullWarp, max(low_order, high_order));
    const uint32_t lows = __ballot_sync(kFullWarp, low_order == largest);
    const uint32_t highs = __ballot_sync(kFullWarp, high_order == largest);
    const uint32_t low_first = lows & (0 - lows);
    const uint32_t high_first = lows != 0 ? 0 : highs & (0 - highs);
    low_order = (low_first & mine) != 0 ? 0 : low_order;
    high_order = (high_first & mine) != 0 ? 0 : high_order;
    low_chosen |= low_first;
    high_chosen |= high_first;
  }
  const auto output = [&](int32_t place, int32_t expert, float score) {
    ids[place] = expert;
    weights[place] = score * gate.routed_scaling_factor;
  };
  if ((low_chosen & mine) != 0) output(__popc(low_chosen & (mine - 1)), lane, low);
  if ((high_chosen & mine) != 0) {
    output(__popc(low_chosen) + __popc(high_chosen & (mine - 1)), lane + kWarpSize, high);
  }
}

// Chooses the experts of `row` from its logits; a warp's work.  ids (ascending) and weights
// [top_k].
__device__ inline void SelectRow(const MoeParams& params, int64_t row, const float* logits,
                                 const RowShared& shared, int32_t* ids, float* weights) {
  const GateConfig& gate = params.gate;
  if (CanSelectOfFew(params)) return SelectOfFew(gate, logits, ids, weights);
  ScoreExperts(gate, logits, params.gate_bias, shared);
  if (params.expert_table != nullptr) {
    MarkChosen(params, row, shared.marked);
  } else {
    if ((gate.method == GateMethod::kGroupLimitedGreedy || gate.method == GateMethod::kNoAuxTc) &&
        gate.top_k_groups < gate.num_groups) {
      LimitToGroups(gate, shared);
    }
    MarkLargest(shared.choice, gate.num_experts, gate.top_k, shared.marked);
  }
  // A marked expert's place is the number of marked ones before it.
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  float* chosen = shared.choice;
  int32_t taken = 0;
  for (int32_t begin = 0; begin < gate.num_experts; begin += kWarpSize) {
    const int32_t e = begin + lane;
    const bool marked = e < gate.num_experts && shared.marked[e] != 0;
    const uint32_t lanes = __ballot_sync(kFullWarp, marked);
    const int32_t place = taken + __popc(lanes & ((1u << lane) - 1));
    if (marked && place < gate.top_k) {
      ids[place] = e;
      chosen[place] = shared.scores[e];
    }
    taken += __popc(lanes);
  }
  __syncwarp();
  float sum = 0;
  for (int32_t i = 0; i < gate.top_k; ++i) sum += chosen[i];
  for (int32_t i = lane; i < gate.top_k; i += kWarpSize) {
    float weight = chosen[i];
    if (gate.norm_topk_prob) weight /= sum + 1e-20f;
    weights[i] = weight * gate.routed_scaling_factor;
  }
}

// A row's choice into the gate's optional outputs; a warp's work.
__device__ inline void OutputChoice(const MoeParams& params, int64_t row, const int32_t* ids,
                                    const float* weights) {
  const int32_t top_k = params.gate.top_k;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % kWarpSize; i < top_k; i += kWarpSize) {
    if (params.topk_ids != nullptr) params.topk_ids[row * top_k + i] = ids[i];
    if (params.topk_weights != nullptr) params.topk_weights[row * top_k + i] = weights[i];
  }
}

// Both, the choice into rows `row` of ids and weights.
__device__ inline void ChooseExperts(const MoeParams& params, int64_t row, const float* logits,
                                     const RowShared& shared, int32_t* ids, float* weights) {
  ids += row * params.gate.top_k;
  weights += row * params.gate.top_k;
  SelectRow(params, row, logits, shared, ids, weights);
  __syncwarp();
  OutputChoice(params, row, ids, weights);
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GATE_CUH_
