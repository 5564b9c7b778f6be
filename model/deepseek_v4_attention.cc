#include "model/deepseek_v4_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "status/status_macros.h"

namespace model {
namespace {

using kernels::OutputSegment;

// Scores of the indexer at a time: 4 MiB rows x entries, so that a long context does not cost
// max_tokens times its entries.
constexpr int64_t kMaxIndexLogits = int64_t{4} << 20;

int32_t PaddedWidth(int32_t count) {
  return (count + kernels::kSparseIndexMultiple - 1) / kernels::kSparseIndexMultiple *
         kernels::kSparseIndexMultiple;
}

OutputSegment Dense(float* data, int64_t columns) {
  return {.data = data, .row_stride = columns, .columns = columns};
}

}  // namespace

DeepseekV4Attention::DeepseekV4Attention(const ModelConfig& config, const NetworkOptions& options,
                                         int32_t max_model_len, kernels::Backend& backend)
    : config_(config),
      limits_(options.limits),
      max_model_len_(max_model_len),
      backend_(backend),
      layout_(config, options.kv_cache_dtype, options.block_size),
      cache_layout_(layout_.spec()),
      max_csa_entries_(max_model_len / config.csa_ratio),
      csa_width_(PaddedWidth(config.index_topk)),
      hca_width_(kernels::C128AWidth(max_model_len, config.hca_ratio)),
      window_width_(kernels::WindowWidth(config.sliding_window)),
      index_rows_(static_cast<int32_t>(std::clamp<int64_t>(
          kMaxIndexLogits / std::max(max_csa_entries_, 1), 1, options.limits.max_tokens))),
      window_plan_(options.limits) {}

absl::Status DeepseekV4Attention::UploadRopes() {
  const int32_t rope_dim = config_.qk_rope_head_dim;
  ASSIGN_OR_RETURN(rope_, UploadRope(config_.rope, rope_dim, max_model_len_, backend_));
  ASSIGN_OR_RETURN(compress_rope_,
                   UploadRope(config_.compress_rope, rope_dim, max_model_len_, backend_));
  return absl::OkStatus();
}

void DeepseekV4Attention::CarveScratch(ScratchCarver& carver) {
  const int64_t rows = limits_.max_tokens;
  const int64_t dim = config_.qk_head_dim();
  const int64_t heads = config_.num_attention_heads;
  const int64_t index_dim = config_.index_head_dim;
  const bool has_csa = config_.CountLayers(LayerType::kCompressedSparseAttention) > 0;
  const bool has_hca = config_.CountLayers(LayerType::kHeavilyCompressedAttention) > 0;
  const int64_t csa_rows = has_csa ? rows : 0;
  const int64_t hca_rows = has_hca ? rows : 0;
  carver.Take(scratch_.q_a, rows * config_.q_lora_rank);
  carver.Take(scratch_.q, rows * heads * dim);
  carver.Take(scratch_.kv, rows * dim);
  carver.Take(scratch_.entry_kv, rows * (has_csa ? 2 * dim : has_hca ? dim : 0));
  carver.Take(scratch_.entry_gate, rows * (has_csa ? 2 * dim : has_hca ? dim : 0));
  carver.Take(scratch_.index_kv, csa_rows * 2 * index_dim);
  carver.Take(scratch_.index_gate, csa_rows * 2 * index_dim);
  carver.Take(scratch_.index_q, csa_rows * config_.index_n_heads * index_dim);
  carver.Take(scratch_.index_weights, csa_rows * config_.index_n_heads);
  carver.Take(scratch_.index_logits, has_csa ? int64_t{index_rows_} * max_csa_entries_ : 0);
  carver.Take(scratch_.attention, rows * heads * dim);
  carver.Take(scratch_.o_a, rows * config_.o_groups * config_.o_lora_rank);
  carver.Take(scratch_.csa_slots, csa_rows * csa_width_);
  carver.Take(scratch_.csa_lengths, csa_rows);
  carver.Take(scratch_.hca_slots, hca_rows * hca_width_);
  carver.Take(scratch_.hca_lengths, hca_rows);
  carver.Take(scratch_.window_slots, rows);
  carver.Take(scratch_.window_indices, rows * window_width_);
  carver.Take(scratch_.window_lengths, rows);
  carver.Take(scratch_.buffer_begin, limits_.max_seqs);
  carver.Take(scratch_.carry_in_ring, window_plan_.max_carries());
  carver.Take(scratch_.carry_in_buffer, window_plan_.max_carries());
  carver.Take(scratch_.carry_out_buffer, window_plan_.max_carries());
  carver.Take(scratch_.carry_out_ring, window_plan_.max_carries());
  carver.Take(scratch_.window_buffer, layout_.WindowBufferBytes(window_plan_.max_buffer_entries()));
  carver.Take(scratch_.workspace,
              backend_.attention().SparseDecodeWorkspaceBytes(
                  limits_.max_tokens, window_width_ + std::max(csa_width_, hca_width_),
                  config_.num_attention_heads, config_.qk_head_dim()));
}

absl::Status DeepseekV4Attention::BeginStep(const StepView& step) {
  window_plan_.Make(step.plan);
  const auto upload = [&](auto host, auto* device) {
    return UploadSpan(backend_, step.context, host, device);
  };
  if (window_plan_.num_ring_rows() < step.num_tokens()) {
    RETURN_IF_ERROR(upload(window_plan_.buffer_begin(), scratch_.buffer_begin));
    RETURN_IF_ERROR(upload(window_plan_.carry_in_ring(), scratch_.carry_in_ring));
    RETURN_IF_ERROR(upload(window_plan_.carry_in_buffer(), scratch_.carry_in_buffer));
    RETURN_IF_ERROR(upload(window_plan_.carry_out_buffer(), scratch_.carry_out_buffer));
    RETURN_IF_ERROR(upload(window_plan_.carry_out_ring(), scratch_.carry_out_ring));
  }
  RETURN_IF_ERROR(
      backend_.WindowSlots(step.context, {.num_rows = step.num_tokens(),
                                          .num_ring_rows = window_plan_.num_ring_rows(),
                                          .window = config_.sliding_window,
                                          .positions = step.OnDevice(step.plan.positions),
                                          .window_start = step.OnDevice(step.plan.window_start),
                                          .row_to_seq = step.OnDevice(step.plan.row_to_seq),
                                          .state_slots = step.OnDevice(step.plan.state_slots),
                                          .buffer_begin = scratch_.buffer_begin,
                                          .own = scratch_.window_slots,
                                          .indices = scratch_.window_indices,
                                          .width = window_width_,
                                          .lengths = scratch_.window_lengths}));
  if (config_.CountLayers(LayerType::kHeavilyCompressedAttention) == 0) return absl::OkStatus();
  // Rows of chunks attend the paged entries as decodes do: their lists are global slots as well.
  return backend_.C128AMetadata(step.context,
                                {.num_rows = step.num_tokens(),
                                 .num_decode_rows = step.num_tokens(),
                                 .tokens_per_entry = config_.hca_ratio,
                                 .block_entries = layout_.spec().block_size / config_.hca_ratio,
                                 .positions = step.OnDevice(step.plan.positions),
                                 .slots = step.OnDevice(step.plan.slots),
                                 .row_to_seq = step.OnDevice(step.plan.row_to_seq),
                                 .block_table = step.OnDevice(step.plan.block_table),
                                 .block_table_stride = step.plan.block_table_stride(),
                                 .indices = scratch_.hca_slots,
                                 .index_stride = hca_width_,
                                 .width = hca_width_,
                                 .lengths = scratch_.hca_lengths});
}

absl::Status DeepseekV4Attention::Attend(const StepView& step, const V4AttentionWeights& weights,
                                         int32_t layer, float* input, float* output) {
  RETURN_IF_ERROR(Project(step, weights, layer, input));
  RETURN_IF_ERROR(Compress(step, weights, layer));
  RETURN_IF_ERROR(StoreWindow(step, weights, layer));
  RETURN_IF_ERROR(SelectEntries(step, layer));
  const int32_t ring_rows = window_plan_.num_ring_rows();
  const int32_t buffer_rows = step.num_tokens() - ring_rows;
  const kernels::KvPages ring = layout_.Window(step.state.state_slots, layer);
  if (ring_rows > 0) {
    RETURN_IF_ERROR(backend_.attention().SparseDecode(
        step.context, RowParams(step, weights, layer, 0, ring_rows, ring)));
  }
  if (buffer_rows > 0) {
    RETURN_IF_ERROR(backend_.attention().SparsePrefill(
        step.context, RowParams(step, weights, layer, ring_rows, buffer_rows, Buffer())));
  }
  RETURN_IF_ERROR(CopyWindows(step, static_cast<int64_t>(window_plan_.carry_out_ring().size()),
                              scratch_.carry_out_buffer, Buffer(), scratch_.carry_out_ring, ring));
  return ProjectOutput(step, weights, output);
}

// input -> q and index_q, normed and rotated; kv and what the compressors pool, as they are.
absl::Status DeepseekV4Attention::Project(const StepView& step, const V4AttentionWeights& weights,
                                          int32_t layer, float* input) {
  const int64_t dim = config_.qk_head_dim();
  const int64_t index_dim = config_.index_head_dim;
  const int64_t q_columns = config_.num_attention_heads * dim;
  const int64_t index_columns = config_.index_n_heads * index_dim;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const bool csa = Is(layer, LayerType::kCompressedSparseAttention);
  std::array<OutputSegment, 7> parts = {Dense(scratch_.q_a, config_.q_lora_rank),
                                        Dense(scratch_.kv, dim)};
  size_t num_parts = 2;
  if (!Is(layer, LayerType::kSlidingAttention)) {
    const int64_t channels = csa ? 2 * dim : dim;
    parts[num_parts++] = Dense(scratch_.entry_kv, channels);
    parts[num_parts++] = Dense(scratch_.entry_gate, channels);
  }
  if (csa) {
    parts[num_parts++] = Dense(scratch_.index_kv, 2 * index_dim);
    parts[num_parts++] = Dense(scratch_.index_gate, 2 * index_dim);
    parts[num_parts++] = Dense(scratch_.index_weights, config_.index_n_heads);
  }
  RETURN_IF_ERROR(backend_.Linear(step.context, {.weight = weights.input.get(),
                                                 .num_rows = step.num_tokens(),
                                                 .input = FloatRows(input, config_.hidden_size),
                                                 .norm_weight = weights.norm->floats(),
                                                 .norm_eps = eps,
                                                 .outputs = {parts.data(), num_parts},
                                                 .workspace = step.linear_workspace}));
  const std::array<OutputSegment, 2> queries = {Dense(scratch_.q, q_columns),
                                                Dense(scratch_.index_q, index_columns)};
  RETURN_IF_ERROR(
      backend_.Linear(step.context, {.weight = weights.q_b.get(),
                                     .num_rows = step.num_tokens(),
                                     .input = FloatRows(scratch_.q_a, config_.q_lora_rank),
                                     .norm_weight = weights.q_a_norm->floats(),
                                     .norm_eps = eps,
                                     .outputs = {queries.data(), csa ? size_t{2} : size_t{1}},
                                     .workspace = step.linear_workspace}));
  RETURN_IF_ERROR(backend_.Rope(step.context, {.num_rows = step.num_tokens(),
                                               .num_heads = config_.num_attention_heads,
                                               .data = scratch_.q + config_.qk_nope_head_dim,
                                               .row_stride = q_columns,
                                               .head_stride = dim,
                                               .rope = RopeOf(layer),
                                               .positions = step.OnDevice(step.plan.positions),
                                               .norm_dim = static_cast<int32_t>(dim),
                                               .norm_eps = eps}));
  if (!csa) return absl::OkStatus();
  return backend_.Rope(step.context,
                       {.num_rows = step.num_tokens(),
                        .num_heads = config_.index_n_heads,
                        .data = scratch_.index_q + index_dim - config_.qk_rope_head_dim,
                        .row_stride = index_columns,
                        .head_stride = index_dim,
                        .rope = RopeOf(layer),
                        .positions = step.OnDevice(step.plan.positions)});
}

// The entries and index keys that the new rows complete, and the open windows' states.
absl::Status DeepseekV4Attention::Compress(const StepView& step, const V4AttentionWeights& weights,
                                           int32_t layer) {
  if (Is(layer, LayerType::kSlidingAttention)) return absl::OkStatus();
  const bool csa = Is(layer, LayerType::kCompressedSparseAttention);
  const int64_t channels = (csa ? 2 : 1) * int64_t{config_.qk_head_dim()};
  kernels::CompressKvParams params = {
      .num_seqs = step.plan.counts().num_seqs,
      .num_rows = step.num_tokens(),
      .cu_seqlens_q = step.OnDevice(step.plan.cu_seqlens_q),
      .kv_len = step.OnDevice(step.plan.kv_len),
      .block_table = step.OnDevice(step.plan.block_table),
      .block_table_stride = step.plan.block_table_stride(),
      .ratio = csa ? config_.csa_ratio : config_.hca_ratio,
      .overlap = csa,
      .dim = config_.qk_head_dim(),
      .kv = scratch_.entry_kv,
      .kv_row_stride = channels,
      .gate = scratch_.entry_gate,
      .gate_row_stride = channels,
      .position_bias = weights.compressor.position_bias->floats(),
      .norm_weight = weights.compressor.norm->floats(),
      .norm_eps = static_cast<float>(config_.rms_norm_eps),
      .rope = RopeOf(layer),
      .pages = layout_.Entries(cache_layout_, step.state.cache, layer),
      .state = step.state.state_slots + layout_.compressor_offset(layer),
      .state_stride = layout_.spec().state_slot_bytes,
      .state_slots = step.OnDevice(step.plan.state_slots)};
  RETURN_IF_ERROR(backend_.CompressKv(step.context, params));
  if (!csa) return absl::OkStatus();
  params.dim = config_.index_head_dim;
  params.kv = scratch_.index_kv;
  params.gate = scratch_.index_gate;
  params.kv_row_stride = params.gate_row_stride = 2 * int64_t{config_.index_head_dim};
  params.position_bias = weights.index_compressor.position_bias->floats();
  params.norm_weight = weights.index_compressor.norm->floats();
  params.pages = layout_.IndexKeys(cache_layout_, step.state.cache, layer);
  params.state = step.state.state_slots + layout_.index_compressor_offset(layer);
  return backend_.CompressKv(step.context, params);
}

absl::Status DeepseekV4Attention::StoreWindow(const StepView& step,
                                              const V4AttentionWeights& weights, int32_t layer) {
  const int32_t ring_rows = window_plan_.num_ring_rows();
  const kernels::KvPages ring = layout_.Window(step.state.state_slots, layer);
  RETURN_IF_ERROR(CopyWindows(step, static_cast<int64_t>(window_plan_.carry_in_ring().size()),
                              scratch_.carry_in_ring, ring, scratch_.carry_in_buffer, Buffer()));
  const auto store = [&](int32_t begin, int32_t end, const kernels::KvPages& pages) {
    if (begin == end) return absl::OkStatus();
    return backend_.StoreKv(step.context,
                            {.num_rows = end - begin,
                             .kv_a = scratch_.kv + int64_t{begin} * config_.qk_head_dim(),
                             .kv_a_row_stride = config_.qk_head_dim(),
                             .kv_lora_rank = config_.qk_nope_head_dim,
                             .norm_weight = weights.kv_norm->floats(),
                             .norm_eps = static_cast<float>(config_.rms_norm_eps),
                             .norm_rope = true,
                             .rope = RopeOf(layer),
                             .positions = step.OnDevice(step.plan.positions) + begin,
                             .slots = scratch_.window_slots + begin,
                             .pages = pages});
  };
  RETURN_IF_ERROR(store(0, ring_rows, ring));
  return store(ring_rows, step.num_tokens(), Buffer());
}

// CSA: the entries that each row attends, in csa_slots.
absl::Status DeepseekV4Attention::SelectEntries(const StepView& step, int32_t layer) {
  if (!Is(layer, LayerType::kCompressedSparseAttention)) return absl::OkStatus();
  const int64_t index_dim = config_.index_head_dim;
  const int64_t heads = config_.index_n_heads;
  const kernels::KvPages keys = layout_.IndexKeys(cache_layout_, step.state.cache, layer);
  for (int32_t begin = 0; begin < step.num_tokens(); begin += index_rows_) {
    const kernels::IndexerRows rows = {.num_rows = std::min(index_rows_, step.num_tokens() - begin),
                                       .positions = step.OnDevice(step.plan.positions) + begin,
                                       .tokens_per_key = config_.csa_ratio,
                                       .row_to_seq = step.OnDevice(step.plan.row_to_seq) + begin,
                                       .block_table = step.OnDevice(step.plan.block_table),
                                       .block_table_stride = step.plan.block_table_stride(),
                                       .top_k = config_.index_topk};
    RETURN_IF_ERROR(backend_.IndexerLogits(
        step.context,
        {.rows = rows,
         .num_heads = config_.index_n_heads,
         .head_dim = config_.index_head_dim,
         .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(index_dim * heads))),
         .q = scratch_.index_q + begin * heads * index_dim,
         .q_row_stride = heads * index_dim,
         .q_head_stride = index_dim,
         .weights = scratch_.index_weights + begin * heads,
         .weights_row_stride = heads,
         .pages = keys,
         .logits = scratch_.index_logits,
         .logits_stride = max_csa_entries_}));
    RETURN_IF_ERROR(
        backend_.TopKSlots(step.context, {.rows = rows,
                                          .block_entries = keys.block_size,
                                          .logits = scratch_.index_logits,
                                          .logits_stride = max_csa_entries_,
                                          .slots = scratch_.csa_slots + int64_t{begin} * csa_width_,
                                          .slots_stride = csa_width_,
                                          .slots_width = csa_width_,
                                          .lengths = scratch_.csa_lengths + begin}));
  }
  return absl::OkStatus();
}

