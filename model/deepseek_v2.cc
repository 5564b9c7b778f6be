#include "model/deepseek_v2.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace model {
namespace {

// transformers builds both LoRA norms without the config's eps (models.md 1.1).
constexpr float kLoraNormEps = 1e-6f;
constexpr int64_t kScratchAlignment = 256;  // bytes

CacheLayout LatentLayout(const ModelConfig& config, const NetworkOptions& options) {
  CacheSpec spec;
  spec.block_size = options.block_size;
  spec.groups.push_back({.name = "latent",
                         .layers = config.num_hidden_layers,
                         .entry_bytes = kernels::KvEntryBytes(
                             options.kv_format, config.kv_lora_rank, config.qk_rope_head_dim),
                         .format = options.kv_format});
  return CacheLayout(std::move(spec));
}

kernels::Activation FloatRows(float* data, int64_t row_stride) {
  return {.data = data, .row_stride = row_stride};
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeepseekV2>> DeepseekV2::Create(ModelConfig config, Weights weights,
                                                               std::string weights_digest,
                                                               const NetworkOptions& options,
                                                               kernels::Backend& backend) {
  if (options.max_model_len < 0 || options.max_model_len > config.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat("max_model_len ", options.max_model_len,
                                                   " is not within the checkpoint's ",
                                                   config.max_position_embeddings, " positions"));
  }
  if (options.piece_tokens <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("piece_tokens must be positive, is ", options.piece_tokens));
  }
  RETURN_IF_ERROR(LatentLayout(config, options).spec().Validate());
  std::unique_ptr<DeepseekV2> network(new DeepseekV2(std::move(config), std::move(weights),
                                                     std::move(weights_digest), options, backend));
  RETURN_IF_ERROR(network->Allocate());
  return network;
}

DeepseekV2::DeepseekV2(ModelConfig config, Weights weights, std::string weights_digest,
                       const NetworkOptions& options, kernels::Backend& backend)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      weights_digest_(std::move(weights_digest)),
      options_(options),
      max_model_len_(options.max_model_len > 0 ? options.max_model_len
                                               : config_.max_position_embeddings),
      cache_layout_(LatentLayout(config_, options)),
      backend_(backend),
      pieces_(options.limits, options.block_size, options.piece_tokens) {}

absl::Status DeepseekV2::Allocate() {
  const RopeTables tables = MakeRopeTables(config_.rope, config_.qk_rope_head_dim, max_model_len_);
  ASSIGN_OR_RETURN(rope_cos_, model::Upload(tables.cos, backend_));
  ASSIGN_OR_RETURN(rope_sin_, model::Upload(tables.sin, backend_));
  rope_ = {.cos = rope_cos_->floats(),
           .sin = rope_sin_->floats(),
           .rope_dim = config_.qk_rope_head_dim,
           .max_positions = max_model_len_,
           .layout = config_.rope.interleave ? kernels::RopeLayout::kInterleaved
                                             : kernels::RopeLayout::kHalfSplit};
  ASSIGN_OR_RETURN(scratch_memory_, backend_.Allocate(CarveScratch(nullptr)));
  CarveScratch(scratch_memory_->data());
  return absl::OkStatus();
}

int64_t DeepseekV2::CarveScratch(std::byte* base) {
  int64_t size = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = base == nullptr ? nullptr : reinterpret_cast<T*>(base + size);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    size += (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  };
  const StepLimits& limits = options_.limits;
  const int64_t rows = limits.max_tokens;
  const int64_t heads = config_.num_attention_heads;
  const int64_t piece = options_.piece_tokens;
  take(scratch_.hidden, rows * config_.hidden_size);
  take(scratch_.q_a, rows * config_.q_lora_rank);
  take(scratch_.q, rows * heads * config_.qk_head_dim());
  take(scratch_.kv_a, rows * (config_.kv_lora_rank + config_.qk_rope_head_dim));
  take(scratch_.q_latent, limits.max_absorbed_tokens * heads * config_.kv_lora_rank);
  take(scratch_.attention, rows * heads * config_.v_head_dim);
  take(scratch_.lse, rows * heads);
  take(scratch_.mlp, rows * config_.intermediate_size);
  take(scratch_.piece_latent, piece * config_.kv_lora_rank);
  take(scratch_.piece_k_rope, piece * config_.qk_rope_head_dim);
  take(scratch_.piece_kv, piece * heads * (config_.qk_nope_head_dim + config_.v_head_dim));
  take(scratch_.plan, static_cast<int64_t>(StepPlan(limits).bytes().size()));
  take(scratch_.cu_seqlens_q, pieces_.max_entries());
  take(scratch_.cu_seqlens_kv, pieces_.max_entries());
  take(scratch_.causal_offset, pieces_.max_entries());
  take(scratch_.q_row_begin, pieces_.max_entries());
  take(scratch_.slots, pieces_.max_slots());
  take(scratch_.decode_workspace, backend_.attention().AbsorbedDecodeWorkspaceBytes(
                                      limits.max_absorbed_tokens, StepLimits::kMaxSplitsPerSeq,
                                      config_.num_attention_heads, config_.kv_lora_rank));
  take(scratch_.moe_workspace,
       config_.gate.num_experts == 0
           ? 0
           : backend_.MoeWorkspaceBytes(limits.max_tokens, config_.gate, config_.hidden_size,
                                        config_.moe_intermediate_size));
  take(scratch_.head_workspace,
       backend_.HeadAndSampleWorkspaceBytes(std::max(limits.max_samples, limits.max_logit_rows),
                                            config_.hidden_size, config_.vocab_size));
  return size;
}

