#include "model/mla_network.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/inlined_vector.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace model {
namespace {

// transformers builds both LoRA norms without the config's eps (models.md 1.1).
constexpr float kLoraNormEps = 1e-6f;

}  // namespace

MlaNetwork::MlaNetwork(ModelConfig config, Weights weights, std::string weights_digest,
                       const NetworkOptions& options, kernels::Backend& backend,
                       int32_t ragged_positions)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      weights_digest_(std::move(weights_digest)),
      options_(options),
      max_model_len_(options.max_model_len > 0 ? options.max_model_len
                                               : config_.max_position_embeddings),
      cache_layout_(MakeCacheSpec(config_, options.kv_cache_dtype, options.block_size)),
      backend_(backend),
      kv_dtype_(backend.attention().ragged_kv_dtype()),
      piece_tokens_(options.piece_tokens > 0 ? options.piece_tokens
                                             : backend.attention().ragged_piece_tokens()),
      pieces_(options.limits, options.block_size, piece_tokens_, ragged_positions) {}

absl::Status MlaNetwork::Allocate() {
  ASSIGN_OR_RETURN(rope_,
                   UploadRope(config_.rope, config_.qk_rope_head_dim, max_model_len_, backend_));
  ASSIGN_OR_RETURN(scratch_memory_, backend_.Allocate(CarveScratch(nullptr)));
  CarveScratch(scratch_memory_->data());
  return absl::OkStatus();
}

int64_t MlaNetwork::CarveScratch(std::byte* base) {
  ScratchCarver carver(base);
  const StepLimits& limits = options_.limits;
  const int64_t rows = limits.max_tokens;
  const int64_t heads = config_.num_attention_heads;
  const int64_t piece_bytes = int64_t{piece_tokens_} * kernels::DTypeBits(kv_dtype_) / 8;
  carver.Take(scratch_.hidden, rows * config_.hidden_size);
  carver.Take(scratch_.q_a, rows * config_.q_lora_rank);
  carver.Take(scratch_.q, rows * heads * config_.qk_head_dim());
  carver.Take(scratch_.kv_a, rows * (config_.kv_lora_rank + config_.qk_rope_head_dim));
  carver.Take(scratch_.q_latent, max_latent_rows() * heads * config_.kv_lora_rank);
  carver.Take(scratch_.attention, rows * heads * config_.v_head_dim);
  carver.Take(scratch_.lse, rows * heads);
  carver.Take(scratch_.mlp, rows * config_.intermediate_size);
  carver.Take(scratch_.piece_latent, piece_bytes * config_.kv_lora_rank);
  carver.Take(scratch_.piece_k_rope, piece_bytes * config_.qk_rope_head_dim);
  carver.Take(scratch_.piece_kv,
              piece_bytes * heads * (config_.qk_nope_head_dim + config_.v_head_dim));
  carver.Take(scratch_.plan, StepPlan::SizeBytes(limits));
  carver.Take(scratch_.cu_seqlens_q, pieces_.max_entries());
  carver.Take(scratch_.cu_seqlens_kv, pieces_.max_entries());
  carver.Take(scratch_.causal_offset, pieces_.max_entries());
  carver.Take(scratch_.q_row_begin, pieces_.max_entries());
  carver.Take(scratch_.slots, pieces_.max_slots());
  carver.Take(scratch_.linear_workspace,
              backend_.LinearWorkspaceBytes(
                  std::max(limits.max_tokens, piece_tokens_),
                  std::max({int64_t{config_.hidden_size}, int64_t{config_.q_lora_rank},
                            int64_t{config_.kv_lora_rank}, int64_t{config_.intermediate_size},
                            heads * config_.v_head_dim})));
  carver.Take(
      scratch_.moe_workspace,
      config_.gate.num_experts == 0
          ? 0
          : backend_.MoeWorkspaceBytes(
                limits.max_tokens, config_.gate, config_.hidden_size, config_.moe_intermediate_size,
                int64_t{config_.n_shared_experts} * config_.moe_intermediate_size));
  carver.Take(scratch_.head_workspace, backend_.HeadAndSampleWorkspaceBytes(
                                           std::max(limits.max_samples, limits.max_logit_rows),
                                           config_.hidden_size, config_.vocab_size));
  CarveMore(carver);
  return carver.size();
}

absl::Status MlaNetwork::Forward(const kernels::LaunchContext& context, const StepPlan& plan,
                                 const StepState& state, const StepOutput& output) {
  FERRY_CHECK(plan.limits() == options_.limits) << "a plan of other limits";
  RETURN_IF_ERROR(CopyPlannedBlocks(backend_, context, plan, state, cache_layout_.block_bytes()));
  if (plan.counts().num_tokens == 0) return absl::OkStatus();
  const StepView step{context, plan, state, output, scratch_.plan, scratch_.linear_workspace};
  pieces_.Make(plan);
  PrepareStep(plan);
  RETURN_IF_ERROR(UploadStep(step));
  RETURN_IF_ERROR(EmbedTokens(backend_, step, weights_.ends.embedding, scratch_.hidden));
  for (int32_t layer = 0; layer < config_.num_hidden_layers; ++layer) {
    RETURN_IF_ERROR(Attention(step, layer));
    const MlpWeights& mlp = weights_.layers[layer].mlp;
    RETURN_IF_ERROR(
        mlp.experts != nullptr
            ? MixtureOfExperts(backend_, step, mlp, config_, scratch_.hidden,
                               scratch_.moe_workspace)
            : DenseMlp(backend_, step, mlp, config_.rms_norm_eps, scratch_.hidden, scratch_.mlp));
  }
  return HeadAndSample(backend_, step, weights_.ends, config_, scratch_.hidden,
                       scratch_.head_workspace);
}

