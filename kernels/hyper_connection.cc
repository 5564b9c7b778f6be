#include "kernels/hyper_connection.h"

#include "absl/strings/str_cat.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kernels {
namespace {

absl::Status CheckSizes(int32_t num_rows, int32_t num_streams, int64_t hidden_size) {
  if (num_rows < 0 || num_streams < 1 || num_streams > kMaxStreams || hidden_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("hyper connection over ", num_rows, " rows of ",
                                                   num_streams, " streams (1 to ", kMaxStreams,
                                                   ") of ", hidden_size, " values"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckHyperPre(const HyperPreParams& params) {
  FERRY_CHECK(params.fn != nullptr);
  RETURN_IF_ERROR(CheckSizes(params.num_rows, params.num_streams, params.hidden_size));
  const int64_t n = params.num_streams;
  const int64_t mixes = params.post == nullptr ? n : n * (2 + n);
  if (params.fn->out_features() != mixes || params.fn->in_features() != n * params.hidden_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("hyper connection of ", n, " streams of ", params.hidden_size,
                     " values needs fn [", mixes, ", ", n * params.hidden_size, "], has [",
                     params.fn->out_features(), ", ", params.fn->in_features(), "]"));
  }
  if (params.base == nullptr || params.scale == nullptr || params.mixes == nullptr ||
      (params.comb == nullptr) != (params.post == nullptr) || params.sinkhorn_iters < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hyper connection: base, scale or mixes is null, post and comb are not both there, or "
        "sinkhorn_iters ",
        params.sinkhorn_iters, " is below 1"));
  }
  return absl::OkStatus();
}

absl::Status CheckHyperPost(const HyperPostParams& params) {
  RETURN_IF_ERROR(CheckSizes(params.num_rows, params.num_streams, params.hidden_size));
  if (params.block_output == nullptr || params.post == nullptr || params.comb == nullptr ||
      params.streams == nullptr) {
    return absl::InvalidArgumentError("hyper connection: an array is null");
  }
  return absl::OkStatus();
}

}  // namespace kernels
