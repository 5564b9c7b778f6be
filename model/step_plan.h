// StepPlan: everything one step of an engine needs, as one flat, fixed-address structure.
//
// It mixes chunks of prompts and decodes: phase is data.  No launch parameter depends on a value
// that only the device knows, so the same plan feeds CPU loops and CUDA graphs.  What a step uses
// of its bytes is one copy to a device, and one message to another rank.
//
// Order of sequences: those attended in absorbed form first ("decodes first"), then those in ragged
// MHA form.  Rows of a sequence are adjacent; sequences follow each other without gaps.
//
// Thread-compatible.  Built by engine/plan_builder.h, read by a model's Forward.

#ifndef MODEL_STEP_PLAN_H_
#define MODEL_STEP_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "kernels/absorbed_decode.h"
#include "kernels/head_and_sample.h"

namespace model {

// Capacities of a plan; fixed when an engine is made.
struct StepLimits {
  int32_t max_tokens = 512;          // new rows a step
  int32_t max_absorbed_tokens = 64;  // of them, rows attended in absorbed form
  int32_t max_seqs = 64;
  int32_t max_blocks_per_seq = 64;
  int32_t max_samples = 64;
  int32_t max_logit_rows = 0;         // rows whose full logits are returned (parity)
  int32_t max_copies = 64;            // copy-on-write blocks a step
  int32_t max_history_tokens = 8192;  // tokens of penalty resets a step
  // The model's (V4): what StepPlan::window_start is made with.  0: no window.
  int32_t sliding_window = 0;

  // Of one sequence; partial results of a step are at most max_absorbed_tokens * kMaxSplitsPerSeq.
  static constexpr int32_t kMaxSplitsPerSeq = 16;
  int32_t max_splits() const { return max_seqs * kMaxSplitsPerSeq; }  // of all sequences together
  friend bool operator==(const StepLimits&, const StepLimits&) = default;
};

// Counts that the host knows when it launches.
struct StepCounts {
  int64_t step_id = 0;
  int32_t num_tokens = 0;
  int32_t num_seqs = 0;
  int32_t num_absorbed_seqs = 0;    // the first ones
  int32_t num_absorbed_tokens = 0;  // their rows, the first ones
  int32_t num_splits = 0;
  int32_t num_samples = 0;
  int32_t num_logit_rows = 0;
  int32_t num_copies = 0;
  int32_t num_state_copies = 0;
  int32_t num_snapshots = 0;
  int32_t num_penalty_resets = 0;
  int32_t num_history_tokens = 0;
};

// Keys per split of absorbed decode: a function of kv_len alone, so that a sequence's result does
// not depend on its batch.  A multiple of 64, at least 256, at most kMaxSplitsPerSeq splits.
int32_t SplitTokens(int32_t kv_len);

class StepPlan final {
 public:
  explicit StepPlan(const StepLimits& limits);
  // In `storage`, SizeBytes(limits) zeros aligned to 256 bytes, which outlive the plan.
  StepPlan(const StepLimits& limits, std::byte* storage);
  StepPlan(const StepPlan&) = delete;
  StepPlan& operator=(const StepPlan&) = delete;

  static int64_t SizeBytes(const StepLimits& limits);

  void Clear();  // counts to zero, cu_seqlens[0] to 0

  const StepLimits& limits() const { return limits_; }
  StepCounts& counts() { return *counts_; }
  const StepCounts& counts() const { return *counts_; }

  // Rows, [max_tokens].
  int32_t* token_ids;     // input token; ignored where token_source >= 0
  int32_t* token_source;  // -1, or the sample of the *previous* step that is this row's token
  int32_t* positions;     // absolute position, for RoPE
  int64_t* slots;         // where the row's latent goes: block * block_size + offset; -1: nowhere
  int32_t* row_to_seq;
  int32_t* window_start;  // first position a row attends in a window (V4); 0 otherwise

  // Sequences, [max_seqs] (cu_*: [max_seqs + 1]).
  int32_t* cu_seqlens_q;
  int32_t* cu_seqlens_kv;
  int32_t* kv_len;       // cached + new
  int32_t* state_slots;  // -1: none; else the rows advance the state in this slot, in place

  kernels::DecodeSplit* splits;           // [max_splits()], of the absorbed sequences
  kernels::SampleRow* samples;            // [max_samples]
  kernels::PenaltyReset* penalty_resets;  // [max_samples]
  int32_t* logit_rows;                    // [max_logit_rows]
  int32_t* copy_src;                      // [max_copies], blocks copied before anything else
  int32_t* copy_dst;
  // Copies of state slots, in order, made by the engine around Network::Forward.  Before it: a
  // sequence's slot receives what it starts from (slot 0, all zero: nothing).  After it: a snapshot
  // receives the state of a sequence after its rows.
  int32_t* state_copy_src;  // [max_seqs]
  int32_t* state_copy_dst;
  int32_t* snapshot_src;  // [max_seqs]
  int32_t* snapshot_dst;

  // The large ones, last.
  int32_t* block_table;     // [max_seqs, max_blocks_per_seq], -1 past the end
  int32_t* history_tokens;  // [max_history_tokens], of penalty resets

  int64_t block_table_stride() const { return limits_.max_blocks_per_seq; }

  // The whole structure, counts included.
  absl::Span<const std::byte> bytes() const { return {storage_, size_}; }
  // Of it, from the start, what a step with these counts reads: tables of sequences and histories
  // that there are not are left out.
  absl::Span<const std::byte> used_bytes() const;
  // Takes the other plan's used bytes.  REQUIRES: the same limits.
  void CopyFrom(const StepPlan& other);

 private:
  struct AlignedDelete {
    void operator()(std::byte* memory) const;
  };

  // Sets the pointers within `base` (null: only measures) and returns the size.
  size_t Carve(std::byte* base);

  const StepLimits limits_;
  const size_t size_;
  std::unique_ptr<std::byte[], AlignedDelete> owned_;  // null: storage of someone else
  std::byte* const storage_;
  StepCounts* counts_;
};

}  // namespace model

#endif  // MODEL_STEP_PLAN_H_