absl::Status MlaNetwork::UploadStep(const StepView& step) {
  const auto upload = [&](auto* device, auto host) {
    return UploadSpan(backend_, step.context, host, device);
  };
  RETURN_IF_ERROR(upload(scratch_.plan, step.plan.used_bytes()));
  if (pieces_.passes().empty()) return absl::OkStatus();
  RETURN_IF_ERROR(upload(scratch_.cu_seqlens_q, pieces_.cu_seqlens_q()));
  RETURN_IF_ERROR(upload(scratch_.cu_seqlens_kv, pieces_.cu_seqlens_kv()));
  RETURN_IF_ERROR(upload(scratch_.causal_offset, pieces_.causal_offset()));
  RETURN_IF_ERROR(upload(scratch_.q_row_begin, pieces_.q_row_begin()));
  return upload(scratch_.slots, pieces_.slots());
}

absl::Status MlaNetwork::ProjectQueryAndLatent(const StepView& step,
                                               const AttentionWeights& weights,
                                               absl::Span<const kernels::OutputSegment> more) {
  const int64_t kv_a_columns = config_.kv_lora_rank + config_.qk_rope_head_dim;
  const bool lora = weights.q_b != nullptr;
  const kernels::OutputSegment q{
      .data = scratch_.q, .row_stride = q_row_stride(), .columns = q_row_stride()};
  const kernels::OutputSegment q_a{
      .data = scratch_.q_a, .row_stride = config_.q_lora_rank, .columns = config_.q_lora_rank};
  const kernels::OutputSegment kv_a{
      .data = scratch_.kv_a, .row_stride = kv_a_columns, .columns = kv_a_columns};
  absl::InlinedVector<kernels::OutputSegment, 4> outputs = {lora ? q_a : q, kv_a};
  outputs.insert(outputs.end(), more.begin(), more.end());
  RETURN_IF_ERROR(
      backend_.Linear(step.context, {.weight = weights.q_kv_a.get(),
                                     .num_rows = step.num_tokens(),
                                     .input = FloatRows(scratch_.hidden, config_.hidden_size),
                                     .norm_weight = weights.input_norm->floats(),
                                     .norm_eps = static_cast<float>(config_.rms_norm_eps),
                                     .outputs = outputs,
                                     .workspace = step.linear_workspace}));
  if (!lora) return absl::OkStatus();
  return backend_.Linear(step.context, {.weight = weights.q_b.get(),
                                        .num_rows = step.num_tokens(),
                                        .input = FloatRows(scratch_.q_a, config_.q_lora_rank),
                                        .norm_weight = weights.q_a_norm->floats(),
                                        .norm_eps = kLoraNormEps,
                                        .outputs = {&q, 1},
                                        .workspace = step.linear_workspace});
}

absl::Status MlaNetwork::StoreCache(const StepView& step, const AttentionWeights& weights,
                                    int32_t layer, int32_t num_absorbed,
                                    const kernels::IndexKeyParams& index_key) {
  const int32_t* positions = step.OnDevice(step.plan.positions);
  return backend_.PrepareAttention(
      step.context, {.rope = {.num_rows = step.num_tokens(),
                              .num_heads = config_.num_attention_heads,
                              .data = scratch_.q + config_.qk_nope_head_dim,
                              .row_stride = q_row_stride(),
                              .head_stride = config_.qk_head_dim(),
                              .rope = rope(),
                              .positions = positions},
                     .store = {.num_rows = step.num_tokens(),
                               .kv_a = scratch_.kv_a,
                               .kv_a_row_stride = config_.kv_lora_rank + config_.qk_rope_head_dim,
                               .kv_lora_rank = config_.kv_lora_rank,
                               .norm_weight = weights.kv_a_norm->floats(),
                               .norm_eps = kLoraNormEps,
                               .rope = rope(),
                               .positions = positions,
                               .slots = step.OnDevice(step.plan.slots),
                               .pages = LatentPages(step, layer),
                               .index_key = index_key},
                     .absorb = Absorption(weights, 0, num_absorbed)});
}

kernels::HeadLinearParams MlaNetwork::Absorption(const AttentionWeights& weights, int32_t begin,
                                                 int32_t count) const {
  return {.weight = weights.w_uk_t.get(),
          .num_rows = count,
          .input = scratch_.q + begin * q_row_stride(),
          .input_row_stride = q_row_stride(),
          .input_head_stride = config_.qk_head_dim(),
          .output = scratch_.q_latent,
          .output_row_stride = int64_t{config_.num_attention_heads} * config_.kv_lora_rank,
          .output_head_stride = config_.kv_lora_rank};
}

