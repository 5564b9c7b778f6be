#include "kernels/cpu/gate.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kernels::cpu {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();

void Softmax(const float* logits, int32_t n, float* probabilities) {
  const float max = *std::max_element(logits, logits + n);
  float sum = 0;
  for (int32_t i = 0; i < n; ++i) {
    probabilities[i] = std::exp(logits[i] - max);
    sum += probabilities[i];
  }
  for (int32_t i = 0; i < n; ++i) probabilities[i] /= sum;
}

// What becomes the weight of each expert.
void ScoreExperts(const GateConfig& gate, const float* logits, float* scores) {
  switch (gate.method) {
    case GateMethod::kGreedy:
    case GateMethod::kGroupLimitedGreedy:
      return Softmax(logits, gate.num_experts, scores);
    case GateMethod::kNoAuxTc:
      for (int32_t e = 0; e < gate.num_experts; ++e) {
        scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
      }
      return;
    case GateMethod::kSqrtSoftplus:
      for (int32_t e = 0; e < gate.num_experts; ++e) {
        // Beyond 20 the difference to the logit itself is below float's last place.
        scores[e] = std::sqrt(logits[e] > 20 ? logits[e] : std::log1p(std::exp(logits[e])));
      }
      return;
  }
}

void ScaleWeights(const GateConfig& gate, float* weights) {
  float sum = 0;
  for (int32_t i = 0; i < gate.top_k; ++i) sum += weights[i];
  for (int32_t i = 0; i < gate.top_k; ++i) {
    if (gate.norm_topk_prob) weights[i] /= sum + 1e-20f;
    weights[i] *= gate.routed_scaling_factor;
  }
}

bool HasGroups(const GateConfig& gate) {
  return gate.method == GateMethod::kGroupLimitedGreedy || gate.method == GateMethod::kNoAuxTc;
}

// Marks the `count` largest values; ties go to the lower index.  Always marks `count`, NaN or not.
void MarkLargest(const float* values, int32_t n, int32_t count, bool* marked) {
  std::fill_n(marked, n, false);
  for (int32_t taken = 0; taken < count; ++taken) {
    int32_t best = -1;
    for (int32_t i = 0; i < n; ++i) {
      if (!marked[i] && (best < 0 || values[i] > values[best])) best = i;
    }
    marked[best] = true;
  }
}

float GroupScore(const GateConfig& gate, const float* choice, int32_t group_size) {
  float first = kMasked, second = kMasked;
  for (int32_t i = 0; i < group_size; ++i) {
    if (choice[i] > first) {
      second = first;
      first = choice[i];
    } else if (choice[i] > second) {
      second = choice[i];
    }
  }
  return gate.method == GateMethod::kNoAuxTc && group_size > 1 ? first + second : first;
}

}  // namespace

void SelectExperts(const GateConfig& gate, const float* logits, const float* bias, int32_t* ids,
                   float* weights) {
  const int32_t num_experts = gate.num_experts;
  float scores[kMaxExperts] = {};
  float choice[kMaxExperts] = {};  // what is compared
  ScoreExperts(gate, logits, scores);
  const bool biased = bias != nullptr && (gate.method == GateMethod::kNoAuxTc ||
                                          gate.method == GateMethod::kSqrtSoftplus);
  for (int32_t e = 0; e < num_experts; ++e) choice[e] = biased ? scores[e] + bias[e] : scores[e];
  bool marked[kMaxExperts];
  if (HasGroups(gate) && gate.top_k_groups < gate.num_groups) {
    const int32_t group_size = num_experts / gate.num_groups;
    float group_scores[kMaxExperts];
    for (int32_t g = 0; g < gate.num_groups; ++g) {
      group_scores[g] = GroupScore(gate, choice + g * group_size, group_size);
    }
    MarkLargest(group_scores, gate.num_groups, gate.top_k_groups, marked);
    for (int32_t e = 0; e < num_experts; ++e) {
      if (!marked[e / group_size]) choice[e] = kMasked;
    }
  }
  MarkLargest(choice, num_experts, gate.top_k, marked);
  int32_t taken = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    if (!marked[e]) continue;
    ids[taken] = e;
    weights[taken++] = scores[e];
  }
  ScaleWeights(gate, weights);
}

void WeighExperts(const GateConfig& gate, const float* logits, const int32_t* chosen, int32_t* ids,
                  float* weights) {
  float scores[kMaxExperts] = {};
  ScoreExperts(gate, logits, scores);
  std::copy_n(chosen, gate.top_k, ids);
  std::sort(ids, ids + gate.top_k);
  for (int32_t i = 0; i < gate.top_k; ++i) weights[i] = scores[ids[i]];
  ScaleWeights(gate, weights);
}

}  // namespace kernels::cpu
