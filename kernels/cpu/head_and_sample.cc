#include "kernels/cpu/head_and_sample.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/sampler.h"
#include "kernels/linear.h"

namespace kernels::cpu {
namespace {

constexpr int32_t kExtraRows = 64;  // of gathered hidden states, for logit rows

// What a workspace holds, in this order.
struct Workspace {
  float* hidden;              // [max_samples + kExtraRows, hidden_size], gathered rows
  float* logits;              // [max_samples, vocab], one row for each hidden row in use
  int32_t* logits_of_sample;  // [max_samples] rows of `logits`
  int32_t* hidden_rows;       // [max_samples + kExtraRows] rows of the hidden state
  int8_t* failed;             // [max_samples]
};

// Pieces start at multiples of 64 bytes.
int64_t PieceBytes(int64_t count, int64_t element_bytes) {
  return (count * element_bytes + 63) / 64 * 64;
}

template <typename T>
T* TakePiece(std::byte** next, int64_t count) {
  T* piece = reinterpret_cast<T*>(*next);
  *next += PieceBytes(count, sizeof(T));
  return piece;
}

Workspace LayOut(std::byte* memory, int64_t num_samples, int64_t hidden_size, int64_t vocab_size) {
  Workspace work;
  work.hidden = TakePiece<float>(&memory, (num_samples + kExtraRows) * hidden_size);
  work.logits = TakePiece<float>(&memory, num_samples * vocab_size);
  work.logits_of_sample = TakePiece<int32_t>(&memory, num_samples);
  work.hidden_rows = TakePiece<int32_t>(&memory, num_samples + kExtraRows);
  work.failed = TakePiece<int8_t>(&memory, num_samples);
  return work;
}

// The arrays of a call, which CheckHeadAndSample does not look into.
absl::Status CheckArrays(const HeadAndSampleParams& params) {
  const PenaltyState& penalties = params.penalties;
  for (int32_t i = 0; i < params.num_penalty_resets; ++i) {
    const PenaltyReset& reset = params.penalty_resets[i];
    if (reset.slot < 0 || reset.slot >= penalties.num_slots || reset.begin < 0 ||
        reset.prompt_len < 0 || reset.output_len < 0 ||
        (params.history_tokens == nullptr && reset.prompt_len + reset.output_len > 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("head_and_sample: penalty reset ", i, " of slot ", reset.slot, " among ",
                       penalties.num_slots, " with ", reset.prompt_len, " + ", reset.output_len,
                       " tokens from ", reset.begin));
    }
  }
  for (int32_t i = 0; i < params.num_samples; ++i) {
    const SampleRow& sample = params.samples[i];
    if (sample.row < 0 || sample.penalty_slot >= penalties.num_slots) {
      return absl::InvalidArgumentError(
          absl::StrCat("head_and_sample: sample ", i, " has row ", sample.row, " and penalty slot ",
                       sample.penalty_slot, " of ", penalties.num_slots));
    }
  }
  for (int32_t i = 0; i < params.num_logit_rows; ++i) {
    if (params.logit_rows[i] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("head_and_sample: logit row ", i, " is row ", params.logit_rows[i]));
    }
  }
  return absl::OkStatus();
}

void ResetPenalties(const HeadAndSampleParams& params, const PenaltyReset& reset) {
  const int64_t vocab_size = params.vocab_size;
  int32_t* counts = params.penalties.output_counts + reset.slot * vocab_size;
  uint8_t* in_prompt = params.penalties.in_prompt + reset.slot * vocab_size;
  std::fill_n(counts, vocab_size, 0);
  std::fill_n(in_prompt, vocab_size, uint8_t{0});
  const int32_t* tokens = params.history_tokens + reset.begin;
  for (int32_t i = 0; i < reset.prompt_len + reset.output_len; ++i) {
    const int32_t token = tokens[i];
    if (token < 0 || token >= vocab_size) continue;
    if (i < reset.prompt_len) {
      in_prompt[token] = 1;
    } else {
      ++counts[token];
    }
  }
}

// logits [num_rows, vocab] <- W_head rmsnorm of rows[0 .. num_rows) of the hidden state, which are
// gathered at `gathered`.
absl::Status ComputeLogits(ThreadPool& pool, const HeadAndSampleParams& params, const int32_t* rows,
                           int32_t num_rows, float* gathered, float* logits) {
  const int64_t hidden_size = params.head->in_features();
  for (int32_t i = 0; i < num_rows; ++i) {
    std::copy_n(params.hidden + rows[i] * params.hidden_row_stride, hidden_size,
                gathered + i * hidden_size);
  }
  const OutputSegment output{logits, params.vocab_size, params.vocab_size};
  LinearParams linear;
  linear.weight = params.head;
  linear.num_rows = num_rows;
  linear.input.data = gathered;
  linear.input.row_stride = hidden_size;
  linear.norm_weight = params.norm_weight;
  linear.norm_eps = params.norm_eps;
  linear.outputs = absl::Span<const OutputSegment>(&output, 1);
  return Linear(pool, linear);
}

TokenHistory HistoryOf(const HeadAndSampleParams& params, const SampleRow& sample) {
  TokenHistory history;
  if (sample.penalty_slot < 0) return history;
  const int64_t offset = int64_t{sample.penalty_slot} * params.vocab_size;
  history.output_counts = params.penalties.output_counts + offset;
  history.in_prompt = params.penalties.in_prompt + offset;
  return history;
}

absl::Status SampleAll(ThreadPool& pool, const HeadAndSampleParams& params, const Workspace& work) {
  const auto sample_one = [&](int64_t i) {
    const float* logits = work.logits + int64_t{work.logits_of_sample[i]} * params.vocab_size;
    return SampleToken(absl::MakeConstSpan(logits, params.vocab_size), params.samples[i],
                       HistoryOf(params, params.samples[i]), &params.results[i]);
  };
  pool.ParallelFor(params.num_samples, [&](int64_t i) {
    const absl::Status status = sample_one(i);
    if (absl::IsInternal(status)) params.results[i] = {.token_id = kNoToken};
    work.failed[i] = !status.ok() && !absl::IsInternal(status);
  });
  for (int32_t i = 0; i < params.num_samples; ++i) {
    if (work.failed[i] == 0) continue;
    const absl::Status status = sample_one(i);  // again, for its message
    return absl::Status(status.code(),
                        absl::StrCat("head_and_sample: sample ", i, " of row ",
                                     params.samples[i].row, ": ", std::string(status.message())));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t HeadAndSampleWorkspaceBytes(int32_t max_samples, int64_t hidden_size, int32_t vocab_size) {
  const int64_t samples = max_samples;
  return PieceBytes((samples + kExtraRows) * hidden_size, sizeof(float)) +
         PieceBytes(samples * vocab_size, sizeof(float)) + PieceBytes(samples, sizeof(int32_t)) +
         PieceBytes(samples + kExtraRows, sizeof(int32_t)) + PieceBytes(samples, sizeof(int8_t));
}

absl::Status HeadAndSample(ThreadPool& pool, const HeadAndSampleParams& params) {
  if (absl::Status status = CheckHeadAndSample(params); !status.ok()) return status;
  if (absl::Status status = CheckArrays(params); !status.ok()) return status;
  for (int32_t i = 0; i < params.num_penalty_resets; ++i) {
    ResetPenalties(params, params.penalty_resets[i]);
  }
  if (params.num_samples == 0 && params.num_logit_rows == 0) return absl::OkStatus();
  const Workspace work =
      LayOut(params.workspace, params.num_samples, params.head->in_features(), params.vocab_size);

  const int32_t max_rows = params.num_samples + kExtraRows;
  for (int32_t begin = 0; begin < params.num_logit_rows; begin += max_rows) {
    const int32_t num_rows = std::min(max_rows, params.num_logit_rows - begin);
    absl::Status status =
        ComputeLogits(pool, params, params.logit_rows + begin, num_rows, work.hidden,
                      params.logits + int64_t{begin} * params.vocab_size);
    if (!status.ok()) return status;
  }
  if (params.num_samples == 0) return absl::OkStatus();

  // Each row's logits once, however many samples share it.
  int32_t num_rows = 0;
  for (int32_t i = 0; i < params.num_samples; ++i) {
    const int32_t row = params.samples[i].row;
    int32_t* const end = work.hidden_rows + num_rows;
    const int32_t* const found = std::find(work.hidden_rows, end, row);
    work.logits_of_sample[i] = static_cast<int32_t>(found - work.hidden_rows);
    if (found == end) work.hidden_rows[num_rows++] = row;
  }
  absl::Status status =
      ComputeLogits(pool, params, work.hidden_rows, num_rows, work.hidden, work.logits);
  if (status.ok()) status = SampleAll(pool, params, work);
  if (!status.ok()) return status;

  for (int32_t i = 0; i < params.num_samples; ++i) {
    const int32_t token = params.results[i].token_id;
    params.sampled_ids[i] = token == kNoToken ? 0 : token;
    const int64_t slot = params.samples[i].penalty_slot;
    if (slot >= 0 && token != kNoToken)
      ++params.penalties.output_counts[slot * params.vocab_size + token];
  }
  return absl::OkStatus();
}

}  // namespace kernels::cpu
