#include "model/deepseek_v4.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "model/network_parts.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace model {

absl::StatusOr<std::unique_ptr<DeepseekV4>> DeepseekV4::Create(ModelConfig config,
                                                               V4Weights weights,
                                                               std::string weights_digest,
                                                               const NetworkOptions& options,
                                                               kernels::Backend& backend) {
  RETURN_IF_ERROR(CheckNetworkOptions(options, config));
  if (options.limits.sliding_window != config.sliding_window) {
    return absl::InvalidArgumentError(
        absl::StrCat("plans for a sliding window of ", options.limits.sliding_window,
                     " tokens, the model's has ", config.sliding_window));
  }
  std::unique_ptr<DeepseekV4> network(new DeepseekV4(std::move(config), std::move(weights),
                                                     std::move(weights_digest), options, backend));
  RETURN_IF_ERROR(network->Allocate());
  return network;
}

DeepseekV4::DeepseekV4(ModelConfig config, V4Weights weights, std::string weights_digest,
                       const NetworkOptions& options, kernels::Backend& backend)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      weights_digest_(std::move(weights_digest)),
      options_(options),
      max_model_len_(options.max_model_len > 0 ? options.max_model_len
                                               : config_.max_position_embeddings),
      backend_(backend),
      attention_(config_, options_, max_model_len_, backend) {}

absl::Status DeepseekV4::Allocate() {
  RETURN_IF_ERROR(attention_.UploadRopes());
  ASSIGN_OR_RETURN(scratch_memory_, backend_.Allocate(CarveScratch(nullptr)));
  CarveScratch(scratch_memory_->data());
  return absl::OkStatus();
}

int64_t DeepseekV4::CarveScratch(std::byte* base) {
  ScratchCarver carver(base);
  const StepLimits& limits = options_.limits;
  const int64_t rows = limits.max_tokens;
  const int64_t streams = config_.hc_mult;
  carver.Take(scratch_.plan, StepPlan::SizeBytes(limits));
  carver.Take(scratch_.token_ids, rows);
  carver.Take(scratch_.streams, rows * streams * config_.hidden_size);
  carver.Take(scratch_.mixes, rows * streams * (2 + streams));
  carver.Take(scratch_.post, rows * streams);
  carver.Take(scratch_.comb, rows * streams * streams);
  carver.Take(scratch_.input, rows * config_.hidden_size);
  carver.Take(scratch_.output, rows * config_.hidden_size);
  carver.Take(
      scratch_.linear_workspace,
      backend_.LinearWorkspaceBytes(
          limits.max_tokens, std::max({int64_t{config_.hidden_size}, int64_t{config_.q_lora_rank},
                                       int64_t{config_.o_groups} * config_.o_lora_rank,
                                       int64_t{config_.num_attention_heads} / config_.o_groups *
                                           config_.qk_head_dim()})));
  carver.Take(
      scratch_.moe_workspace,
      backend_.MoeWorkspaceBytes(
          limits.max_tokens, config_.gate, config_.hidden_size, config_.moe_intermediate_size,
          int64_t{config_.n_shared_experts} * config_.moe_intermediate_size));
  carver.Take(scratch_.head_workspace, backend_.HeadAndSampleWorkspaceBytes(
                                           std::max(limits.max_samples, limits.max_logit_rows),
                                           config_.hidden_size, config_.vocab_size));
  attention_.CarveScratch(carver);
  return carver.size();
}

