#include "kernels/head_and_sample.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace kernels {

absl::Status CheckHeadAndSample(const HeadAndSampleParams& params) {
  if (params.num_samples < 0 || params.num_logit_rows < 0 || params.num_penalty_resets < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_and_sample: ", params.num_samples, " samples, ", params.num_logit_rows,
                     " logit rows, ", params.num_penalty_resets, " penalty resets"));
  }
  if (params.num_penalty_resets > 0 && params.penalty_resets == nullptr) {
    return absl::InvalidArgumentError("head_and_sample: penalty_resets is null");
  }
  const PenaltyState& penalties = params.penalties;
  if (penalties.num_slots > 0 &&
      (penalties.output_counts == nullptr || penalties.in_prompt == nullptr)) {
    return absl::InvalidArgumentError("head_and_sample: penalty slots without memory");
  }
  if (params.num_samples == 0 && params.num_logit_rows == 0) return absl::OkStatus();
  if (params.head == nullptr || params.hidden == nullptr || params.workspace == nullptr ||
      (params.num_samples > 0 &&
       (params.samples == nullptr || params.results == nullptr || params.sampled_ids == nullptr)) ||
      (params.num_logit_rows > 0 && (params.logit_rows == nullptr || params.logits == nullptr))) {
    return absl::InvalidArgumentError("head_and_sample: an input, output or workspace is null");
  }
  if (params.vocab_size <= 0 || params.head->out_features() != params.vocab_size ||
      params.hidden_row_stride < params.head->in_features()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "head_and_sample: head is ", params.head->out_features(), " x ", params.head->in_features(),
        ", vocabulary ", params.vocab_size, ", hidden row stride ", params.hidden_row_stride));
  }
  return absl::OkStatus();
}

absl::Status CheckEmbed(const EmbedParams& params) {
  const WeightTensor& table = params.table;
  if (table.dtype != DType::kFloat32 && table.dtype != DType::kBfloat16 &&
      table.dtype != DType::kFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("no kernel for embeddings of dtype ", std::string(DTypeName(table.dtype))));
  }
  if (table.scales != nullptr) {
    return absl::InvalidArgumentError("no kernel for embeddings with scales");
  }
  if (params.num_rows > 1 && params.output_row_stride < table.cols) {
    return absl::InvalidArgumentError(absl::StrCat("output row stride ", params.output_row_stride,
                                                   " < ", table.cols, " columns"));
  }
  return absl::OkStatus();
}

}  // namespace kernels