absl::Status DeepseekV2::Forward(const kernels::LaunchContext& context, const StepPlan& plan,
                                 const StepState& state, const StepOutput& output) {
  FERRY_CHECK(plan.limits() == options_.limits) << "a plan of other limits";
  const StepCounts& counts = plan.counts();
  const Step step{.context = context,
                  .plan = plan,
                  .state = state,
                  .output = output,
                  .num_tokens = counts.num_tokens,
                  .num_absorbed_tokens = counts.num_absorbed_tokens,
                  .device_plan = scratch_.plan};
  if (counts.num_copies > 0) {
    const auto copies = static_cast<size_t>(counts.num_copies);
    RETURN_IF_ERROR(backend_.CopyBlocks(context, state.cache, cache_layout_.block_bytes(),
                                        {plan.copy_src, copies}, {plan.copy_dst, copies}));
  }
  if (counts.num_tokens == 0) return absl::OkStatus();
  pieces_.Make(plan);
  RETURN_IF_ERROR(Upload(step));
  RETURN_IF_ERROR(Embed(step));
  for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    RETURN_IF_ERROR(Attention(step, layer));
    const MlpWeights& mlp = weights_.layers[layer].mlp;
    RETURN_IF_ERROR(mlp.experts != nullptr ? MixtureOfExperts(step, mlp) : DenseMlp(step, mlp));
  }
  return HeadAndSample(step);
}

absl::Status DeepseekV2::Upload(const Step& step) {
  RETURN_IF_ERROR(backend_.CopyToDevice(step.context, scratch_.plan, step.plan.bytes()));
  const auto upload = [&](auto* device, auto host) {
    return backend_.CopyToDevice(
        step.context, reinterpret_cast<std::byte*>(device),
        {reinterpret_cast<const std::byte*>(host.data()), host.size() * sizeof(*host.data())});
  };
  if (pieces_.passes().empty()) return absl::OkStatus();
  RETURN_IF_ERROR(upload(scratch_.cu_seqlens_q, pieces_.cu_seqlens_q()));
  RETURN_IF_ERROR(upload(scratch_.cu_seqlens_kv, pieces_.cu_seqlens_kv()));
  RETURN_IF_ERROR(upload(scratch_.causal_offset, pieces_.causal_offset()));
  RETURN_IF_ERROR(upload(scratch_.q_row_begin, pieces_.q_row_begin()));
  return upload(scratch_.slots, pieces_.slots());
}

absl::Status DeepseekV2::Embed(const Step& step) {
  return backend_.Embed(step.context, {.num_rows = step.num_tokens,
                                       .token_ids = step.OnDevice(step.plan.token_ids),
                                       .token_source = step.OnDevice(step.plan.token_source),
                                       .previous_sampled = step.state.previous_sampled,
                                       .table = weights_.ends.embedding,
                                       .output = scratch_.hidden,
                                       .output_row_stride = config_.hidden_size});
}

absl::Status DeepseekV2::Attention(const Step& step, int32_t layer) {
  const AttentionWeights& weights = weights_.layers[layer].attention;
  RETURN_IF_ERROR(ProjectQueryAndLatent(step, weights));
  RETURN_IF_ERROR(StoreLatents(step, weights, layer));
  RETURN_IF_ERROR(AttendAbsorbed(step, weights, layer));
  RETURN_IF_ERROR(AttendRagged(step, weights, layer));
  return ProjectOutput(step, weights);
}