absl::Status DeepseekV4::Forward(const kernels::LaunchContext& context, const StepPlan& plan,
                                 const StepState& state, const StepOutput& output) {
  FERRY_CHECK(plan.limits() == options_.limits) << "a plan of other limits";
  if (state.state_slots == nullptr) {
    return absl::InternalError("deepseek_v4 keeps a state per sequence, the engine has no slots");
  }
  const StepView step{context, plan, state, output, scratch_.plan, scratch_.linear_workspace};
  RETURN_IF_ERROR(CopyPlannedBlocks(backend_, context, plan, state, cache_layout().block_bytes()));
  if (step.num_tokens() == 0) return absl::OkStatus();
  RETURN_IF_ERROR(backend_.CopyToDevice(context, scratch_.plan, plan.used_bytes()));
  RETURN_IF_ERROR(attention_.BeginStep(step));
  RETURN_IF_ERROR(EmbedStreams(step));
  for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    const V4LayerWeights& weights = weights_.layers[layer];
    RETURN_IF_ERROR(Collapse(step, weights.attention_mix, /*mix_back=*/true));
    RETURN_IF_ERROR(
        attention_.Attend(step, weights.attention, layer, scratch_.input, scratch_.output));
    RETURN_IF_ERROR(MixBack(step));
    RETURN_IF_ERROR(Collapse(step, weights.expert_mix, /*mix_back=*/true));
    RETURN_IF_ERROR(Experts(step, weights.experts));
    RETURN_IF_ERROR(MixBack(step));
  }
  RETURN_IF_ERROR(Collapse(step, weights_.head_mix, /*mix_back=*/false));
  return HeadAndSample(backend_, step, weights_.ends, config_, scratch_.input,
                       scratch_.head_workspace);
}

// Every stream begins as the embedding.
absl::Status DeepseekV4::EmbedStreams(const StepView& step) {
  for (int32_t stream = 0; stream < config_.hc_mult; ++stream) {
    RETURN_IF_ERROR(backend_.Embed(
        step.context, {.num_rows = step.num_tokens(),
                       .token_ids = step.OnDevice(step.plan.token_ids),
                       .token_source = step.OnDevice(step.plan.token_source),
                       .previous_sampled = step.state.previous_sampled,
                       .table = weights_.ends.embedding,
                       .output = scratch_.streams + int64_t{stream} * config_.hidden_size,
                       .output_row_stride = int64_t{config_.hc_mult} * config_.hidden_size,
                       .resolved_ids = scratch_.token_ids}));
  }
  return absl::OkStatus();
}

absl::Status DeepseekV4::Collapse(const StepView& step, const StreamMixWeights& mix,
                                  bool mix_back) {
  return backend_.HyperPre(step.context, {.num_rows = step.num_tokens(),
                                          .num_streams = config_.hc_mult,
                                          .hidden_size = config_.hidden_size,
                                          .streams = scratch_.streams,
                                          .fn = mix.fn.get(),
                                          .base = mix.base->floats(),
                                          .scale = mix.scale->floats(),
                                          .norm_eps = static_cast<float>(config_.rms_norm_eps),
                                          .eps = static_cast<float>(config_.hc_eps),
                                          .sinkhorn_iters = config_.hc_sinkhorn_iters,
                                          .mixes = scratch_.mixes,
                                          .output = scratch_.input,
                                          .post = mix_back ? scratch_.post : nullptr,
                                          .comb = mix_back ? scratch_.comb : nullptr});
}

absl::Status DeepseekV4::MixBack(const StepView& step) {
  return backend_.HyperPost(step.context, {.num_rows = step.num_tokens(),
                                           .num_streams = config_.hc_mult,
                                           .hidden_size = config_.hidden_size,
                                           .block_output = scratch_.output,
                                           .post = scratch_.post,
                                           .comb = scratch_.comb,
                                           .streams = scratch_.streams});
}

absl::Status DeepseekV4::Experts(const StepView& step, const V4ExpertWeights& weights) {
  return backend_.Moe(
      step.context,
      {.num_rows = step.num_tokens(),
       .input = scratch_.input,
       .input_row_stride = config_.hidden_size,
       .norm_weight = weights.norm->floats(),
       .norm_eps = static_cast<float>(config_.rms_norm_eps),
       .gate = config_.gate,
       .gate_weight = weights.gate.get(),
       .gate_bias = weights.gate_bias == nullptr ? nullptr : weights.gate_bias->floats(),
       .expert_table = weights.table(),
       .vocab_size = config_.vocab_size,
       .token_ids = scratch_.token_ids,
       .experts = weights.experts.get(),
       .swiglu_limit = config_.swiglu_limit,
       .residual = false,
       .output = scratch_.output,
       .output_row_stride = config_.hidden_size,
       .workspace = scratch_.moe_workspace});
}

}  // namespace model
