#include "engine/plan_builder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "model/step_plan.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace engine {

absl::Status GrowBlocks(Sequence& seq, int32_t num_tokens, int32_t block_size, BlockPool& pool) {
  const int32_t missing =
      BlocksFor(num_tokens, block_size) - static_cast<int32_t>(seq.blocks.size());
  if (missing <= 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<BlockId> taken, pool.Allocate(missing));
  seq.blocks.insert(seq.blocks.end(), taken.begin(), taken.end());
  return absl::OkStatus();
}

void IndexFullBlocks(Sequence& seq, int32_t num_written, int32_t block_size,
                     const block_hash::BlockHasher& hasher, BlockPool& pool) {
  FERRY_CHECK(num_written <= static_cast<int32_t>(seq.tokens.size()))
      << "written=" << num_written << " known=" << seq.tokens.size();
  const absl::Span<const int32_t> tokens(seq.tokens);
  for (; (seq.num_indexed + 1) * block_size <= num_written; ++seq.num_indexed) {
    const int32_t i = seq.num_indexed;
    const block_hash::BlockHash parent = i == 0 ? seq.root : seq.hashes[i - 1];
    if (static_cast<int32_t>(seq.hashes.size()) == i) {
      seq.hashes.push_back(hasher.Next(parent, tokens.subspan(i * block_size, block_size)));
    }
    pool.Index(seq.blocks[i], seq.hashes[i], parent);
  }
}

absl::Status NoTokenError(int32_t num_tokens) {
  return absl::InternalError(
      absl::StrCat("the model's logits behind token ", num_tokens,
                   " of prompt and output are no distribution: NaN, infinite, or none left"));
}

void AcceptToken(Sequence& seq, int64_t step_id, int32_t token) {
  seq.tokens.push_back(token);
  if (seq.pending_step == step_id) seq.pending_sample = -1;
}

void ReleaseBlocks(Sequence& seq, BlockPool& pool) {
  pool.Release(seq.blocks);
  seq.blocks.clear();
  if (pool.state_slots() == nullptr) return;
  for (SlotId* slot : {&seq.state_slot, &seq.state_source}) {
    if (*slot != kNoSlot) pool.state_slots()->Release(std::exchange(*slot, kNoSlot));
  }
  seq.newest_snapshot.reset();
}

PlanBuilder::PlanBuilder(int32_t block_size, model::StepPlan& plan)
    : block_size_(block_size), plan_(plan) {}

void PlanBuilder::Begin(int64_t step_id) {
  plan_.Clear();
  plan_.counts().step_id = step_id;
  state_sources_.clear();
}

int32_t PlanBuilder::free_tokens() const {
  return plan_.limits().max_tokens - plan_.counts().num_tokens;
}
int32_t PlanBuilder::free_seqs() const { return plan_.limits().max_seqs - plan_.counts().num_seqs; }
int32_t PlanBuilder::free_samples() const {
  return plan_.limits().max_samples - plan_.counts().num_samples;
}
int32_t PlanBuilder::free_absorbed_tokens() const {
  return std::min(free_tokens(),
                  plan_.limits().max_absorbed_tokens - plan_.counts().num_absorbed_tokens);
}
int32_t PlanBuilder::free_history_tokens() const {
  return plan_.limits().max_history_tokens - plan_.counts().num_history_tokens;
}

int32_t PlanBuilder::Add(Sequence& seq, int32_t num_tokens, bool absorbed, bool sample,
                         bool logits) {
  model::StepCounts& counts = plan_.counts();
  const model::StepLimits& limits = plan_.limits();
  const int32_t start = seq.num_computed;
  const int32_t end = start + num_tokens;
  const int32_t num_known = static_cast<int32_t>(seq.tokens.size());
  const bool has_pending = seq.pending_sample >= 0;
  FERRY_CHECK(num_tokens >= 1 && num_tokens <= free_tokens() && free_seqs() >= 1)
      << "tokens=" << num_tokens << " free tokens=" << free_tokens()
      << " free seqs=" << free_seqs();
  FERRY_CHECK(end <= std::max(num_known, start) + (has_pending ? 1 : 0))
      << "end=" << end << " known=" << num_known;
  FERRY_CHECK(BlocksFor(end, block_size_) <= static_cast<int32_t>(seq.blocks.size()))
      << "end=" << end << " blocks=" << seq.blocks.size();
  FERRY_CHECK(static_cast<int32_t>(seq.blocks.size()) <= limits.max_blocks_per_seq)
      << "blocks=" << seq.blocks.size() << " limit=" << limits.max_blocks_per_seq;
  FERRY_CHECK(!absorbed ||
              (counts.num_absorbed_seqs == counts.num_seqs && num_tokens <= free_absorbed_tokens()))
      << "absorbed sequences come first; rows=" << num_tokens << " free=" << free_absorbed_tokens();

  PrepareState(seq);
  for (int32_t position = start; position < end; ++position) {
    const int32_t row = counts.num_tokens++;
    const bool known = position < num_known;
    FERRY_CHECK(known || (has_pending && seq.pending_step == counts.step_id - 1))
        << "token " << position << " is neither known nor sampled by the previous step";
    plan_.token_ids[row] = known ? seq.tokens[position] : 0;
    plan_.token_source[row] = known ? -1 : seq.pending_sample;
    plan_.positions[row] = position;
    plan_.slots[row] =
        int64_t{seq.blocks[position / block_size_]} * block_size_ + position % block_size_;
    plan_.row_to_seq[row] = counts.num_seqs;
    plan_.window_start[row] =
        limits.sliding_window > 0 ? std::max(0, position + 1 - limits.sliding_window) : 0;
    if (logits) {
      FERRY_CHECK(counts.num_logit_rows < limits.max_logit_rows)
          << "limit=" << limits.max_logit_rows;
      plan_.logit_rows[counts.num_logit_rows++] = row;
    }
  }

  const int32_t s = counts.num_seqs++;
  plan_.kv_len[s] = end;
  plan_.cu_seqlens_q[s + 1] = counts.num_tokens;
  plan_.cu_seqlens_kv[s + 1] = plan_.cu_seqlens_kv[s] + end;
  plan_.state_slots[s] = seq.state_slot;
  int32_t* table = plan_.block_table + s * plan_.block_table_stride();
  std::fill(table, table + plan_.block_table_stride(), -1);
  std::copy(seq.blocks.begin(), seq.blocks.end(), table);
  if (absorbed) {
    ++counts.num_absorbed_seqs;
    counts.num_absorbed_tokens += num_tokens;
    const int32_t split = model::SplitTokens(end);
    for (int32_t begin = 0; begin < end; begin += split) {
      plan_.splits[counts.num_splits++] = {
          .seq = s, .kv_begin = begin, .kv_end = std::min(begin + split, end)};
    }
  }
  seq.num_computed = end;
  if (!sample) return -1;
  FERRY_CHECK(end >= num_known) << "end=" << end << " known=" << num_known;
  return AddSample(seq, counts.num_tokens - 1);
}

