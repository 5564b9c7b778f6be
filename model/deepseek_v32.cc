#include "model/deepseek_v32.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "status/status_macros.h"

namespace model {
namespace {

// transformers builds the indexer's norm and both LoRA norms with an eps of their own.
constexpr float kNormEps = 1e-6f;

// Rows scored at a time: enough to share the weights' reads and to fill a GPU, while the logits of
// long contexts stay below 64 MiB.
int32_t MaxSparseRows(int32_t max_tokens, int32_t max_model_len) {
  constexpr int64_t kMaxLogits = int64_t{16} << 20;
  const int64_t rows = std::clamp<int64_t>(kMaxLogits / max_model_len, 16, 128);
  return static_cast<int32_t>(std::min<int64_t>(rows, max_tokens));
}

int32_t SlotsWidth(int32_t top_k) {
  constexpr int32_t kMultiple = kernels::kSparseIndexMultiple;
  return (top_k + kMultiple - 1) / kMultiple * kMultiple;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeepseekV32>> DeepseekV32::Create(ModelConfig config,
                                                                 Weights weights,
                                                                 std::string weights_digest,
                                                                 const NetworkOptions& options,
                                                                 kernels::Backend& backend) {
  RETURN_IF_ERROR(CheckNetworkOptions(options, config));
  // No row has more keys than positions.
  const int32_t top_k = std::min(config.index_topk, config.max_position_embeddings);
  std::unique_ptr<DeepseekV32> network(new DeepseekV32(
      std::move(config), std::move(weights), std::move(weights_digest), options, backend, top_k));
  RETURN_IF_ERROR(network->Allocate());
  return network;
}

DeepseekV32::DeepseekV32(ModelConfig config, Weights weights, std::string weights_digest,
                         const NetworkOptions& options, kernels::Backend& backend, int32_t top_k)
    : MlaNetwork(std::move(config), std::move(weights), std::move(weights_digest), options, backend,
                 /*ragged_positions=*/top_k),
      top_k_(top_k),
      max_sparse_rows_(MaxSparseRows(options.limits.max_tokens, max_model_len())),
      slots_width_(SlotsWidth(top_k)) {}

void DeepseekV32::CarveMore(ScratchCarver& carver) {
  const int64_t rows = options().limits.max_tokens;
  const int64_t sparse_rows = max_sparse_rows_;
  carver.Take(index_.key, rows * config().index_head_dim);
  carver.Take(index_.weights, rows * config().index_n_heads);
  carver.Take(index_.q, sparse_rows * config().index_n_heads * config().index_head_dim);
  carver.Take(index_.logits, sparse_rows * max_model_len());
  carver.Take(index_.slots, sparse_rows * slots_width_);
  carver.Take(index_.lengths, sparse_rows);
  carver.Take(index_.decode_workspace, backend().attention().SparseDecodeWorkspaceBytes(
                                           max_sparse_rows_, slots_width_,
                                           config().num_attention_heads, config().kv_lora_rank));
}

void DeepseekV32::PrepareStep(const StepPlan& plan) {
  sparse_rows_.clear();
  AddSparseRows(0, plan.counts().num_absorbed_tokens, /*absorbed=*/true);
  for (int32_t seq = plan.counts().num_absorbed_seqs; seq < plan.counts().num_seqs; ++seq) {
    const int32_t end = plan.cu_seqlens_q[seq + 1];
    const int32_t past_top_k = plan.kv_len[seq] - top_k_;
    AddSparseRows(std::max(plan.cu_seqlens_q[seq], end - past_top_k), end, /*absorbed=*/false);
  }
}

void DeepseekV32::AddSparseRows(int32_t begin, int32_t end, bool absorbed) {
  for (; begin < end; begin += max_sparse_rows_) {
    sparse_rows_.push_back({begin, std::min(max_sparse_rows_, end - begin), absorbed});
  }
}

absl::Status DeepseekV32::Attention(const StepView& step, int32_t layer) {
  const AttentionWeights& attention = weights().layers[layer].attention;
  const int64_t dim = config().index_head_dim;
  const int64_t heads = config().index_n_heads;
  const std::array<kernels::OutputSegment, 2> indexer = {
      {{.data = index_.key, .row_stride = dim, .columns = dim},
       {.data = index_.weights, .row_stride = heads, .columns = heads}}};
  RETURN_IF_ERROR(ProjectQueryAndLatent(step, attention, indexer));
  RETURN_IF_ERROR(StoreCache(step, attention, layer, /*num_absorbed=*/0,
                             IndexKeys(step, attention.indexer, layer)));
  for (const RowRange& rows : sparse_rows_) {
    RETURN_IF_ERROR(SelectKeys(step, attention.indexer, layer, rows));
    RETURN_IF_ERROR(AttendSelected(step, attention, layer, rows));
  }
  RETURN_IF_ERROR(AttendRagged(step, attention, layer, /*rounded=*/false));
  return ProjectOutput(step, attention, /*rounded=*/false);
}

kernels::IndexKeyParams DeepseekV32::IndexKeys(const StepView& step, const IndexerWeights& weights,
                                               int32_t layer) const {
  return {.dim = config().index_head_dim,
          .key = index_.key,
          .key_row_stride = config().index_head_dim,
          .norm_weight = weights.k_norm->floats(),
          .norm_bias = weights.k_norm_bias->floats(),
          .norm_eps = kNormEps,
          .rope = index_rope(),
          .pages = cache_layout().Pages(step.state.cache, kIndexKeyGroup, layer)};
}

absl::Status DeepseekV32::SelectKeys(const StepView& step, const IndexerWeights& weights,
                                     int32_t layer, const RowRange& rows) {
  const int64_t dim = config().index_head_dim;
  const int64_t q_columns = config().index_n_heads * dim;
  const int32_t* positions = step.OnDevice(step.plan.positions) + rows.begin;
  const kernels::OutputSegment q{.data = index_.q, .row_stride = q_columns, .columns = q_columns};
  RETURN_IF_ERROR(backend().Linear(
      step.context, {.weight = weights.q_b.get(),
                     .num_rows = rows.count,
                     .input = FloatRows(scratch().q_a + int64_t{rows.begin} * config().q_lora_rank,
                                        config().q_lora_rank),
                     .norm_weight = this->weights().layers[layer].attention.q_a_norm->floats(),
                     .norm_eps = kNormEps,
                     .outputs = {&q, 1},
                     .workspace = step.linear_workspace}));
  RETURN_IF_ERROR(backend().Rope(step.context, {.num_rows = rows.count,
                                                .num_heads = config().index_n_heads,
                                                .data = index_.q,
                                                .row_stride = q_columns,
                                                .head_stride = dim,
                                                .rope = index_rope(),
                                                .positions = positions}));
  const kernels::IndexerRows index_rows{
      .num_rows = rows.count,
      .positions = positions,
      .row_to_seq = step.OnDevice(step.plan.row_to_seq) + rows.begin,
      .block_table = step.OnDevice(step.plan.block_table),
      .block_table_stride = step.plan.block_table_stride(),
      .top_k = top_k_};
  const double scale = 1 / std::sqrt(static_cast<double>(q_columns));
  RETURN_IF_ERROR(backend().IndexerLogits(
      step.context, {.rows = index_rows,
                     .num_heads = config().index_n_heads,
                     .head_dim = config().index_head_dim,
                     .scale = static_cast<float>(scale),
                     .q = index_.q,
                     .q_row_stride = q_columns,
                     .q_head_stride = dim,
                     .weights = index_.weights + int64_t{rows.begin} * config().index_n_heads,
                     .weights_row_stride = config().index_n_heads,
                     .pages = cache_layout().Pages(step.state.cache, kIndexKeyGroup, layer),
                     .logits = index_.logits,
                     .logits_stride = max_model_len()}));
  return backend().TopKSlots(step.context, {.rows = index_rows,
                                            .block_entries = cache_layout().spec().block_size,
                                            .logits = index_.logits,
                                            .logits_stride = max_model_len(),
                                            .slots = index_.slots,
                                            .slots_stride = slots_width_,
                                            .slots_width = slots_width_,
                                            .lengths = index_.lengths});
}

absl::Status DeepseekV32::AttendSelected(const StepView& step, const AttentionWeights& weights,
                                         int32_t layer, const RowRange& rows) {
  RETURN_IF_ERROR(backend().HeadLinear(step.context, Absorption(weights, rows.begin, rows.count)));
  const int64_t heads = config().num_attention_heads;
  const int64_t out_columns = heads * config().v_head_dim;
  const kernels::SparseSource latents{.pages = LatentPages(step, layer),
                                      .indices = index_.slots,
                                      .index_stride = slots_width_,
                                      .width = slots_width_,
                                      .lengths = index_.lengths};
  const kernels::SparseDecodeParams params{
      .num_rows = rows.count,
      .num_heads = config().num_attention_heads,
      .dim = config().kv_lora_rank,
      .rope_dim = config().qk_rope_head_dim,
      .value_dim = config().kv_lora_rank,
      .v_head_dim = config().v_head_dim,
      .softmax_scale = config().softmax_scale(),
      .sources = {latents, {}},
      .q = scratch().q_latent,
      .q_row_stride = heads * config().kv_lora_rank,
      .q_head_stride = config().kv_lora_rank,
      .q_rope = scratch().q + rows.begin * q_row_stride() + config().qk_nope_head_dim,
      .q_rope_row_stride = q_row_stride(),
      .q_rope_head_stride = config().qk_head_dim(),
      .w_uv = weights.w_uv.get(),
      .out = scratch().attention + rows.begin * out_columns,
      .out_row_stride = out_columns,
      .out_head_stride = config().v_head_dim,
      .workspace = index_.decode_workspace};
  kernels::AttentionBackend& attention = backend().attention();
  return rows.absorbed ? attention.SparseDecode(step.context, params)
                       : attention.SparsePrefill(step.context, params);
}

}  // namespace model
