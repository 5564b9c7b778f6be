#include "kernels/sparse_decode.h"

#include "absl/strings/str_cat.h"
#include "kernels/store_kv.h"
#include "status/status_macros.h"

namespace kernels {
namespace {

absl::Status CheckSource(const SparseDecodeParams& params, const SparseSource& source) {
  if (source.indices == nullptr) return absl::OkStatus();
  if (source.width < 0 || (params.num_rows > 1 && source.index_stride < source.width)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sparse_decode: ", source.width, " indices a row, index stride ", source.index_stride));
  }
  return CheckKvPages(source.pages, params.dim, params.rope_dim);
}

absl::Status CheckInverseRope(const SparseDecodeParams& params) {
  const RopeTable& rope = params.inverse_rope;
  RETURN_IF_ERROR(CheckRopeTable(rope));
  if (rope.rope_dim > 0 && (rope.rope_dim > params.value_dim || params.positions == nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sparse_decode: inverse rope of ", rope.rope_dim, " of ", params.value_dim,
                     " values", params.positions == nullptr ? " without positions" : ""));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSparseDecode(const SparseDecodeParams& params) {
  if (params.num_rows < 0) {
    return absl::InvalidArgumentError(absl::StrCat("sparse_decode: ", params.num_rows, " rows"));
  }
  if (params.num_rows == 0) return absl::OkStatus();
  if (params.num_heads <= 0 || params.dim <= 0 || params.rope_dim < 0 || params.value_dim <= 0 ||
      params.value_dim > params.dim + params.rope_dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("sparse_decode: ", params.num_heads, " heads, keys of ", params.dim, " + ",
                     params.rope_dim, " values, ", params.value_dim, " of them the value"));
  }
  for (const SparseSource& source : params.sources) RETURN_IF_ERROR(CheckSource(params, source));
  RETURN_IF_ERROR(CheckInverseRope(params));
  const PackedHeadLinear* w_uv = params.w_uv;
  if (params.q == nullptr || (params.q_rope == nullptr && params.rope_dim > 0) ||
      params.out == nullptr || (w_uv != nullptr && params.workspace == nullptr)) {
    return absl::InvalidArgumentError("sparse_decode: q, q_rope, out or workspace is null");
  }
  if (w_uv != nullptr &&
      (w_uv->num_heads() != params.num_heads || w_uv->in_features() != params.value_dim ||
       w_uv->out_features() != params.v_head_dim)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sparse_decode: w_uv has ", w_uv->num_heads(), " heads of ",
                     w_uv->out_features(), " x ", w_uv->in_features(), ", expected ",
                     params.num_heads, " of ", params.v_head_dim, " x ", params.value_dim));
  }
  return absl::OkStatus();
}

}  // namespace kernels
