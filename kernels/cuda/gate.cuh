// Choosing a row's experts on the device: models.md 5.1-5.3.

#ifndef KERNELS_CUDA_GATE_CUH_
#define KERNELS_CUDA_GATE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/moe.h"

namespace kernels::cuda {

// The largest value of the warp's candidates and its index; ties go to the lower index.  NaN is
// never larger; index kMaxExperts where no lane has a candidate.
struct Candidate {
  float value;
  int32_t index;
};

__device__ inline Candidate WarpBest(Candidate best) {
  for (int32_t offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const float value = __shfl_xor_sync(kFullWarp, best.value, offset);
    const int32_t index = __shfl_xor_sync(kFullWarp, best.index, offset);
    const bool other_is_none = index == kMaxExperts, best_is_none = best.index == kMaxExperts;
    if (!other_is_none &&
        (best_is_none || value > best.value || (!(best.value > value) && index < best.index))) {
      best = {value, index};
    }
  }
  return best;
}

// Marks the `count` largest of values[0 .. n) in shared memory; a warp's work.  marked [n].
__device__ inline void MarkLargest(const float* values, int32_t n, int32_t count, uint8_t* marked) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % kWarpSize;
  for (int32_t i = lane; i < n; i += kWarpSize) marked[i] = 0;
  __syncwarp();
  for (int32_t taken = 0; taken < count; ++taken) {
    Candidate best{0, kMaxExperts};
    for (int32_t i = lane; i < n; i += kWarpSize) {
      if (marked[i] == 0 && (best.index == kMaxExperts || values[i] > best.value)) {
        best = {values[i], i};
      }
    }
    best = WarpBest(best);
    if (lane == 0) marked[best.index] = 1;
    __syncwarp();
  }
}

// One warp's shared memory.
struct RowShared {
  float scores[kMaxExperts];  // what becomes the weight
  float choice[kMaxExperts];  // what is compared
  float group_scores[kMaxExperts];
  uint8_t marked[kMaxExperts];
};

__device__ inline float ScoreAlone(GateMethod method, float logit) {
  if (method == GateMethod::kNoAuxTc) return 1.0f / (1.0f + expf(-logit));
  // Beyond 20 the difference to the logit itself is below float's last place.
  return sqrtf(logit > 20 ? logit : log1pf(expf(logit)));
}

__device__ inline void ScoreExperts(const GateConfig& gate, const float* logits, const float* bias,
                                    RowShared& row) {
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
__device__ inline void LimitToGroups(const GateConfig& gate, RowShared& row) {
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

// Chooses the experts of `row` from its logits; a warp's work.  ids (ascending) and weights
// [top_k].
__device__ inline void SelectRow(const MoeParams& params, int64_t row, const float* logits,
                                 RowShared& shared, int32_t* ids, float* weights) {
  const GateConfig& gate = params.gate;
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
  if (threadIdx.x % kWarpSize != 0) return;
  float sum = 0;
  int32_t taken = 0;
  for (int32_t e = 0; e < gate.num_experts && taken < gate.top_k; ++e) {
    if (shared.marked[e] == 0) continue;
    ids[taken] = e;
    weights[taken++] = shared.scores[e];
    sum += shared.scores[e];
  }
  for (int32_t i = 0; i < gate.top_k; ++i) {
    float weight = weights[i];
    if (gate.norm_topk_prob) weight /= sum + 1e-20f;
    weights[i] = weight * gate.routed_scaling_factor;
  }
}

}  // namespace kernels::cuda

#endif  // KERNELS_CUDA_GATE_CUH_
