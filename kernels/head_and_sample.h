// HeadAndSample: rows of the last hidden state -> token ids and log-probabilities.
//
//   logits[i] = W_head rmsnorm(hidden[samples[i].row]; norm_weight, eps)
//   penalties: logits of seen tokens: repetition (divide if > 0, multiply if < 0) over prompt and
//              output, then - frequency * count - presence * (count > 0) over output; what passes
//              the largest float saturates, so that no penalty fails a step
//   tokens banned while min_tokens is not reached are removed
//   temperature 0: argmax, ties to the lower id
//   otherwise: p = softmax(logits / temperature); keep top_k, then the smallest set with mass >= top_p,
//              then p >= min_p * max p; renormalise; draw by inversion in descending-probability order
//              (ties: lower id first) with one Philox4x32-10 number
// Mass and maximum are those of p over the whole vocabulary; only the end renormalises.
//
// Random number: philox.h, of the seed, the branch and the position of the sampled token in its
// sequence; so a retry or a migration draws the same numbers, on every backend.
// Log-probabilities are of the model's own distribution (temperature 1, before penalties).
//
// A sample whose logits are no distribution (one is NaN or +inf, or none is left to draw) gets
// kNoToken and is counted nowhere; its sampled id is 0, so that a step that is launched already has
// an input.  The other samples are not touched by it.

#ifndef KERNELS_HEAD_AND_SAMPLE_H_
#define KERNELS_HEAD_AND_SAMPLE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/linear.h"
#include "kernels/tensor.h"

namespace kernels {

inline constexpr int32_t kMaxLogprobs = 20;
inline constexpr int32_t kMaxBannedTokens = 72;  // EOS ids and 64 stop ids

// One token to sample.  Several may share a row (branches of n > 1).
struct SampleRow {
  int32_t row = 0;                 // row of the hidden state
  float temperature = 1;
  int32_t top_k = 0;               // 0: all
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  uint64_t seed = 0;
  uint32_t branch = 0;
  uint32_t position = 0;           // of the token to sample
  int32_t num_logprobs = -1;       // -1: none; else 0..kMaxLogprobs alternatives
  int32_t penalty_slot = -1;       // row of PenaltyState; -1: no penalties
  int32_t num_banned = 0;          // > 0 while min_tokens is not reached
  int32_t banned[kMaxBannedTokens] = {};
};

// Token counts of sequences with penalties, kept on the device across steps because a sampled token
// is known to the host one step late.
struct PenaltyState {
  int32_t* output_counts = nullptr;  // [num_slots, vocab]
  uint8_t* in_prompt = nullptr;      // [num_slots, vocab], 1 if the prompt holds the token
  int32_t num_slots = 0;
};

// Before sampling: slot <- counts of tokens[begin .. begin+prompt_len) as prompt and the following
// output_len as output.
struct PenaltyReset {
  int32_t slot = 0;
  int32_t begin = 0;               // in history_tokens
  int32_t prompt_len = 0;
  int32_t output_len = 0;
};

inline constexpr int32_t kNoToken = -1;

struct SampleResult {
  int32_t token_id = 0;            // or kNoToken
  float logprob = 0;               // valid when num_logprobs >= 0
  int32_t top_ids[kMaxLogprobs] = {};
  float top_logprobs[kMaxLogprobs] = {};
};

struct HeadAndSampleParams {
  const float* hidden = nullptr;   // [num_rows, hidden_size]
  int64_t hidden_row_stride = 0;   // elements
  int32_t vocab_size = 0;
  const float* norm_weight = nullptr;
  float norm_eps = 1e-6f;
  const PackedLinear* head = nullptr;  // [vocab, hidden_size]
  const SampleRow* samples = nullptr;  // [num_samples]
  int32_t num_samples = 0;
  const PenaltyReset* penalty_resets = nullptr;  // [num_penalty_resets]
  int32_t num_penalty_resets = 0;
  const int32_t* history_tokens = nullptr;
  PenaltyState penalties;          // counts are updated with the sampled tokens
  SampleResult* results = nullptr;  // [num_samples]
  int32_t* sampled_ids = nullptr;  // [num_samples], the next step's input
  const int32_t* logit_rows = nullptr;  // [num_logit_rows] rows whose full logits are wanted
  int32_t num_logit_rows = 0;
  float* logits = nullptr;         // [num_logit_rows, vocab]
  std::byte* workspace = nullptr;  // Backend::HeadAndSampleWorkspaceBytes
};

// Token ids -> rows of the embedding.  Where source[i] >= 0 the id is previous_sampled[source[i]].
struct EmbedParams {
  int32_t num_rows = 0;
  const int32_t* token_ids = nullptr;        // [num_rows]
  const int32_t* token_source = nullptr;     // [num_rows]; -1: token_ids
  const int32_t* previous_sampled = nullptr;
  WeightTensor table;                        // [vocab, hidden_size] bf16, f16 or float32, unscaled
  float* output = nullptr;                   // [num_rows, hidden_size]
  int64_t output_row_stride = 0;
  int32_t* resolved_ids = nullptr;           // [num_rows], the ids that were looked up; may be null
};

// What every backend refuses, without a look at what may be device memory.
// Errors: kInvalidArgument.
absl::Status CheckHeadAndSample(const HeadAndSampleParams& params);
absl::Status CheckEmbed(const EmbedParams& params);

}  // namespace kernels

#endif  // KERNELS_HEAD_AND_SAMPLE_H_