kernels::SparseDecodeParams DeepseekV4Attention::RowParams(const StepView& step,
                                                           const V4AttentionWeights& weights,
                                                           int32_t layer, int32_t begin,
                                                           int32_t count,
                                                           const kernels::KvPages& window) const {
  const int64_t dim = config_.qk_head_dim();
  const int64_t row_stride = config_.num_attention_heads * dim;
  const float* q = scratch_.q + begin * row_stride;
  kernels::SparseDecodeParams params;
  params.num_rows = count;
  params.num_heads = config_.num_attention_heads;
  params.dim = config_.qk_nope_head_dim;
  params.rope_dim = config_.qk_rope_head_dim;
  params.value_dim = config_.qk_head_dim();
  params.softmax_scale = config_.softmax_scale();
  params.sources[0] = {.pages = window,
                       .indices = scratch_.window_indices + int64_t{begin} * window_width_,
                       .index_stride = window_width_,
                       .width = window_width_,
                       .lengths = scratch_.window_lengths + begin};
  kernels::SparseSource& entries = params.sources[1];
  if (Is(layer, LayerType::kCompressedSparseAttention)) {
    entries.indices = scratch_.csa_slots + int64_t{begin} * csa_width_;
    entries.lengths = scratch_.csa_lengths + begin;
    entries.index_stride = entries.width = csa_width_;
  } else if (Is(layer, LayerType::kHeavilyCompressedAttention)) {
    entries.indices = scratch_.hca_slots + int64_t{begin} * hca_width_;
    entries.lengths = scratch_.hca_lengths + begin;
    entries.index_stride = entries.width = hca_width_;
  }
  if (entries.indices != nullptr) {
    entries.pages = layout_.Entries(cache_layout_, step.state.cache, layer);
  }
  params.q = q;
  params.q_row_stride = row_stride;
  params.q_head_stride = dim;
  params.q_rope = q + config_.qk_nope_head_dim;
  params.q_rope_row_stride = row_stride;
  params.q_rope_head_stride = dim;
  params.sink = weights.sink->floats();
  params.inverse_rope = RopeOf(layer);
  params.positions = step.OnDevice(step.plan.positions) + begin;
  params.out = scratch_.attention + begin * row_stride;
  params.out_row_stride = row_stride;
  params.out_head_stride = dim;
  params.workspace = scratch_.workspace;
  return params;
}

