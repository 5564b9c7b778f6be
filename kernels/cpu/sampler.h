// One token from one row of logits: penalties, filters, draw and log-probabilities, as
// kernels/head_and_sample.h says.
//
// The draw is exact in integers: a token's mass is exp((logit - max) / temperature) in units of
// 2^-40, so sums do not depend on their order, and only the parts of the descending order that a
// boundary falls into are ever sorted.  Tokens below 2^-40 of the best are never drawn.
//
// Thread-safe: a call touches what it is given and scratch of its own thread.

#ifndef KERNELS_CPU_SAMPLER_H_
#define KERNELS_CPU_SAMPLER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/head_and_sample.h"

namespace kernels::cpu {

// What a sequence has said so far; null pointers: no penalties.
struct TokenHistory {
  const int32_t* output_counts = nullptr;  // [vocab]
  const uint8_t* in_prompt = nullptr;      // [vocab]
};

// logits [vocab].  Alternatives past the vocabulary's end get id -1 and -inf.
//
// Errors: kInvalidArgument for parameters outside their range (a temperature below 0, ...);
// kInternal if the logits are no distribution (kNoToken).  They name the value, the caller adds
// which sample it was.
absl::Status SampleToken(absl::Span<const float> logits, const SampleRow& sample,
                         const TokenHistory& history, SampleResult* result);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_SAMPLER_H_
