#include "kernels/cpu/logit_scan.h"

#include <bit>
#include <cmath>
#include <limits>

namespace kernels::cpu {
namespace {

#define FERRY_INLINE inline __attribute__((always_inline))

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 1024;  // floats added up before a sum moves on to double

// exp of x <= 0 to about 1 ulp; 0 below the smallest normal number.  No branches, so that the
// compiler turns loops over it into vector instructions.
FERRY_INLINE float Exp(float x) {
  const float lowest = -87.33654f;
  const float clamped = x < lowest ? lowest : x;
  // Adding and taking away 1.5 * 2^23 rounds to an integer.
  const float round = 12582912.0f;
  const float n = (clamped * 1.44269504f + round) - round;
  // ln 2 in two parts, the first short enough for exact products.
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
  return p * std::bit_cast<float>(x < lowest ? 0 : power);
}

FERRY_INLINE LogitRange FindRangeBody(const float* logits, int64_t count) {
  float lanes[8];
  int32_t invalid[8] = {};
  for (float& lane : lanes) lane = -kInfinity;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      const float x = logits[i + lane];
      lanes[lane] = x > lanes[lane] ? x : lanes[lane];
      invalid[lane] |= !(x < kInfinity);
    }
  }
  for (; i < count; ++i) {
    lanes[0] = logits[i] > lanes[0] ? logits[i] : lanes[0];
    invalid[0] |= !(logits[i] < kInfinity);
  }
  LogitRange range{-kInfinity, true};
  for (int lane = 0; lane < 8; ++lane) {
    range.max = lanes[lane] > range.max ? lanes[lane] : range.max;
    range.all_valid = range.all_valid && invalid[lane] == 0;
  }
  return range;
}

FERRY_INLINE double SumExpBody(const float* logits, int64_t count, float max) {
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = begin + kBlock < count ? kBlock : count - begin;
    float values[kBlock];
    for (int64_t i = 0; i < size; ++i) values[i] = Exp(logits[begin + i] - max);
    for (int64_t i = size; i % 8 != 0; ++i) values[i] = 0;
    float lanes[8] = {};
    for (int64_t i = 0; i < size; i += 8) {
      for (int lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane];
    }
    for (const float lane : lanes) sum += lane;
  }
  return sum;
}

FERRY_INLINE void WeighBody(const float* logits, int64_t count, float max, float temperature,
                            float* weights, uint16_t* buckets) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = (logits[i] - max) / temperature;
    weights[i] = Exp(x);
    const float scaled = x * -kBucketsPerUnit;
    buckets[i] = static_cast<uint16_t>(
        static_cast<int32_t>(scaled < kNumBuckets - 1 ? scaled : kNumBuckets - 1));
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
#define FERRY_AVX2 __attribute__((target("avx2,fma")))

bool HasAvx2() {
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return supported;
}
#else
#define FERRY_AVX2

bool HasAvx2() { return false; }
#endif

FERRY_AVX2 LogitRange FindRangeAvx2(const float* logits, int64_t count) {
  return FindRangeBody(logits, count);
}
FERRY_AVX2 double SumExpAvx2(const float* logits, int64_t count, float max) {
  return SumExpBody(logits, count, max);
}
FERRY_AVX2 void WeighAvx2(const float* logits, int64_t count, float max, float temperature,
                          float* weights, uint16_t* buckets) {
  WeighBody(logits, count, max, temperature, weights, buckets);
}

}  // namespace

LogitRange FindRange(absl::Span<const float> logits) {
  const int64_t count = static_cast<int64_t>(logits.size());
  return HasAvx2() ? FindRangeAvx2(logits.data(), count) : FindRangeBody(logits.data(), count);
}

int32_t FindFirst(absl::Span<const float> logits, float value) {
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] == value) return static_cast<int32_t>(i);
  }
  return -1;
}

double LogSumExp(absl::Span<const float> logits, float max) {
  const int64_t count = static_cast<int64_t>(logits.size());
  const double sum =
      HasAvx2() ? SumExpAvx2(logits.data(), count, max) : SumExpBody(logits.data(), count, max);
  return max + std::log(sum);
}

void Weigh(absl::Span<const float> logits, float max, float temperature, float* weights,
           uint16_t* buckets) {
  const int64_t count = static_cast<int64_t>(logits.size());
  if (HasAvx2()) {
    WeighAvx2(logits.data(), count, max, temperature, weights, buckets);
  } else {
    WeighBody(logits.data(), count, max, temperature, weights, buckets);
  }
}

}  // namespace kernels::cpu