absl::Status DeepseekV4Attention::CopyWindows(const StepView& step, int64_t count,
                                              const int64_t* from_slots,
                                              const kernels::KvPages& from, const int64_t* to_slots,
                                              const kernels::KvPages& to) {
  if (count == 0) return absl::OkStatus();
  return backend_.CopyKvEntries(step.context, {.num_entries = static_cast<int32_t>(count),
                                               .src_slots = from_slots,
                                               .dst_slots = to_slots,
                                               .src = from,
                                               .dst = to,
                                               .dim = config_.qk_nope_head_dim,
                                               .rope_dim = config_.qk_rope_head_dim});
}

// output = W_ob (W_oa of each group of heads).
absl::Status DeepseekV4Attention::ProjectOutput(const StepView& step,
                                                const V4AttentionWeights& weights, float* output) {
  const int64_t columns = int64_t{config_.num_attention_heads} * config_.qk_head_dim();
  const int64_t rows_a = int64_t{config_.o_groups} * config_.o_lora_rank;
  const int64_t group_columns = columns / config_.o_groups;
  for (int32_t group = 0; group < config_.o_groups; ++group) {
    const OutputSegment part{.data = scratch_.o_a + int64_t{group} * config_.o_lora_rank,
                             .row_stride = rows_a,
                             .columns = config_.o_lora_rank};
    RETURN_IF_ERROR(backend_.Linear(
        step.context, {.weight = weights.o_a[group].get(),
                       .num_rows = step.num_tokens(),
                       .input = FloatRows(scratch_.attention + group * group_columns, columns),
                       .outputs = {&part, 1},
                       .workspace = step.linear_workspace}));
  }
  const OutputSegment segment = Dense(output, config_.hidden_size);
  return backend_.Linear(step.context, {.weight = weights.o_b.get(),
                                        .num_rows = step.num_tokens(),
                                        .input = FloatRows(scratch_.o_a, rows_a),
                                        .outputs = {&segment, 1},
                                        .workspace = step.linear_workspace});
}

}  // namespace model