absl::Status MlaNetwork::AttendRagged(const StepView& step, const AttentionWeights& weights,
                                      int32_t layer, bool rounded) {
  const int64_t heads = config_.num_attention_heads;
  const int64_t q_head_stride = config_.qk_head_dim();
  const int64_t kv_head_stride = config_.qk_nope_head_dim + config_.v_head_dim;
  for (const PiecePass& pass : pieces_.passes()) {
    RETURN_IF_ERROR(DecompressPiece(step, weights, layer, pass));
    RETURN_IF_ERROR(backend_.attention().RaggedMha(
        step.context, {.num_seqs = pass.num_seqs,
                       .num_rows = pass.num_rows,
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
                       .q_nope_row_stride = q_row_stride(),
                       .q_nope_head_stride = q_head_stride,
                       .q_rope = scratch_.q + config_.qk_nope_head_dim,
                       .q_rope_row_stride = q_row_stride(),
                       .q_rope_head_stride = q_head_stride,
                       .kv_dtype = kv_dtype_,
                       .num_keys = pass.num_keys,
                       .k_nope = scratch_.piece_kv,
                       .k_nope_row_stride = heads * kv_head_stride,
                       .k_nope_head_stride = kv_head_stride,
                       .k_rope = scratch_.piece_k_rope,
                       .k_rope_row_stride = config_.qk_rope_head_dim,
                       .v = scratch_.piece_kv +
                            int64_t{config_.qk_nope_head_dim} * kernels::DTypeBits(kv_dtype_) / 8,
                       .v_row_stride = heads * kv_head_stride,
                       .v_head_stride = kv_head_stride,
                       .out = exact_attention(rounded),
                       .rounded_out = rounded_attention(rounded),
                       .out_row_stride = heads * config_.v_head_dim,
                       .out_head_stride = config_.v_head_dim,
                       .lse = scratch_.lse,
                       .lse_stride = options_.limits.max_tokens,
                       .accumulate = pass.accumulate}));
  }
  return absl::OkStatus();
}

// Cache -> piece_k_rope, and through kv_b -> piece_kv [keys, H, nope + v].
absl::Status MlaNetwork::DecompressPiece(const StepView& step, const AttentionWeights& weights,
                                         int32_t layer, const PiecePass& pass) {
  RETURN_IF_ERROR(backend_.GatherKv(step.context, {.num_rows = pass.num_keys,
                                                   .slots = scratch_.slots + pass.first_slot,
                                                   .pages = LatentPages(step, layer),
                                                   .kv_lora_rank = config_.kv_lora_rank,
                                                   .rope_dim = config_.qk_rope_head_dim,
                                                   .dtype = kv_dtype_,
                                                   .latent = scratch_.piece_latent,
                                                   .latent_row_stride = config_.kv_lora_rank,
                                                   .k_rope = scratch_.piece_k_rope,
                                                   .k_rope_row_stride = config_.qk_rope_head_dim}));
  const int64_t columns =
      int64_t{config_.num_attention_heads} * (config_.qk_nope_head_dim + config_.v_head_dim);
  const kernels::OutputSegment output{
      .data = scratch_.piece_kv, .row_stride = columns, .columns = columns, .dtype = kv_dtype_};
  return backend_.Linear(step.context, {.weight = weights.kv_b.get(),
                                        .num_rows = pass.num_keys,
                                        .input = {.data = scratch_.piece_latent,
                                                  .dtype = kv_dtype_,
                                                  .row_stride = config_.kv_lora_rank},
                                        .outputs = {&output, 1},
                                        .workspace = step.linear_workspace});
}

bool MlaNetwork::RoundsAttention(const StepView& step, const AttentionWeights& weights) const {
  return backend_.LinearRoundsInput(*weights.o, step.num_tokens()) &&
         absl::c_none_of(pieces_.passes(), [](const PiecePass& pass) { return pass.accumulate; });
}

absl::Status MlaNetwork::ProjectOutput(const StepView& step, const AttentionWeights& weights,
                                       bool rounded) {
  const int64_t columns = int64_t{config_.num_attention_heads} * config_.v_head_dim;
  const kernels::OutputSegment output{
      .data = scratch_.hidden, .row_stride = config_.hidden_size, .columns = config_.hidden_size};
  kernels::Activation input = FloatRows(scratch_.attention, columns);
  if (rounded) input.dtype = kernels::DType::kBfloat16;
  return backend_.Linear(step.context, {.weight = weights.o.get(),
                                        .num_rows = step.num_tokens(),
                                        .input = input,
                                        .epilogue = kernels::LinearEpilogue::kResidual,
                                        .epilogue_residual = scratch_.hidden,
                                        .outputs = {&output, 1},
                                        .workspace = step.linear_workspace});
}

}  // namespace model
