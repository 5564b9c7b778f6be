#include "kernels/absorbed_decode.h"

#include "absl/strings/str_cat.h"
#include "kernels/store_kv.h"
#include "status/status_macros.h"

namespace kernels {

absl::Status CheckAbsorbedDecode(const AbsorbedDecodeParams& params) {
  if (params.num_seqs < 0 || params.num_rows < 0 || params.max_q_len < 0 ||
      params.max_splits_per_seq < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("absorbed_decode: ", params.num_seqs, " sequences, ", params.num_rows,
                     " rows, max_q_len ", params.max_q_len, ", max_splits_per_seq ",
                     params.max_splits_per_seq));
  }
  if (params.num_seqs == 0) return absl::OkStatus();
  if (params.num_heads <= 0 || params.v_head_dim < 0 || params.num_splits < 0) {
    return absl::InvalidArgumentError(absl::StrCat("absorbed_decode: ", params.num_heads,
                                                   " heads, v_head_dim ", params.v_head_dim, ", ",
                                                   params.num_splits, " splits"));
  }
  RETURN_IF_ERROR(CheckKvPages(params.pages, params.kv_lora_rank, params.qk_rope_head_dim));
  if (params.cu_seqlens_q == nullptr || params.kv_len == nullptr ||
      (params.num_splits > 0 && (params.splits == nullptr || params.block_table == nullptr))) {
    return absl::InvalidArgumentError(
        "absorbed_decode: cu_seqlens_q, kv_len, splits or block_table is null");
  }
  if (params.q_latent == nullptr || (params.q_rope == nullptr && params.qk_rope_head_dim > 0) ||
      params.workspace == nullptr) {
    return absl::InvalidArgumentError("absorbed_decode: q_latent, q_rope or workspace is null");
  }
  if ((params.out == nullptr) == (params.rounded_out == nullptr)) {
    return absl::InvalidArgumentError("absorbed_decode: needs one of out and rounded_out");
  }
  if (params.rounded_out != nullptr && params.w_uv == nullptr) {
    return absl::InvalidArgumentError("absorbed_decode: rounded_out without w_uv");
  }
  if (params.w_uv != nullptr && (params.w_uv->num_heads() != params.num_heads ||
                                 params.w_uv->in_features() != params.kv_lora_rank ||
                                 params.w_uv->out_features() != params.v_head_dim)) {
    return absl::InvalidArgumentError(
        absl::StrCat("absorbed_decode: w_uv has ", params.w_uv->num_heads(), " heads of ",
                     params.w_uv->out_features(), " x ", params.w_uv->in_features(), ", expected ",
                     params.num_heads, " of ", params.v_head_dim, " x ", params.kv_lora_rank));
  }
  return absl::OkStatus();
}

}  // namespace kernels
