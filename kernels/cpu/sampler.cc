#include "kernels/cpu/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/logit_scan.h"
#include "kernels/cpu/thread_scratch.h"
#include "kernels/philox.h"

namespace kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

absl::Status CheckSample(const SampleRow& sample) {
  // Negated, so that NaN is refused too.
  if (!(sample.temperature >= 0) || sample.temperature == kInfinity) {
    return absl::InvalidArgumentError(absl::StrCat("temperature is ", sample.temperature));
  }
  if (!(sample.repetition_penalty > 0) || sample.repetition_penalty == kInfinity) {
    return absl::InvalidArgumentError(
        absl::StrCat("repetition_penalty is ", sample.repetition_penalty));
  }
  if (sample.top_k < 0 || std::isnan(sample.top_p) || std::isnan(sample.min_p) ||
      !std::isfinite(sample.presence_penalty) || !std::isfinite(sample.frequency_penalty)) {
    return absl::InvalidArgumentError(absl::StrCat("top_k ", sample.top_k, ", top_p ", sample.top_p,
                                                   ", min_p ", sample.min_p, ", presence_penalty ",
                                                   sample.presence_penalty, ", frequency_penalty ",
                                                   sample.frequency_penalty));
  }
  if (sample.num_logprobs > kMaxLogprobs || sample.num_banned < 0 ||
      sample.num_banned > kMaxBannedTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_logprobs ", sample.num_logprobs, ", num_banned ", sample.num_banned));
  }
  return absl::OkStatus();
}

bool ChangesLogits(const SampleRow& sample, const TokenHistory& history) {
  if (sample.num_banned > 0) return true;
  return history.output_counts != nullptr &&
         (sample.repetition_penalty != 1 || sample.presence_penalty != 0 ||
          sample.frequency_penalty != 0);
}

float Saturate(float logit) { return std::clamp(logit, -kLargest, kLargest); }

void Penalize(const SampleRow& sample, const TokenHistory& history, absl::Span<float> logits) {
  if (history.output_counts != nullptr) {
    for (size_t token = 0; token < logits.size(); ++token) {
      const int32_t count = history.output_counts[token];
      float& logit = logits[token];
      if (count > 0 || history.in_prompt[token] != 0) {
        logit = Saturate(logit > 0 ? logit / sample.repetition_penalty
                                   : logit * sample.repetition_penalty);
      }
      if (count > 0) {
        logit = Saturate(logit - sample.frequency_penalty * static_cast<float>(count));
        logit = Saturate(logit - sample.presence_penalty);
      }
    }
  }
  for (int32_t i = 0; i < sample.num_banned; ++i) {
    const int32_t token = sample.banned[i];
    if (token >= 0 && static_cast<size_t>(token) < logits.size()) logits[token] = -kInfinity;
  }
}

// A row's tokens in descending order of logit, ties to the lower id, sorted only where it is looked
// at.  Lives for one SampleToken.
class DescendingOrder final {
 public:
  // A place in the order, with the mass of the tokens before it.
  struct Place {
    int64_t index = 0;
    uint64_t mass_before = 0;
    int32_t token = -1;
  };

  DescendingOrder(absl::Span<const float> logits, float max, float temperature) : logits_(logits) {
    thread_local ThreadScratch<float> weights;
    thread_local ThreadScratch<uint16_t> buckets;
    thread_local ThreadScratch<int32_t> members;
    weights_ = weights.Get(logits.size());
    buckets_ = buckets.Get(logits.size());
    members_ = members.Get(logits.size());
    Weigh(logits, max, temperature, weights_, buckets_);
    for (size_t token = 0; token < logits.size(); ++token) {
      ++count_[buckets_[token]];
      mass_[buckets_[token]] += Mass(static_cast<int32_t>(token));
    }
    for (const uint64_t mass : mass_) total_mass_ += mass;
  }

  uint64_t total_mass() const { return total_mass_; }

  // The first `count` tokens' mass.  REQUIRES: 0 <= count <= number of tokens.
  uint64_t MassOfFirst(int64_t count) {
    Place place;
    int32_t bucket = 0;
    while (bucket < kNumBuckets && place.index + count_[bucket] <= count) Skip(&bucket, &place);
    if (place.index == count) return place.mass_before;
    Sort(bucket);
    for (int32_t i = 0; place.index < count; ++i, ++place.index) {
      place.mass_before += Mass(members_[i]);
    }
    return place.mass_before;
  }

  // The token whose mass covers unit `target`.  REQUIRES: target < total_mass().
  Place FindMass(uint64_t target) {
    Place place;
    int32_t bucket = 0;
    while (place.mass_before + mass_[bucket] <= target) Skip(&bucket, &place);
    Sort(bucket);
    for (int32_t i = 0;; ++i, ++place.index) {
      place.token = members_[i];
      const uint64_t mass = Mass(place.token);
      if (place.mass_before + mass > target) return place;
      place.mass_before += mass;
    }
  }

  // How many tokens have a logit of at least `limit`.
  int64_t CountAtLeast(float limit) const {
    return std::count_if(logits_.begin(), logits_.end(),
                         [limit](float logit) { return logit >= limit; });
  }