// hidden -> q [T, H, nope + rope] with its rotary part rotated, kv_a [T, kv_lora_rank + rope] as it
// is.
absl::Status DeepseekV2::ProjectQueryAndLatent(const Step& step, const AttentionWeights& weights) {
  const int64_t q_columns = int64_t{config_.num_attention_heads} * config_.qk_head_dim();
  const int64_t kv_a_columns = config_.kv_lora_rank + config_.qk_rope_head_dim;
  const bool lora = weights.q_b != nullptr;
  const kernels::OutputSegment q{.data = scratch_.q, .row_stride = q_columns, .columns = q_columns};
  const kernels::OutputSegment q_a{
      .data = scratch_.q_a, .row_stride = config_.q_lora_rank, .columns = config_.q_lora_rank};
  const kernels::OutputSegment kv_a{
      .data = scratch_.kv_a, .row_stride = kv_a_columns, .columns = kv_a_columns};
  const std::array<kernels::OutputSegment, 2> outputs = {lora ? q_a : q, kv_a};
  RETURN_IF_ERROR(
      backend_.Linear(step.context, {.weight = weights.q_kv_a.get(),
                                     .num_rows = step.num_tokens,
                                     .input = FloatRows(scratch_.hidden, config_.hidden_size),
                                     .norm_weight = weights.input_norm->floats(),
                                     .norm_eps = static_cast<float>(config_.rms_norm_eps),
                                     .outputs = outputs}));
  if (lora) {
    RETURN_IF_ERROR(
        backend_.Linear(step.context, {.weight = weights.q_b.get(),
                                       .num_rows = step.num_tokens,
                                       .input = FloatRows(scratch_.q_a, config_.q_lora_rank),
                                       .norm_weight = weights.q_a_norm->floats(),
                                       .norm_eps = kLoraNormEps,
                                       .outputs = {&q, 1}}));
  }
  return backend_.Rope(step.context, {.num_rows = step.num_tokens,
                                      .num_heads = config_.num_attention_heads,
                                      .data = scratch_.q + config_.qk_nope_head_dim,
                                      .row_stride = q_columns,
                                      .head_stride = config_.qk_head_dim(),
                                      .rope = rope_,
                                      .positions = step.OnDevice(step.plan.positions)});
}

// The one place where the latent cache is written.
absl::Status DeepseekV2::StoreLatents(const Step& step, const AttentionWeights& weights,
                                      int32_t layer) {
  return backend_.StoreKv(step.context,
                          {.num_rows = step.num_tokens,
                           .kv_a = scratch_.kv_a,
                           .kv_a_row_stride = config_.kv_lora_rank + config_.qk_rope_head_dim,
                           .kv_lora_rank = config_.kv_lora_rank,
                           .norm_weight = weights.kv_a_norm->floats(),
                           .norm_eps = kLoraNormEps,
                           .rope = rope_,
                           .positions = step.OnDevice(step.plan.positions),
                           .slots = step.OnDevice(step.plan.slots),
                           .pages = cache_layout_.Pages(step.state.cache, 0, layer)});
}

