#include "kernels/moe.h"

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace kernels {

absl::Status CheckGate(const GateConfig& gate) {
  const bool groups =
      gate.method == GateMethod::kGroupLimitedGreedy || gate.method == GateMethod::kNoAuxTc;
  if (gate.num_experts < 1 || gate.num_experts > kMaxExperts || gate.top_k < 1 ||
      gate.top_k > gate.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("gate takes ", gate.top_k, " of ",
                                                   gate.num_experts, " experts (at most ",
                                                   kMaxExperts, ")"));
  }
  if (groups && (gate.num_groups < 1 || gate.num_experts % gate.num_groups != 0 ||
                 gate.top_k_groups < 1 || gate.top_k_groups > gate.num_groups ||
                 gate.top_k > gate.num_experts / gate.num_groups * gate.top_k_groups)) {
    return absl::InvalidArgumentError(absl::StrCat("gate takes ", gate.top_k, " experts from ",
                                                   gate.top_k_groups, " of ", gate.num_groups,
                                                   " groups of ", gate.num_experts, " experts"));
  }
  return absl::OkStatus();
}

absl::Status CheckMoe(const MoeParams& params, int64_t num_routed_experts, int64_t hidden_size) {
  RETURN_IF_ERROR(CheckGate(params.gate));
  if (params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("moe over ", params.num_rows, " rows"));
  }
  if (params.gate.num_experts != num_routed_experts ||
      params.gate_weight->out_features() != params.gate.num_experts ||
      params.gate_weight->in_features() != hidden_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate over ", params.gate.num_experts, " experts with weight [",
                     params.gate_weight->out_features(), ", ", params.gate_weight->in_features(),
                     "] for ", num_routed_experts, " packed experts of hidden size ", hidden_size));
  }
  if (params.expert_table != nullptr && (params.token_ids == nullptr || params.vocab_size <= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("an expert table of ", params.vocab_size, " tokens ",
                     params.token_ids == nullptr ? "without token ids" : "is empty"));
  }
  if (params.num_rows > 1 &&
      (params.input_row_stride < hidden_size || params.output_row_stride < hidden_size)) {
    return absl::InvalidArgumentError(absl::StrCat("row strides ", params.input_row_stride,
                                                   " (input) and ", params.output_row_stride,
                                                   " (output) < hidden size ", hidden_size));
  }
  return absl::OkStatus();
}

}  // namespace kernels
