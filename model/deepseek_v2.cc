#include "model/deepseek_v2.h"

#include <utility>

#include "status/status_macros.h"

namespace model {

absl::StatusOr<std::unique_ptr<DeepseekV2>> DeepseekV2::Create(ModelConfig config, Weights weights,
                                                               std::string weights_digest,
                                                               const NetworkOptions& options,
                                                               kernels::Backend& backend) {
  RETURN_IF_ERROR(CheckNetworkOptions(options, config));
  std::unique_ptr<DeepseekV2> network(new DeepseekV2(std::move(config), std::move(weights),
                                                     std::move(weights_digest), options, backend));
  RETURN_IF_ERROR(network->Allocate());
  return network;
}

void DeepseekV2::CarveMore(ScratchCarver& carver) {
  carver.Take(decode_workspace_,
              backend().attention().AbsorbedDecodeWorkspaceBytes(
                  options().limits.max_absorbed_tokens, StepLimits::kMaxSplitsPerSeq,
                  config().num_attention_heads, config().kv_lora_rank));
}

absl::Status DeepseekV2::Attention(const StepView& step, int32_t layer) {
  const AttentionWeights& attention = weights().layers[layer].attention;
  RETURN_IF_ERROR(ProjectQueryAndLatent(step, attention));
  RETURN_IF_ERROR(StoreCache(step, attention, layer, step.num_absorbed_tokens()));
  const bool rounded = RoundsAttention(step, attention);
  RETURN_IF_ERROR(AttendAbsorbed(step, attention, layer, rounded));
  RETURN_IF_ERROR(AttendRagged(step, attention, layer, rounded));
  return ProjectOutput(step, attention, rounded);
}

// The first rows, absorbed: attention over the latents themselves, then W_UV out of their space
// (models.md 4.3).
absl::Status DeepseekV2::AttendAbsorbed(const StepView& step, const AttentionWeights& weights,
                                        int32_t layer, bool rounded) {
  if (step.num_absorbed_tokens() == 0) return absl::OkStatus();
  const int64_t heads = config().num_attention_heads;
  const StepPlan& plan = step.plan;
  return backend().attention().AbsorbedDecode(step.context,
                                              {.num_seqs = plan.counts().num_absorbed_seqs,
                                               .num_rows = step.num_absorbed_tokens(),
                                               .max_q_len = step.max_absorbed_q_len(),
                                               .num_heads = config().num_attention_heads,
                                               .kv_lora_rank = config().kv_lora_rank,
                                               .qk_rope_head_dim = config().qk_rope_head_dim,
                                               .v_head_dim = config().v_head_dim,
                                               .softmax_scale = config().softmax_scale(),
                                               .cu_seqlens_q = step.OnDevice(plan.cu_seqlens_q),
                                               .kv_len = step.OnDevice(plan.kv_len),
                                               .block_table = step.OnDevice(plan.block_table),
                                               .block_table_stride = plan.block_table_stride(),
                                               .splits = step.OnDevice(plan.splits),
                                               .num_splits = plan.counts().num_splits,
                                               .max_splits_per_seq = StepLimits::kMaxSplitsPerSeq,
                                               .pages = LatentPages(step, layer),
                                               .q_latent = scratch().q_latent,
                                               .q_latent_row_stride = heads * config().kv_lora_rank,
                                               .q_latent_head_stride = config().kv_lora_rank,
                                               .q_rope = scratch().q + config().qk_nope_head_dim,
                                               .q_rope_row_stride = q_row_stride(),
                                               .q_rope_head_stride = config().qk_head_dim(),
                                               .w_uv = weights.w_uv.get(),
                                               .out = exact_attention(rounded),
                                               .rounded_out = rounded_attention(rounded),
                                               .out_row_stride = heads * config().v_head_dim,
                                               .out_head_stride = config().v_head_dim,
                                               .workspace = decode_workspace_});
}

}  // namespace model
