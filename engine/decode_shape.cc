#include "engine/decode_shape.h"

#include <algorithm>
#include <limits>

namespace engine {
namespace {

// A padded row costs its experts' weights where there are few rows, so there every count has a
// shape of its own.
int32_t RoundUp(int32_t count, int32_t most) {
  const int32_t step = count <= 16 ? 1 : count <= 64 ? 4 : 8;
  return std::min((count + step - 1) / step * step, most);
}

}  // namespace

std::optional<DecodeShape> ShapeOfDecode(const model::StepPlan& plan) {
  const model::StepCounts& counts = plan.counts();
  if (counts.num_tokens == 0 || counts.num_absorbed_tokens != counts.num_tokens ||
      counts.num_seqs != counts.num_tokens || counts.num_absorbed_seqs != counts.num_seqs ||
      counts.num_logit_rows > 0 || counts.num_copies > 0 || counts.num_penalty_resets > 0) {
    return std::nullopt;
  }
  const model::StepLimits& limits = plan.limits();
  DecodeShape shape;
  shape.num_seqs = RoundUp(counts.num_seqs, std::min(limits.max_seqs, limits.max_absorbed_tokens));
  // At most kMaxSplitsPerSeq shapes of a number of sequences.
  shape.num_splits =
      std::min((counts.num_splits + shape.num_seqs - 1) / shape.num_seqs * shape.num_seqs,
               limits.max_splits());
  shape.num_samples = counts.num_samples == 0 ? 0 : RoundUp(counts.num_samples, limits.max_samples);
  return shape;
}

void PadDecode(const DecodeShape& shape, model::StepPlan& plan) {
  model::StepCounts& counts = plan.counts();
  for (int32_t seq = counts.num_seqs; seq < shape.num_seqs; ++seq) {
    const int32_t row = seq;
    plan.token_ids[row] = 0;
    plan.token_source[row] = -1;
    plan.positions[row] = 0;
    plan.slots[row] = -1;
    plan.row_to_seq[row] = seq;
    plan.window_start[row] = 0;
    plan.cu_seqlens_q[seq + 1] = plan.cu_seqlens_q[seq] + 1;
    plan.cu_seqlens_kv[seq + 1] = plan.cu_seqlens_kv[seq];
    plan.kv_len[seq] = 0;
    std::fill_n(plan.block_table + seq * plan.block_table_stride(), plan.block_table_stride(), -1);
    plan.state_slots[seq] = -1;
  }
  // Sequences ascend over the splits.
  for (int32_t split = counts.num_splits; split < shape.num_splits; ++split) {
    plan.splits[split] = {};
    plan.splits[split].seq = std::numeric_limits<int32_t>::max();
  }
  for (int32_t sample = counts.num_samples; sample < shape.num_samples; ++sample) {
    plan.samples[sample] = {};
    plan.samples[sample].temperature = 0;
  }
  counts.num_tokens = counts.num_seqs = shape.num_seqs;
  counts.num_absorbed_tokens = counts.num_absorbed_seqs = shape.num_seqs;
  counts.num_splits = shape.num_splits;
  counts.num_samples = shape.num_samples;
}

}  // namespace engine
