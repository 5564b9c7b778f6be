#include "model/network_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace model {

absl::StatusOr<DeviceRope> UploadRope(const RopeConfig& rope, int32_t rope_dim,
                                      int32_t max_positions, kernels::Backend& backend) {
  const RopeTables tables = MakeRopeTables(rope, rope_dim, max_positions);
  DeviceRope result;
  ASSIGN_OR_RETURN(result.cos, Upload(tables.cos, backend));
  ASSIGN_OR_RETURN(result.sin, Upload(tables.sin, backend));
  result.table = {.cos = result.cos->floats(),
                  .sin = result.sin->floats(),
                  .rope_dim = rope_dim,
                  .max_positions = max_positions,
                  .layout = rope.interleave ? kernels::RopeLayout::kInterleaved
                                            : kernels::RopeLayout::kHalfSplit};
  return result;
}

absl::Status CheckNetworkOptions(const NetworkOptions& options, const ModelConfig& config) {
  if (options.max_model_len < 0 || options.max_model_len > config.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat("max_model_len ", options.max_model_len,
                                                   " is not within the checkpoint's ",
                                                   config.max_position_embeddings, " positions"));
  }
  if (options.piece_tokens < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("piece_tokens must not be negative, is ", options.piece_tokens));
  }
  return MakeCacheSpec(config, options.kv_cache_dtype, options.block_size).Validate();
}

kernels::Activation FloatRows(float* data, int64_t row_stride) {
  return {.data = data, .row_stride = row_stride};
}

absl::Status CopyPlannedBlocks(kernels::Backend& backend, const kernels::LaunchContext& context,
                               const StepPlan& plan, const StepState& state, int64_t block_bytes) {
  if (plan.counts().num_copies == 0) return absl::OkStatus();
  const auto copies = static_cast<size_t>(plan.counts().num_copies);
  return backend.CopyBlocks(context, state.cache, block_bytes, {plan.copy_src, copies},
                            {plan.copy_dst, copies});
}

absl::Status EmbedTokens(kernels::Backend& backend, const StepView& step,
                         const kernels::WeightTensor& table, float* output) {
  return backend.Embed(step.context, {.num_rows = step.num_tokens(),
                                      .token_ids = step.OnDevice(step.plan.token_ids),
                                      .token_source = step.OnDevice(step.plan.token_source),
                                      .previous_sampled = step.state.previous_sampled,
                                      .table = table,
                                      .output = output,
                                      .output_row_stride = table.cols});
}

absl::Status DenseMlp(kernels::Backend& backend, const StepView& step, const MlpWeights& weights,
                      double norm_eps, float* hidden, float* activated) {
  const int64_t hidden_size = weights.down->out_features();
  const int64_t intermediate_size = weights.down->in_features();
  const kernels::OutputSegment activated_segment{
      .data = activated, .row_stride = intermediate_size, .columns = intermediate_size};
  RETURN_IF_ERROR(backend.Linear(step.context, {.weight = weights.gate_up.get(),
                                                .num_rows = step.num_tokens(),
                                                .input = FloatRows(hidden, hidden_size),
                                                .norm_weight = weights.norm->floats(),
                                                .norm_eps = static_cast<float>(norm_eps),
                                                .epilogue = kernels::LinearEpilogue::kSwiGlu,
                                                .outputs = {&activated_segment, 1},
                                                .workspace = step.linear_workspace}));
  const kernels::OutputSegment output{
      .data = hidden, .row_stride = hidden_size, .columns = hidden_size};
  return backend.Linear(step.context, {.weight = weights.down.get(),
                                       .num_rows = step.num_tokens(),
                                       .input = FloatRows(activated, intermediate_size),
                                       .epilogue = kernels::LinearEpilogue::kResidual,
                                       .epilogue_residual = hidden,
                                       .outputs = {&output, 1},
                                       .workspace = step.linear_workspace});
}

absl::Status MixtureOfExperts(kernels::Backend& backend, const StepView& step,
                              const MlpWeights& weights, const ModelConfig& config, float* hidden,
                              std::byte* workspace) {
  return backend.Moe(
      step.context,
      {.num_rows = step.num_tokens(),
       .input = hidden,
       .input_row_stride = config.hidden_size,
       .norm_weight = weights.norm->floats(),
       .norm_eps = static_cast<float>(config.rms_norm_eps),
       .gate = config.gate,
       .gate_weight = weights.gate.get(),
       .gate_bias = weights.gate_bias == nullptr ? nullptr : weights.gate_bias->floats(),
       .experts = weights.experts.get(),
       .output = hidden,
       .output_row_stride = config.hidden_size,
       .workspace = workspace});
}

absl::Status HeadAndSample(kernels::Backend& backend, const StepView& step,
                           const EndWeights& weights, const ModelConfig& config,
                           const float* hidden, std::byte* workspace) {
  const StepPlan& plan = step.plan;
  const StepCounts& counts = plan.counts();
  if (counts.num_samples == 0 && counts.num_logit_rows == 0) return absl::OkStatus();
  return backend.HeadAndSample(step.context, {.hidden = hidden,
                                              .hidden_row_stride = config.hidden_size,
                                              .vocab_size = config.vocab_size,
                                              .norm_weight = weights.final_norm->floats(),
                                              .norm_eps = static_cast<float>(config.rms_norm_eps),
                                              .head = weights.head.get(),
                                              .samples = step.OnDevice(plan.samples),
                                              .num_samples = counts.num_samples,
                                              .penalty_resets = step.OnDevice(plan.penalty_resets),
                                              .num_penalty_resets = counts.num_penalty_resets,
                                              .history_tokens = step.OnDevice(plan.history_tokens),
                                              .penalties = step.state.penalties,
                                              .results = step.output.results,
                                              .sampled_ids = step.output.sampled_ids,
                                              .logit_rows = step.OnDevice(plan.logit_rows),
                                              .num_logit_rows = counts.num_logit_rows,
                                              .logits = step.output.logits,
                                              .workspace = workspace});
}

}  // namespace model
