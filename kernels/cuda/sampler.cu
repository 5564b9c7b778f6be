#include "kernels/cuda/sampler.h"

#include <cfloat>

#include "kernels/cuda/descending_order.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sample_cluster.cuh"
#include "kernels/philox.h"

namespace kernels::cuda {
namespace {

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
__device__ uint64_t Draw(const Logits& logits, int32_t vocab_size, float max,
                         const SampleRow& sample, Cluster& cluster, OrderShared& shared) {
  DescendingOrder order(logits, max, sample.temperature, cluster, shared);
  uint64_t kept = order.total_mass();
  if (sample.top_k > 0 && sample.top_k < vocab_size) {
    kept = order.MassOfFirst(static_cast<uint64_t>(sample.top_k));
  }
  if (sample.top_p < 1) {
    const double wanted = ceil(sample.top_p * static_cast<double>(order.total_mass()));
    const uint64_t needed = wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
    if (needed < kept) {
      const DescendingOrder::Place last = order.FindMass(needed - 1);
      kept = last.mass_before + order.Mass(LogitOf(last.key));
    }
  }
  if (sample.min_p > 0) {
    const uint64_t mass =
        order.MassAtLeast(max + sample.temperature * logf(fminf(sample.min_p, 1.0f)));
    kept = mass < kept ? mass : kept;
  }
  const uint64_t number = SamplingNumber(sample.seed, sample.branch, sample.position);
  const uint64_t target = (kept >> 32) * number + ((kept & 0xffffffff) * number >> 32);
  return order.FindMass(target).key;
}

__device__ float Saturate(float logit) { return fminf(fmaxf(logit, -FLT_MAX), FLT_MAX); }

// The block's slice of the sample's logits after penalties, in `out`.
__device__ void Penalize(const HeadAndSampleParams& params, const SampleRow& sample,
                         const Logits& logits, float* out) {
  const int32_t* counts = nullptr;
  const uint8_t* in_prompt = nullptr;
  if (sample.penalty_slot >= 0 && sample.penalty_slot < params.penalties.num_slots) {
    const int64_t offset = int64_t{sample.penalty_slot} * params.vocab_size;
    counts = params.penalties.output_counts + offset;
    in_prompt = params.penalties.in_prompt + offset;
  }
  ForEach(logits, [&](int32_t i, float logit) {
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
  });
  __syncthreads();
  for (int32_t i = threadIdx.x; i < sample.num_banned; i += kSampleThreads) {
    const int32_t token = sample.banned[i];
    if (token >= logits.begin && token < logits.end) out[token] = -INFINITY;
  }
  __syncthreads();
}

// `writes`: this thread is the one that fills the result.
__device__ void FillLogprobs(const Logits& logits, float max, int32_t token, int32_t num_logprobs,
                             Cluster& cluster, bool writes, SampleResult* result) {
  double sum = 0;
  ForEach(logits, [&](int32_t, float logit) { sum += static_cast<double>(Exp(logit - max)); });
  const double log_sum = max + log(cluster.Sum(sum));
  if (writes) result->logprob = static_cast<float>(logits.row[token] - log_sum);
  uint64_t key = kNoKey;
  for (int32_t i = 0; i < num_logprobs; ++i) {
    if (key != 0) key = BestKeyBelow(logits, key, cluster);
    if (!writes) continue;
    result->top_ids[i] = key == 0 ? -1 : TokenOf(key);
    result->top_logprobs[i] = key == 0 ? -INFINITY : static_cast<float>(LogitOf(key) - log_sum);
  }
}

__device__ void Sample(const HeadAndSampleParams& params, int32_t index, const float* row,
                       float* penalized, Fault* fault, Cluster& cluster, OrderShared& shared) {
  const int32_t vocab_size = params.vocab_size;
  const SampleRow& sample = params.samples[index];
  const bool writes = cluster.rank() == 0 && threadIdx.x == 0;
  SampleResult* result = &params.results[index];
  if (writes) *result = SampleResult();
  if (!IsValid(sample) || sample.row < 0) {
    if (writes) NoteFault(fault, FaultKind::kBadSample, index, sample.row);
    return;
  }
  const int32_t slice = CeilDiv(vocab_size, kSampleBlocks);
  const int32_t begin = min(cluster.rank() * slice, vocab_size);
  const Logits raw{row, begin, min(begin + slice, vocab_size)};
  Logits logits = raw;
  const uint64_t best_raw = BestKey(raw, cluster);
  uint64_t best = best_raw;
  if (best != kNoKey && (sample.penalty_slot >= 0 || sample.num_banned > 0)) {
    Penalize(params, sample, raw, penalized);
    logits.row = penalized;
    best = BestKey(logits, cluster);
  }
  if (best == kNoKey) {
    if (writes) result->token_id = kNoToken;
    return;
  }
  const uint64_t key = sample.temperature == 0
                           ? best
                           : Draw(logits, vocab_size, LogitOf(best), sample, cluster, shared);
  if (writes) result->token_id = TokenOf(key);
  if (sample.num_logprobs >= 0) {
    FillLogprobs(raw, LogitOf(best_raw), TokenOf(key), sample.num_logprobs, cluster, writes,
                 result);
  }
}

// A cluster a sample.
__global__ void __cluster_dims__(kSampleBlocks) __launch_bounds__(kSampleThreads, 2)
    SampleKernel(const __grid_constant__ HeadAndSampleParams params, const float* logits,
                 float* penalized, Fault* fault) {
  __shared__ ReduceShared reduce;
  __shared__ OrderShared shared;
  Cluster cluster(reduce);
  WaitForPrevious();
  const auto index = static_cast<int32_t>(blockIdx.x) / kSampleBlocks;
  const int64_t offset = int64_t{index} * params.vocab_size;
  Sample(params, index, logits + offset, penalized + offset, fault, cluster, shared);
  cluster.Sync();
}

}  // namespace

absl::Status SampleTokens(const Launcher& launcher, const HeadAndSampleParams& params,
                          const float* logits, float* penalized) {
  return Launch(launcher, "sample", SampleKernel,
                {.grid = dim3(static_cast<uint32_t>(params.num_samples * kSampleBlocks)),
                 .threads = kSampleThreads,
                 .early = true},
                params, logits, penalized, launcher.device.fault);
}

}  // namespace kernels::cuda