// The first rows: q_nope through W_UK into the latent's space, attention over the latents
// themselves, W_UV out of it (models.md 4.3).
absl::Status DeepseekV2::AttendAbsorbed(const Step& step, const AttentionWeights& weights,
                                        int32_t layer) {
  if (step.num_absorbed_tokens == 0) return absl::OkStatus();
  const int64_t heads = config_.num_attention_heads;
  const int64_t q_head_stride = config_.qk_head_dim();
  RETURN_IF_ERROR(
      backend_.HeadLinear(step.context, {.weight = weights.w_uk_t.get(),
                                         .num_rows = step.num_absorbed_tokens,
                                         .input = scratch_.q,
                                         .input_row_stride = heads * q_head_stride,
                                         .input_head_stride = q_head_stride,
                                         .output = scratch_.q_latent,
                                         .output_row_stride = heads * config_.kv_lora_rank,
                                         .output_head_stride = config_.kv_lora_rank}));
  const StepPlan& plan = step.plan;
  return backend_.attention().AbsorbedDecode(
      step.context, {.num_seqs = plan.counts().num_absorbed_seqs,
                     .num_heads = config_.num_attention_heads,
                     .kv_lora_rank = config_.kv_lora_rank,
                     .qk_rope_head_dim = config_.qk_rope_head_dim,
                     .v_head_dim = config_.v_head_dim,
                     .softmax_scale = config_.softmax_scale(),
                     .cu_seqlens_q = step.OnDevice(plan.cu_seqlens_q),
                     .kv_len = step.OnDevice(plan.kv_len),
                     .block_table = step.OnDevice(plan.block_table),
                     .block_table_stride = plan.block_table_stride(),
                     .splits = step.OnDevice(plan.splits),
                     .num_splits = plan.counts().num_splits,
                     .pages = cache_layout_.Pages(step.state.cache, 0, layer),
                     .q_latent = scratch_.q_latent,
                     .q_latent_row_stride = heads * config_.kv_lora_rank,
                     .q_latent_head_stride = config_.kv_lora_rank,
                     .q_rope = scratch_.q + config_.qk_nope_head_dim,
                     .q_rope_row_stride = heads * q_head_stride,
                     .q_rope_head_stride = q_head_stride,
                     .w_uv = weights.w_uv.get(),
                     .out = scratch_.attention,
                     .out_row_stride = heads * config_.v_head_dim,
                     .out_head_stride = config_.v_head_dim,
                     .workspace = scratch_.decode_workspace});
}

// The other rows: keys and values are decompressed from the stored latents piece by piece, and
// attended with their heads (models.md 4.2).
absl::Status DeepseekV2::AttendRagged(const Step& step, const AttentionWeights& weights,
                                      int32_t layer) {
  const int64_t heads = config_.num_attention_heads;
  const int64_t q_head_stride = config_.qk_head_dim();
  const int64_t kv_head_stride = config_.qk_nope_head_dim + config_.v_head_dim;
  for (const PiecePass& pass : pieces_.passes()) {
    RETURN_IF_ERROR(DecompressPiece(step, weights, layer, pass));
    RETURN_IF_ERROR(backend_.attention().RaggedMha(
        step.context, {.num_seqs = pass.num_seqs,
                       .num_heads = config_.num_attention_heads,
                       .qk_nope_head_dim = config_.qk_nope_head_dim,
                       .qk_rope_head_dim = config_.qk_rope_head_dim,
                       .v_head_dim = config_.v_head_dim,
                       .softmax_scale = config_.softmax_scale(),
                       .cu_seqlens_q = scratch_.cu_seqlens_q + pass.first_entry,
                       .cu_seqlens_kv = scratch_.cu_seqlens_kv + pass.first_entry,
                       .causal_offset = scratch_.causal_offset + pass.first_entry,
                       .q_row_begin = scratch_.q_row_begin + pass.first_entry,
                       .q_nope = scratch_.q,
                       .q_nope_row_stride = heads * q_head_stride,
                       .q_nope_head_stride = q_head_stride,
                       .q_rope = scratch_.q + config_.qk_nope_head_dim,
                       .q_rope_row_stride = heads * q_head_stride,
                       .q_rope_head_stride = q_head_stride,
                       .k_nope = scratch_.piece_kv,
                       .k_nope_row_stride = heads * kv_head_stride,
                       .k_nope_head_stride = kv_head_stride,
                       .k_rope = scratch_.piece_k_rope,
                       .k_rope_row_stride = config_.qk_rope_head_dim,
                       .v = scratch_.piece_kv + config_.qk_nope_head_dim,
                       .v_row_stride = heads * kv_head_stride,
                       .v_head_stride = kv_head_stride,
                       .out = scratch_.attention,
                       .out_row_stride = heads * config_.v_head_dim,
                       .out_head_stride = config_.v_head_dim,
                       .lse = scratch_.lse,
                       .lse_stride = options_.limits.max_tokens,
                       .accumulate = pass.accumulate}));
  }
  return absl::OkStatus();
}

