#include "kernels/cuda/sampler.h"

#include <cfloat>

#include "kernels/cuda/launch.cuh"
#include "kernels/philox.h"

namespace kernels::cuda {
namespace {

constexpr int32_t kThreads = 512;
constexpr int32_t kMassBits = 40;
// Buckets of a token's distance below the best: a lower bucket never holds a lower logit.
constexpr int32_t kNumBuckets = 2048;
constexpr float kBucketsPerUnit = 64;
constexpr int32_t kDigitBits = 8;
constexpr int32_t kNumDigits = 1 << kDigitBits;
static_assert(kNumDigits <= kNumBuckets);

struct Shared {
  double sums[33];
  uint64_t words[33];
  float maxima[33];
  int32_t flags[33];
  uint32_t bin_count[kNumBuckets];
  unsigned long long bin_mass[kNumBuckets];
  int32_t chosen_bin;
  uint64_t count_before;  // of the chosen bin
  uint64_t mass_before;
};

// exp of x <= 0 as kernels/cpu/logit_scan.cc computes it, bit for bit.
__device__ float Exp(float x) {
  const float lowest = -87.33654f;
  const float clamped = x < lowest ? lowest : x;
  const float round = 12582912.0f;  // adding and taking away 1.5 * 2^23 rounds to an integer
  const float n = (clamped * 1.44269504f + round) - round;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
  return p * __uint_as_float(x < lowest ? 0u : static_cast<uint32_t>(power));
}

// Larger for a larger logit, then for a lower id; unique in a row.
__device__ uint64_t KeyOf(float logit, int32_t token) {
  const uint32_t bits = __float_as_uint(logit == 0 ? 0.0f : logit);  // -0 is 0
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(token);
}
__device__ int32_t TokenOf(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

struct LogitRange {
  float max;       // of the logits that are not NaN; -inf if there is none
  bool all_valid;  // neither NaN nor +inf
};

__device__ LogitRange FindRange(const float* logits, int32_t vocab_size, Shared& shared) {
  float max = -INFINITY;
  int32_t valid = 1;
  for (int32_t i = threadIdx.x; i < vocab_size; i += kThreads) {
    max = logits[i] > max ? logits[i] : max;
    if (!(logits[i] < INFINITY)) valid = 0;
  }
  max = BlockReduce(max, shared.maxima, [](float a, float b) { return a > b ? a : b; });
  valid = BlockReduce(valid, shared.flags, [](int32_t a, int32_t b) { return a & b; });
  return {max, valid != 0};
}

// The largest key below `limit`; 0 if there is none (no token has key 0).
__device__ uint64_t BestKeyBelow(const float* logits, int32_t vocab_size, uint64_t limit,
                                 Shared& shared) {
  uint64_t best = 0;
  for (int32_t i = threadIdx.x; i < vocab_size; i += kThreads) {
    const uint64_t key = KeyOf(logits[i], i);
    if (key < limit && key > best) best = key;
  }
  return BlockReduce(best, shared.words, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

// A row's tokens in descending order of logit, ties to the lower id, without sorting: a place in
// the order is found digit by digit.
class DescendingOrder {
 public:
  // A place in the order, with the mass of the tokens before it.
  struct Place {
    uint64_t mass_before;
    int32_t token;
  };

  __device__ DescendingOrder(const float* logits, int32_t vocab_size, float max, float temperature,
                             Shared& shared)
      : logits_(logits),
        vocab_size_(vocab_size),
        max_(max),
        temperature_(temperature),
        shared_(shared) {
    uint64_t total = 0;
    for (int32_t i = threadIdx.x; i < vocab_size; i += kThreads) total += Mass(i);
    total_mass_ = BlockSum(total, shared.words);
  }

  __device__ uint64_t total_mass() const { return total_mass_; }
  __device__ uint64_t Mass(int32_t token) const {
    return static_cast<uint64_t>(
        static_cast<int64_t>(Exp(Distance(token)) * static_cast<float>(uint64_t{1} << kMassBits)));
  }
  // REQUIRES: 0 <= count < vocab_size.
  __device__ uint64_t MassOfFirst(uint64_t count) {
    return Find(/*by_mass=*/false, count).mass_before;
  }
  // The token whose mass covers unit `target`.  REQUIRES: target < total_mass().
  __device__ Place FindMass(uint64_t target) { return Find(/*by_mass=*/true, target); }
  // The mass of the tokens with a logit of at least `limit`, a beginning of the order.
  __device__ uint64_t MassAtLeast(float limit) {
    uint64_t mass = 0;
    for (int32_t i = threadIdx.x; i < vocab_size_; i += kThreads) {
      if (logits_[i] >= limit) mass += Mass(i);
    }
    return BlockSum(mass, shared_.words);
  }

 private:
  __device__ float Distance(int32_t token) const { return (logits_[token] - max_) / temperature_; }
  __device__ int32_t Bucket(int32_t token) const {
    const float scaled = Distance(token) * -kBucketsPerUnit;
    return static_cast<int32_t>(scaled < kNumBuckets - 1 ? scaled : kNumBuckets - 1);
  }

  __device__ Place Find(bool by_mass, uint64_t target);
  template <typename BinOf>
  __device__ int32_t ChooseBin(int32_t num_bins, bool by_mass, uint64_t* target,
                               uint64_t* mass_before, BinOf bin_of);

  const float* logits_;
  const int32_t vocab_size_;
  const float max_;
  const float temperature_;
  Shared& shared_;
  uint64_t total_mass_;
};

// Spreads the tokens over bins that lie in descending order (bin_of(token) < 0: not one of them)
// and chooses the bin that the unit `target` (of count or mass) falls into.  Takes what is before
// the bin off *target and adds it to *mass_before.
template <typename BinOf>
__device__ int32_t DescendingOrder::ChooseBin(int32_t num_bins, bool by_mass, uint64_t* target,
                                              uint64_t* mass_before, BinOf bin_of) {
  for (int32_t bin = threadIdx.x; bin < num_bins; bin += kThreads) {
    shared_.bin_count[bin] = 0;
    shared_.bin_mass[bin] = 0;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < vocab_size_; i += kThreads) {
    const int32_t bin = bin_of(i);
    if (bin < 0) continue;
    atomicAdd(&shared_.bin_count[bin], 1u);
    atomicAdd(&shared_.bin_mass[bin], static_cast<unsigned long long>(Mass(i)));
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    const int32_t per_lane = num_bins / kWarpSize;
    const int32_t begin = static_cast<int32_t>(threadIdx.x) * per_lane;
    uint64_t count = 0, mass = 0;
    for (int32_t bin = begin; bin < begin + per_lane; ++bin) {
      count += shared_.bin_count[bin];
      mass += shared_.bin_mass[bin];
    }
    uint64_t count_end = count, mass_end = mass;  // running totals over the lanes
    for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
      const uint64_t other_count = __shfl_up_sync(kFullWarp, count_end, offset);
      const uint64_t other_mass = __shfl_up_sync(kFullWarp, mass_end, offset);
      if (static_cast<int32_t>(threadIdx.x) >= offset) {
        count_end += other_count;
        mass_end += other_mass;
      }
    }
    const uint64_t end = by_mass ? mass_end : count_end;
    if (end > *target && end - (by_mass ? mass : count) <= *target) {
      uint64_t counts = count_end - count, masses = mass_end - mass;
      int32_t bin = begin;
      while ((by_mass ? masses + shared_.bin_mass[bin] : counts + shared_.bin_count[bin]) <=
             *target) {
        counts += shared_.bin_count[bin];
        masses += shared_.bin_mass[bin];
        ++bin;
      }
      shared_.chosen_bin = bin;
      shared_.count_before = counts;
      shared_.mass_before = masses;
    }
  }
  __syncthreads();
  *target -= by_mass ? shared_.mass_before : shared_.count_before;
  *mass_before += shared_.mass_before;
  const int32_t chosen = shared_.chosen_bin;
  __syncthreads();
  return chosen;
}

__device__ DescendingOrder::Place DescendingOrder::Find(bool by_mass, uint64_t target) {
  uint64_t mass_before = 0;
  const int32_t bucket = ChooseBin(kNumBuckets, by_mass, &target, &mass_before,
                                   [this](int32_t i) { return Bucket(i); });
  uint64_t prefix = 0;  // the key's digits found so far
  for (int32_t shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    const auto digit_of = [&](int32_t i) {
      if (Bucket(i) != bucket) return -1;
      const uint64_t key = KeyOf(logits_[i], i);
      // The digits above this one; a shift by all 64 bits would be none at all.
      if (shift + kDigitBits < 64 && key >> (shift + kDigitBits) != prefix) return -1;
      return kNumDigits - 1 - static_cast<int32_t>(key >> shift & (kNumDigits - 1));
    };
    const int32_t bin = ChooseBin(kNumDigits, by_mass, &target, &mass_before, digit_of);
    prefix = prefix << kDigitBits | static_cast<uint64_t>(kNumDigits - 1 - bin);
  }
  return {mass_before, TokenOf(prefix)};
}

__device__ bool IsValid(const SampleRow& sample) {
  // Written so that NaN is refused too.
  return sample.temperature >= 0 && sample.temperature < INFINITY &&
         sample.repetition_penalty > 0 && sample.repetition_penalty < INFINITY &&
         sample.top_k >= 0 && sample.top_p == sample.top_p && sample.min_p == sample.min_p &&
         fabsf(sample.presence_penalty) < INFINITY && fabsf(sample.frequency_penalty) < INFINITY &&
         sample.num_logprobs <= kMaxLogprobs && sample.num_banned >= 0 &&
         sample.num_banned <= kMaxBannedTokens;
}

// Every filter keeps a beginning of the descending order; so the kept set is one number, its mass.
__device__ int32_t Draw(const float* logits, int32_t vocab_size, float max, const SampleRow& sample,
                        Shared& shared) {
  DescendingOrder order(logits, vocab_size, max, sample.temperature, shared);
  uint64_t kept = order.total_mass();
  if (sample.top_k > 0 && sample.top_k < vocab_size) {
    kept = order.MassOfFirst(static_cast<uint64_t>(sample.top_k));
  }
  if (sample.top_p < 1) {
    const double wanted = ceil(sample.top_p * static_cast<double>(order.total_mass()));
    const uint64_t needed = wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
    if (needed < kept) {
      const DescendingOrder::Place last = order.FindMass(needed - 1);
      kept = last.mass_before + order.Mass(last.token);
    }
  }
  if (sample.min_p > 0) {
    const uint64_t mass =
        order.MassAtLeast(max + sample.temperature * logf(fminf(sample.min_p, 1.0f)));
    kept = mass < kept ? mass : kept;
  }
  const uint64_t number = SamplingNumber(sample.seed, sample.branch, sample.position);
  const uint64_t target = (kept >> 32) * number + ((kept & 0xffffffff) * number >> 32);
  return order.FindMass(target).token;
}

__device__ float Saturate(float logit) { return fminf(fmaxf(logit, -FLT_MAX), FLT_MAX); }

// The sample's logits after penalties, in `out`.
__device__ void Penalize(const HeadAndSampleParams& params, const SampleRow& sample,
                         const float* logits, float* out) {
  const int32_t* counts = nullptr;
  const uint8_t* in_prompt = nullptr;
  if (sample.penalty_slot >= 0 && sample.penalty_slot < params.penalties.num_slots) {
    const int64_t offset = int64_t{sample.penalty_slot} * params.vocab_size;
    counts = params.penalties.output_counts + offset;
    in_prompt = params.penalties.in_prompt + offset;
  }
  for (int32_t i = threadIdx.x; i < params.vocab_size; i += kThreads) {
    float logit = logits[i];
    if (counts != nullptr) {
      const int32_t count = counts[i];
      if (count > 0 || in_prompt[i] != 0) {
        logit = Saturate(logit > 0 ? logit / sample.repetition_penalty
                                   : logit * sample.repetition_penalty);
      }
      if (count > 0) {
        logit = Saturate(logit - sample.frequency_penalty * static_cast<float>(count));
        logit = Saturate(logit - sample.presence_penalty);
      }
    }
    out[i] = logit;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < sample.num_banned; i += kThreads) {
    const int32_t token = sample.banned[i];
    if (token >= 0 && token < params.vocab_size) out[token] = -INFINITY;
  }
  __syncthreads();
}

__device__ void FillLogprobs(const float* logits, int32_t vocab_size, float max, int32_t token,
                             int32_t num_logprobs, Shared& shared, SampleResult* result) {
  double sum = 0;
  for (int32_t i = threadIdx.x; i < vocab_size; i += kThreads) {
    sum += static_cast<double>(Exp(logits[i] - max));
  }
  const double log_sum = max + log(BlockSum(sum, shared.sums));
  if (threadIdx.x == 0) result->logprob = static_cast<float>(logits[token] - log_sum);
  uint64_t key = ~uint64_t{0};
  for (int32_t i = 0; i < num_logprobs; ++i) {
    if (key != 0) key = BestKeyBelow(logits, vocab_size, key, shared);
    if (threadIdx.x != 0) continue;
    const int32_t id = key == 0 ? -1 : TokenOf(key);
    result->top_ids[i] = id;
    result->top_logprobs[i] = id < 0 ? -INFINITY : static_cast<float>(logits[id] - log_sum);
  }
}

// One block a sample.
__global__ void __launch_bounds__(kThreads)
    SampleKernel(HeadAndSampleParams params, const float* all_logits, float* all_penalized,
                 Fault* fault) {
  __shared__ Shared shared;
  const int32_t index = static_cast<int32_t>(blockIdx.x);
  const int32_t vocab_size = params.vocab_size;
  const SampleRow& sample = params.samples[index];
  const float* raw = all_logits + int64_t{index} * vocab_size;
  SampleResult* result = &params.results[index];
  if (threadIdx.x == 0) *result = SampleResult();

  if (!IsValid(sample) || sample.row < 0) {
    if (threadIdx.x == 0) NoteFault(fault, FaultKind::kBadSample, index, sample.row);
    return;
  }
  const auto give_up = [&] {
    if (threadIdx.x == 0) result->token_id = kNoToken;
  };
  const LogitRange range = FindRange(raw, vocab_size, shared);
  if (!range.all_valid || range.max == -INFINITY) return give_up();

  const float* logits = raw;
  float max = range.max;
  if (sample.penalty_slot >= 0 || sample.num_banned > 0) {
    float* penalized = all_penalized + int64_t{index} * vocab_size;
    Penalize(params, sample, raw, penalized);
    const LogitRange changed = FindRange(penalized, vocab_size, shared);
    if (!changed.all_valid || changed.max == -INFINITY) return give_up();
    logits = penalized;
    max = changed.max;
  }
  const int32_t token = sample.temperature == 0
                            ? TokenOf(BestKeyBelow(logits, vocab_size, ~uint64_t{0}, shared))
                            : Draw(logits, vocab_size, max, sample, shared);
  if (threadIdx.x == 0) result->token_id = token;
  if (sample.num_logprobs >= 0) {
    FillLogprobs(raw, vocab_size, range.max, token, sample.num_logprobs, shared, result);
  }
}

}  // namespace

absl::Status SampleTokens(const Launcher& launcher, const HeadAndSampleParams& params,
                          const float* logits, float* penalized) {
  return Launch(launcher, "sample", SampleKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_samples)), .threads = kThreads},
                params, logits, penalized, launcher.device.fault);
}

}  // namespace kernels::cuda