int32_t PlanBuilder::AddBranchSample(Sequence& branch) {
  FERRY_CHECK(!empty()) << "a branch samples from a row added before";
  return AddSample(branch, plan_.counts().num_tokens - 1);
}

int32_t PlanBuilder::AddSample(Sequence& seq, int32_t row) {
  model::StepCounts& counts = plan_.counts();
  FERRY_CHECK(free_samples() >= 1) << "limit=" << plan_.limits().max_samples;
  const SamplingOptions& options = seq.sampling;
  const int32_t position = plan_.positions[row] + 1;
  const int32_t index = counts.num_samples++;
  kernels::SampleRow& sample = plan_.samples[index];
  sample.row = row;
  sample.temperature = options.temperature;
  sample.top_k = options.top_k;
  sample.top_p = options.top_p;
  sample.min_p = options.min_p;
  sample.repetition_penalty = options.repetition_penalty;
  sample.presence_penalty = options.presence_penalty;
  sample.frequency_penalty = options.frequency_penalty;
  sample.seed = options.seed;
  sample.branch = options.branch;
  sample.position = static_cast<uint32_t>(position);
  sample.num_logprobs = options.num_logprobs;
  sample.penalty_slot = seq.penalty_slot;
  sample.num_banned = 0;
  if (position - seq.num_prompt_tokens < options.min_tokens) {
    for (const int32_t id : options.stop_token_ids) sample.banned[sample.num_banned++] = id;
  }
  if (seq.penalty_reset_needed) {
    const int32_t length = static_cast<int32_t>(seq.tokens.size());
    FERRY_CHECK(seq.penalty_slot >= 0 && length <= free_history_tokens())
        << "slot=" << seq.penalty_slot << " history=" << length
        << " free=" << free_history_tokens();
    plan_.penalty_resets[counts.num_penalty_resets++] = {
        .slot = seq.penalty_slot,
        .begin = counts.num_history_tokens,
        .prompt_len = seq.num_prompt_tokens,
        .output_len = length - seq.num_prompt_tokens};
    std::copy(seq.tokens.begin(), seq.tokens.end(),
              plan_.history_tokens + counts.num_history_tokens);
    counts.num_history_tokens += length;
    seq.penalty_reset_needed = false;
  }
  seq.pending_sample = index;
  seq.pending_step = counts.step_id;
  return index;
}

void PlanBuilder::AddCopy(BlockId src, BlockId dst) {
  model::StepCounts& counts = plan_.counts();
  FERRY_CHECK(counts.num_copies < plan_.limits().max_copies)
      << "limit=" << plan_.limits().max_copies;
  plan_.copy_src[counts.num_copies] = src;
  plan_.copy_dst[counts.num_copies] = dst;
  ++counts.num_copies;
}

void PlanBuilder::PrepareState(Sequence& seq) {
  if (seq.state_source == kNoSlot) return;
  model::StepCounts& counts = plan_.counts();
  FERRY_CHECK(counts.num_state_copies < plan_.limits().max_seqs && seq.state_slot != kNoSlot)
      << "limit=" << plan_.limits().max_seqs << " slot=" << seq.state_slot;
  plan_.state_copy_src[counts.num_state_copies] = seq.state_source;
  plan_.state_copy_dst[counts.num_state_copies] = seq.state_slot;
  ++counts.num_state_copies;
  state_sources_.push_back(std::exchange(seq.state_source, kNoSlot));
}

void PlanBuilder::AddSnapshot(SlotId slot) {
  model::StepCounts& counts = plan_.counts();
  FERRY_CHECK(counts.num_snapshots < plan_.limits().max_seqs && counts.num_seqs > 0)
      << "limit=" << plan_.limits().max_seqs;
  plan_.snapshot_src[counts.num_snapshots] = plan_.state_slots[counts.num_seqs - 1];
  plan_.snapshot_dst[counts.num_snapshots] = slot;
  ++counts.num_snapshots;
}

bool PlanBuilder::empty() const {
  return plan_.counts().num_tokens == 0 && plan_.counts().num_state_copies == 0;
}

}  // namespace engine