// Cache -> piece_k_rope, and through kv_b -> piece_kv [keys, H, nope + v].
absl::Status DeepseekV2::DecompressPiece(const Step& step, const AttentionWeights& weights,
                                         int32_t layer, const PiecePass& pass) {
  RETURN_IF_ERROR(
      backend_.GatherKv(step.context, {.num_rows = pass.num_keys,
                                       .slots = scratch_.slots + pass.first_slot,
                                       .pages = cache_layout_.Pages(step.state.cache, 0, layer),
                                       .kv_lora_rank = config_.kv_lora_rank,
                                       .rope_dim = config_.qk_rope_head_dim,
                                       .latent = scratch_.piece_latent,
                                       .latent_row_stride = config_.kv_lora_rank,
                                       .k_rope = scratch_.piece_k_rope,
                                       .k_rope_row_stride = config_.qk_rope_head_dim}));
  const int64_t columns =
      int64_t{config_.num_attention_heads} * (config_.qk_nope_head_dim + config_.v_head_dim);
  const kernels::OutputSegment output{
      .data = scratch_.piece_kv, .row_stride = columns, .columns = columns};
  return backend_.Linear(step.context,
                         {.weight = weights.kv_b.get(),
                          .num_rows = pass.num_keys,
                          .input = FloatRows(scratch_.piece_latent, config_.kv_lora_rank),
                          .outputs = {&output, 1}});
}

// hidden += W_o attention.
absl::Status DeepseekV2::ProjectOutput(const Step& step, const AttentionWeights& weights) {
  const int64_t columns = int64_t{config_.num_attention_heads} * config_.v_head_dim;
  const kernels::OutputSegment output{
      .data = scratch_.hidden, .row_stride = config_.hidden_size, .columns = config_.hidden_size};
  return backend_.Linear(step.context, {.weight = weights.o.get(),
                                        .num_rows = step.num_tokens,
                                        .input = FloatRows(scratch_.attention, columns),
                                        .epilogue = kernels::LinearEpilogue::kResidual,
                                        .epilogue_residual = scratch_.hidden,
                                        .outputs = {&output, 1}});
}

// hidden += W_down( silu(W_gate a) * W_up a ), a = norm(hidden).
absl::Status DeepseekV2::DenseMlp(const Step& step, const MlpWeights& weights) {
  const kernels::OutputSegment activated{.data = scratch_.mlp,
                                         .row_stride = config_.intermediate_size,
                                         .columns = config_.intermediate_size};
  RETURN_IF_ERROR(
      backend_.Linear(step.context, {.weight = weights.gate_up.get(),
                                     .num_rows = step.num_tokens,
                                     .input = FloatRows(scratch_.hidden, config_.hidden_size),
                                     .norm_weight = weights.norm->floats(),
                                     .norm_eps = static_cast<float>(config_.rms_norm_eps),
                                     .epilogue = kernels::LinearEpilogue::kSwiGlu,
                                     .outputs = {&activated, 1}}));
  const kernels::OutputSegment output{
      .data = scratch_.hidden, .row_stride = config_.hidden_size, .columns = config_.hidden_size};
  return backend_.Linear(step.context, {.weight = weights.down.get(),
                                        .num_rows = step.num_tokens,
                                        .input = FloatRows(scratch_.mlp, config_.intermediate_size),
                                        .epilogue = kernels::LinearEpilogue::kResidual,
                                        .epilogue_residual = scratch_.hidden,
                                        .outputs = {&output, 1}});
}

absl::Status DeepseekV2::MixtureOfExperts(const Step& step, const MlpWeights& weights) {
  return backend_.Moe(
      step.context,
      {.num_rows = step.num_tokens,
       .input = scratch_.hidden,
       .input_row_stride = config_.hidden_size,
       .norm_weight = weights.norm->floats(),
       .norm_eps = static_cast<float>(config_.rms_norm_eps),
       .gate = config_.gate,
       .gate_weight = weights.gate.get(),
       .gate_bias = weights.gate_bias == nullptr ? nullptr : weights.gate_bias->floats(),
       .experts = weights.experts.get(),
       .output = scratch_.hidden,
       .output_row_stride = config_.hidden_size,
       .workspace = scratch_.moe_workspace});
}

absl::Status DeepseekV2::HeadAndSample(const Step& step) {
  const StepPlan& plan = step.plan;
  const StepCounts& counts = plan.counts();
  if (counts.num_samples == 0 && counts.num_logit_rows == 0) return absl::OkStatus();
  return backend_.HeadAndSample(step.context, {.hidden = scratch_.hidden,
                                               .hidden_row_stride = config_.hidden_size,
                                               .vocab_size = config_.vocab_size,
                                               .norm_weight = weights_.ends.final_norm->floats(),
                                               .norm_eps = static_cast<float>(config_.rms_norm_eps),
                                               .head = weights_.ends.head.get(),
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
                                               .workspace = scratch_.head_workspace});
}

}  // namespace model
