#include "kernels/compress_kv.h"

#include "absl/strings/str_cat.h"
#include "kernels/store_kv.h"
#include "status/status_macros.h"

namespace kernels {

int32_t RotaryValues(const CompressKvParams& params) {
  return params.pages.format == KvFormat::kFp8IndexKey ? 0 : params.rope.rope_dim;
}

absl::Status CheckCompressKv(const CompressKvParams& params) {
  RETURN_IF_ERROR(CheckRopeTable(params.rope));
  if (params.num_seqs < 0 || params.num_rows < 0 || params.ratio < 1 || params.dim < 1 ||
      params.rope.rope_dim > params.dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "compress_kv of ", params.num_seqs, " sequences, ", params.num_rows, " rows: ratio ",
        params.ratio, ", dim ", params.dim, ", rope_dim ", params.rope.rope_dim));
  }
  if (params.num_seqs == 0) return absl::OkStatus();
  if (params.kv == nullptr || params.gate == nullptr || params.position_bias == nullptr ||
      params.norm_weight == nullptr || params.state == nullptr || params.state_slots == nullptr ||
      params.cu_seqlens_q == nullptr || params.kv_len == nullptr || params.block_table == nullptr) {
    return absl::InvalidArgumentError("compress_kv: an array is null");
  }
  const int32_t rotary = RotaryValues(params);
  return CheckKvPages(params.pages, params.dim - rotary, rotary);
}

}  // namespace kernels
