// Passes over a whole row of logits, the part of sampling whose time grows with the vocabulary.
// Compiled twice, for AVX2 and for any processor; chosen at run time.
//
// Thread-safe: pure functions.

#ifndef KERNELS_CPU_LOGIT_SCAN_H_
#define KERNELS_CPU_LOGIT_SCAN_H_

#include <cstdint>

#include "absl/types/span.h"

namespace kernels::cpu {

struct LogitRange {
  float max = 0;           // of the logits that are not NaN; -inf if there is none
  bool all_valid = false;  // neither NaN nor +inf
};
LogitRange FindRange(absl::Span<const float> logits);

// The lowest index that holds `value`, or -1.
int32_t FindFirst(absl::Span<const float> logits, float value);

// log sum_i exp(logits[i]).  REQUIRES: max is finite and the largest.
double LogSumExp(absl::Span<const float> logits, float max);

// Buckets of a token's distance below the best: kBucketsPerUnit to a factor of e, the last for all
// the rest.  A lower bucket never holds a lower logit.
inline constexpr int32_t kBucketsPerUnit = 64;
inline constexpr int32_t kNumBuckets = 2048;
inline constexpr int32_t kMassBits = 40;

// For each token x = (logit - max) / temperature: weights[i] = exp(x), buckets[i] = x's bucket.
// REQUIRES: max is finite and the largest, temperature > 0.
void Weigh(absl::Span<const float> logits, float max, float temperature, float* weights,
           uint16_t* buckets);

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_LOGIT_SCAN_H_
