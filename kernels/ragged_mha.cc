#include "kernels/ragged_mha.h"

#include "absl/strings/str_cat.h"

namespace kernels {

absl::Status CheckRaggedMha(const RaggedMhaParams& params) {
  if (params.num_seqs < 0 || params.num_rows < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ragged_mha: ", params.num_seqs, " sequences, ", params.num_rows, " rows"));
  }
  if (params.num_seqs == 0) return absl::OkStatus();
  if (params.num_heads <= 0 || params.qk_nope_head_dim < 0 || params.qk_rope_head_dim < 0 ||
      params.qk_nope_head_dim + params.qk_rope_head_dim == 0 || params.v_head_dim <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ragged_mha: ", params.num_heads, " heads of ", params.qk_nope_head_dim, " nope, ",
        params.qk_rope_head_dim, " rope and ", params.v_head_dim, " value dimensions"));
  }
  if (params.cu_seqlens_q == nullptr || params.cu_seqlens_kv == nullptr) {
    return absl::InvalidArgumentError("ragged_mha: no cu_seqlens_q or no cu_seqlens_kv");
  }
  if (params.accumulate && params.lse == nullptr) {
    return absl::InvalidArgumentError("ragged_mha: accumulate without lse");
  }
  if (params.accumulate && params.rounded_out != nullptr) {
    return absl::InvalidArgumentError("ragged_mha: accumulate into rounded_out");
  }
  if (params.num_rows == 0) return absl::OkStatus();
  if ((params.out == nullptr) == (params.rounded_out == nullptr)) {
    return absl::InvalidArgumentError("ragged_mha: needs one of out and rounded_out");
  }
  const bool has_nope = params.qk_nope_head_dim > 0;
  const bool has_rope = params.qk_rope_head_dim > 0;
  if ((has_nope && (params.q_nope == nullptr || params.k_nope == nullptr)) ||
      (has_rope && (params.q_rope == nullptr || params.k_rope == nullptr)) || params.v == nullptr) {
    return absl::InvalidArgumentError("ragged_mha: a query, key or value pointer is null");
  }
  return absl::OkStatus();
}

}  // namespace kernels