 private:
  uint64_t Mass(int32_t token) const {
    return static_cast<uint64_t>(
        static_cast<int64_t>(weights_[token] * static_cast<float>(uint64_t{1} << kMassBits)));
  }

  void Skip(int32_t* bucket, Place* place) const {
    place->index += count_[*bucket];
    place->mass_before += mass_[*bucket];
    ++*bucket;
  }

  // members_ <- the tokens of a bucket in order.
  void Sort(int32_t bucket) {
    if (sorted_ == bucket) return;
    sorted_ = bucket;
    int32_t* end = members_;
    for (size_t token = 0; token < logits_.size(); ++token) {
      *end = static_cast<int32_t>(token);
      end += buckets_[token] == bucket;
    }
    std::sort(members_, end, [this](int32_t a, int32_t b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
    });
  }

  const absl::Span<const float> logits_;
  float* weights_;     // [vocab]
  uint16_t* buckets_;  // [vocab]
  int32_t* members_;   // of bucket sorted_
  int32_t sorted_ = -1;
  int64_t count_[kNumBuckets] = {};
  uint64_t mass_[kNumBuckets] = {};
  uint64_t total_mass_ = 0;
};

// Every filter keeps a beginning of the descending order; so the kept set is one number, its mass.
int32_t Draw(absl::Span<const float> logits, float max, const SampleRow& sample) {
  DescendingOrder order(logits, max, sample.temperature);
  const int64_t vocab_size = static_cast<int64_t>(logits.size());
  uint64_t kept = order.total_mass();
  if (sample.top_k > 0 && sample.top_k < vocab_size) kept = order.MassOfFirst(sample.top_k);
  if (sample.top_p < 1) {
    // The smallest set that reaches top_p of everything: it ends with the token that covers the
    // last unit needed.
    const double wanted = std::ceil(sample.top_p * static_cast<double>(order.total_mass()));
    const uint64_t needed = wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
    if (needed < kept) {
      const DescendingOrder::Place last = order.FindMass(needed - 1);
      kept = order.MassOfFirst(last.index + 1);
    }
  }
  if (sample.min_p > 0) {
    const float limit = max + sample.temperature * std::log(std::min(sample.min_p, 1.0f));
    kept = std::min(kept, order.MassOfFirst(order.CountAtLeast(limit)));
  }
  const uint64_t number = SamplingNumber(sample.seed, sample.branch, sample.position);
  // number / 2^32 of the kept mass, which is below 2^58.
  const uint64_t target = (kept >> 32) * number + ((kept & 0xffffffff) * number >> 32);
  return order.FindMass(target).token;
}

void FillLogprobs(absl::Span<const float> logits, float max, int32_t num_logprobs,
                  SampleResult* result) {
  const double log_sum = LogSumExp(logits, max);
  result->logprob = static_cast<float>(logits[result->token_id] - log_sum);
  // The best so far, in order.  A later token must be larger to come before an earlier one.
  int32_t* ids = result->top_ids;
  int32_t found = 0;
  for (int32_t token = 0; num_logprobs > 0 && token < static_cast<int32_t>(logits.size());
       ++token) {
    if (found == num_logprobs && !(logits[token] > logits[ids[found - 1]])) continue;
    int32_t place = found < num_logprobs ? found++ : found - 1;
    for (; place > 0 && logits[token] > logits[ids[place - 1]]; --place) {
      ids[place] = ids[place - 1];
    }
    ids[place] = token;
  }
  for (int32_t i = 0; i < num_logprobs; ++i) {
    if (i >= found) ids[i] = -1;
    result->top_logprobs[i] = i < found ? static_cast<float>(logits[ids[i]] - log_sum) : -kInfinity;
  }
}

}  // namespace

absl::Status SampleToken(absl::Span<const float> logits, const SampleRow& sample,
                         const TokenHistory& history, SampleResult* result) {
  if (absl::Status status = CheckSample(sample); !status.ok()) return status;
  *result = SampleResult();
  const LogitRange range = FindRange(logits);
  if (!range.all_valid) return absl::InternalError("a logit is NaN or infinite");
  if (range.max == -kInfinity) return absl::InternalError("every logit is -inf");

  absl::Span<const float> penalized = logits;
  float max = range.max;
  if (ChangesLogits(sample, history)) {
    thread_local ThreadScratch<float> scratch;
    const absl::Span<float> changed(scratch.Get(logits.size()), logits.size());
    std::copy(logits.begin(), logits.end(), changed.begin());
    Penalize(sample, history, changed);
    penalized = changed;
    const LogitRange changed_range = FindRange(changed);
    max = changed_range.max;
    if (!changed_range.all_valid || max == -kInfinity) {
      return absl::InternalError("banned tokens leave no token");
    }
  }
  result->token_id =
      sample.temperature == 0 ? FindFirst(penalized, max) : Draw(penalized, max, sample);
  if (sample.num_logprobs >= 0) FillLogprobs(logits, range.max, sample.num_logprobs, result);
  return absl::OkStatus();
}

}  // namespace kernels::cpu
