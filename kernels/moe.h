// Moe: the whole mixture block of a layer as one operation: norm, gate, experts, shared expert, residual.
//
//   a      = rmsnorm(x; norm_weight, eps)
//   scores = W_gate a                                     float32, fixed reduction order
//   ids, w = select(scores)                               models.md 5.1-5.3; ties go to the lower id
//            or expert_table[token id], weighed by the scores   V4's hash layers, models.md 7.8
//   out    = x + sum_i w_i expert_{ids_i}(a) + shared(a)        without x if !residual
//   expert(a) = W_down( silu(min(W_gate' a, c)) * clamp(W_up a, -c, c) ), c = swiglu_limit
//
// A row's result does not depend, bit for bit, on the other rows: contributions are added in ascending
// expert id, the shared expert last.  CUDA has one form for up to 8 rows and one for more, whose bits differ.
// Source: DeepSeek-V2 paper 2.2, DeepSeek-V3 paper 2.1.2; models.md 5.

#ifndef KERNELS_MOE_H_
#define KERNELS_MOE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/linear.h"
#include "kernels/tensor.h"

namespace kernels {

// Routed and shared experts of one layer.  Opaque, made by the backend at load.
class PackedExperts {
 public:
  virtual ~PackedExperts() = default;
};

// Weights of one expert as the checkpoint stores them.
struct ExpertTensors {
  WeightTensor gate;                     // [intermediate, hidden]
  WeightTensor up;                       // [intermediate, hidden]
  WeightTensor down;                     // [hidden, intermediate]
};

enum class GateMethod : uint8_t {
  kGreedy,              // softmax, top-k, weights not renormalised unless norm_topk_prob
  kGroupLimitedGreedy,  // softmax; a group's score is its best expert
  kNoAuxTc,             // sigmoid; bias for selection only; a group's score is the sum of its best two
  kSqrtSoftplus,        // sqrt(ln(1 + e^x)); bias for selection only; no groups
};

struct GateConfig {
  GateMethod method = GateMethod::kGreedy;
  int32_t num_experts = 0;               // routed
  int32_t top_k = 0;
  int32_t num_groups = 1;
  int32_t top_k_groups = 1;
  bool norm_topk_prob = false;           // w /= sum(w) + 1e-20
  float routed_scaling_factor = 1;
};

struct MoeParams {
  int32_t num_rows = 0;
  const float* input = nullptr;          // [num_rows, hidden], the residual stream
  int64_t input_row_stride = 0;          // elements
  const float* norm_weight = nullptr;    // [hidden]
  float norm_eps = 1e-6f;
  GateConfig gate;
  const PackedLinear* gate_weight = nullptr;      // [num_experts, hidden]
  const float* gate_bias = nullptr;      // [num_experts]; kNoAuxTc, kSqrtSoftplus; may be null: zero
  // [vocab_size, top_k], different expert ids a row; null: the scores choose.  A token id outside it takes the experts
  // of token 0 (its embedding is zero as well).
  const int32_t* expert_table = nullptr;
  int32_t vocab_size = 0;
  const int32_t* token_ids = nullptr;    // [num_rows]; used with expert_table
  const PackedExperts* experts = nullptr;
  float swiglu_limit = 0;                // 0: no clamp
  bool residual = true;
  float* output = nullptr;               // [num_rows, hidden]; may be input
  int64_t output_row_stride = 0;
  int32_t* topk_ids = nullptr;           // [num_rows, top_k], ascending id; may be null
  float* topk_weights = nullptr;         // [num_rows, top_k]; may be null
  std::byte* workspace = nullptr;        // Backend::MoeWorkspaceBytes(max rows, ...)
};

inline constexpr int32_t kMaxExperts = 1024;

// Errors: kInvalidArgument if top_k experts cannot be chosen so, or for more than kMaxExperts.
absl::Status CheckGate(const GateConfig& gate);

// What every backend refuses, for packed experts of these sizes.  Errors: kInvalidArgument.
absl::Status CheckMoe(const MoeParams& params, int64_t num_routed_experts, int64_t hidden_size);

}  // namespace kernels

#endif  // KERNELS_MOE_H_
