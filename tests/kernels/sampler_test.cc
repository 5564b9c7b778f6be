#include "kernels/cpu/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/logit_scan.h"
#include "kernels/philox.h"
#include "tests/kernels/random_tensor.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

SampleResult Sample(const std::vector<float>& logits, const SampleRow& sample,
                    const TokenHistory& history = {}) {
  SampleResult result;
  const absl::Status status = SampleToken(logits, sample, history, &result);
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

absl::Status Fail(const std::vector<float>& logits, const SampleRow& sample) {
  SampleResult result;
  return SampleToken(logits, sample, {}, &result);
}

// The contract in double and with a full sort.
struct Reference {
  std::vector<int32_t> ids;  // kept tokens in order
  std::vector<double> p;     // renormalised
  // Whether a boundary of a filter is so close that float32 may decide otherwise.
  bool ambiguous = false;

  Reference(const std::vector<float>& logits, const SampleRow& sample) {
    ids.resize(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    double sum = 0;
    for (const int32_t id : ids) {
      p.push_back(
          std::exp((static_cast<double>(logits[id]) - logits[ids[0]]) / sample.temperature));
      sum += p.back();
    }
    for (double& x : p) x /= sum;
    size_t kept = ids.size();
    if (sample.top_k > 0) kept = std::min<size_t>(kept, sample.top_k);
    double mass = 0;
    for (size_t i = 0; i < kept && sample.top_p < 1; ++i) {
      mass += p[i];
      ambiguous = ambiguous || std::abs(mass - sample.top_p) < 1e-6;
      if (mass >= sample.top_p) kept = i + 1;
    }
    for (size_t i = 0; i < kept; ++i) {
      ambiguous = ambiguous || std::abs(p[i] / p[0] - sample.min_p) < 1e-6 * sample.min_p;
      if (p[i] < sample.min_p * p[0]) kept = i;
    }
    ids.resize(kept);
    p.resize(kept);
    const double total = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= total;
  }

  // Whether the number u may fall on `token`, up to rounding.
  bool Allows(int32_t token, double u) const {
    double before = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] == token) return u > before - 2e-6 && u < before + p[i] + 2e-6;
      before += p[i];
    }
    return false;
  }
};

double UnitNumber(const SampleRow& sample) {
  return SamplingNumber(sample.seed, sample.branch, sample.position) * 0x1p-32;
}

TEST(SamplerTest, TemperatureZeroIsArgmaxAndTiesGoToTheLowerId) {
  SampleRow greedy;
  greedy.temperature = 0;
  EXPECT_EQ(Sample({1, 3, 2}, greedy).token_id, 1);
  EXPECT_EQ(Sample({-5, 7, 7, 7}, greedy).token_id, 1);
  EXPECT_EQ(Sample({0.0f, -0.0f}, greedy).token_id, 0);
  EXPECT_EQ(Sample({-kInfinity, -kInfinity, -1e30f}, greedy).token_id, 2);
  std::vector<float> logits = RandomTensor(5000, 3);
  logits[4321] = logits[1234] = 50;
  EXPECT_EQ(Sample(logits, greedy).token_id, 1234);
}

TEST(SamplerTest, DrawsWhatTheReferenceDraws) {
  std::mt19937 generator(5);
  int checked = 0;
  for (int round = 0; round < 3000; ++round) {
    const size_t sizes[] = {1, 2, 7, 50, 257, 1000};
    std::vector<float> logits =
        RandomTensor(sizes[round % 6], round, std::ldexp(1.0f, static_cast<int>(generator() % 5)));
    if (round % 7 == 0) {  // ties
      for (float& logit : logits) logit = std::round(logit);
    }
    if (round % 11 == 0) logits[generator() % logits.size()] = -kInfinity;
    if (*std::max_element(logits.begin(), logits.end()) == -kInfinity) continue;
    SampleRow sample;
    sample.temperature = std::ldexp(1.0f, static_cast<int>(generator() % 6) - 3) * 1.1f;
    if (generator() % 2 == 0) sample.top_k = static_cast<int32_t>(generator() % 60);
    if (generator() % 2 == 0) sample.top_p = static_cast<float>(generator() % 1000) / 1000;
    if (generator() % 2 == 0) sample.min_p = static_cast<float>(generator() % 1000) / 2000;
    sample.seed = generator();
    sample.branch = generator() % 3;
    sample.position = round;
    const Reference reference(logits, sample);
    if (reference.ambiguous) continue;
    ++checked;
    const int32_t token = Sample(logits, sample).token_id;
    ASSERT_TRUE(reference.Allows(token, UnitNumber(sample)))
        << "round " << round << " token " << token << " u " << UnitNumber(sample) << " top_k "
        << sample.top_k << " top_p " << sample.top_p << " min_p " << sample.min_p << " kept "
        << reference.ids.size() << " of " << logits.size();
  }
  EXPECT_GT(checked, 2500);
}

TEST(SamplerTest, EqualLogitsOfALargeVocabularyAreDrawnUniformlyInIdOrder) {
  const std::vector<float> logits(129280, 1.5f);
  for (uint32_t position = 0; position < 20; ++position) {
    SampleRow sample;
    sample.seed = 99;
    sample.position = position;
    EXPECT_EQ(Sample(logits, sample).token_id, static_cast<int32_t>(UnitNumber(sample) * 129280));
    sample.top_p = 0.25f;
    EXPECT_EQ(Sample(logits, sample).token_id,
              static_cast<int32_t>(UnitNumber(sample) * 129280 / 4));
    sample.top_k = 1000;
    EXPECT_EQ(Sample(logits, sample).token_id, static_cast<int32_t>(UnitNumber(sample) * 1000));
  }
}

// Pearson's statistic of `draws` tokens against the reference's probabilities.
double ChiSquare(const std::vector<int64_t>& counts, const Reference& reference, int64_t draws) {
  double statistic = 0;
  int64_t drawn = 0;
  for (size_t i = 0; i < reference.ids.size(); ++i) {
    const double expected = reference.p[i] * static_cast<double>(draws);
    const double seen = static_cast<double>(counts[reference.ids[i]]);
    statistic += (seen - expected) * (seen - expected) / expected;
    drawn += counts[reference.ids[i]];
  }
  EXPECT_EQ(drawn, draws);  // nothing outside the kept set
  return statistic;
}

TEST(SamplerTest, TheDrawFollowsTheDistribution) {
  const std::vector<float> logits = RandomTensor(24, 8);
  SampleRow plain, filtered;
  plain.temperature = 0.8f;
  filtered.temperature = 1.3f;
  filtered.top_k = 17;
  filtered.top_p = 0.9f;
  for (const SampleRow& base : {plain, filtered}) {
    const Reference reference(logits, base);
    const int64_t draws = 40000;
    // Over positions of a sequence, over seeds, and over branches.
    for (int kind = 0; kind < 3; ++kind) {
      std::vector<int64_t> counts(logits.size(), 0);
      for (int64_t i = 0; i < draws; ++i) {
        SampleRow sample = base;
        sample.seed = kind == 1 ? i : 17;
        sample.position = kind == 0 ? i : 5;
        sample.branch = kind == 2 ? i : 0;
        ++counts[Sample(logits, sample).token_id];
      }
      // Of chi-square with k degrees of freedom: mean k, deviation sqrt(2k); 4 deviations above is
      // about 1 in 2000 for a right sampler, and the numbers are fixed.
      const double degrees = static_cast<double>(reference.ids.size()) - 1;
      EXPECT_LT(ChiSquare(counts, reference, draws), degrees + 4 * std::sqrt(2 * degrees));
    }
  }
}

TEST(SamplerTest, FiltersAtTheirEnds) {
  const std::vector<float> logits = {0.1f, 2.0f, 2.0f, -1.0f, 1.0f};
  for (uint32_t position = 0; position < 200; ++position) {
    SampleRow sample;
    sample.position = position;
    sample.temperature = 5;
    SampleRow s = sample;
    s.top_k = 1;
    EXPECT_EQ(Sample(logits, s).token_id, 1);
    s = sample;
    s.top_p = 1e-9f;
    EXPECT_EQ(Sample(logits, s).token_id, 1);
    s.top_p = 0;
    EXPECT_EQ(Sample(logits, s).token_id, 1);
    s = sample;
    s.min_p = 1;
    EXPECT_THAT(Sample(logits, s).token_id, ::testing::AnyOf(1, 2));
    s = sample;
    s.top_k = 1000;  // more than there are
    EXPECT_EQ(Sample(logits, s).token_id, Sample(logits, sample).token_id);
    s.top_k = 5;
    s.top_p = 1;
    EXPECT_EQ(Sample(logits, s).token_id, Sample(logits, sample).token_id);
    s = sample;
    s.temperature = 1e-30f;
    EXPECT_THAT(Sample(logits, s).token_id, ::testing::AnyOf(1, 2));
    s = sample;
    s.temperature = 1e-45f;  // its inverse is infinite
    EXPECT_THAT(Sample(logits, s).token_id, ::testing::AnyOf(1, 2));
    EXPECT_EQ(Sample({-kInfinity, -kInfinity, -3, -kInfinity}, sample).token_id, 2);
    EXPECT_EQ(Sample({5}, sample).token_id, 0);
  }
}

TEST(SamplerTest, PenaltiesChangeLogitsAsTheContractSays) {
  // Greedy choice shows the penalised maximum; tokens 0..5.
  const std::vector<int32_t> counts = {0, 2, 0, 1, 0, 0};
  const std::vector<uint8_t> in_prompt = {1, 0, 0, 1, 0, 0};
  const TokenHistory history{counts.data(), in_prompt.data()};
  SampleRow sample;
  sample.temperature = 0;
  const auto choice = [&](std::vector<float> logits) {
    return Sample(logits, sample, history).token_id;
  };
  sample.repetition_penalty = 2;
  // Seen tokens 0, 1, 3: 4 / 2 = 2, -1 * 2 = -2.
  EXPECT_EQ(choice({4, 0, 2.1f, 0, 0, 0}), 2);
  EXPECT_EQ(choice({4, 0, 1.9f, 0, 0, 0}), 0);
  EXPECT_EQ(choice({-1, -9, -1.9f, -9, -9, -9}), 2);
  EXPECT_EQ(choice({-1, -9, -2.1f, -9, -9, -9}), 0);
  sample.repetition_penalty = 1;
  sample.frequency_penalty = 0.5f;  // token 1 said twice: -1; token 0 only in the prompt: nothing
  EXPECT_EQ(choice({0, 3, 2.1f, 0, 0, 0}), 2);
  EXPECT_EQ(choice({0, 3, 1.9f, 0, 0, 0}), 1);
  EXPECT_EQ(choice({3, 0, 2.9f, 0, 0, 0}), 0);
  sample.frequency_penalty = 0;
  sample.presence_penalty = 0.5f;  // once, however often said
  EXPECT_EQ(choice({0, 3, 2.6f, 0, 0, 0}), 2);
  EXPECT_EQ(choice({0, 3, 2.4f, 0, 0, 0}), 1);
  sample.repetition_penalty = 2;  // repetition first: 4 / 2 - 0.5
  EXPECT_EQ(choice({0, 4, 1.6f, 0, 0, 0}), 2);
  EXPECT_EQ(choice({0, 4, 1.4f, 0, 0, 0}), 1);
  // Negative penalties raise.
  sample.repetition_penalty = 1;
  sample.presence_penalty = -1;
  EXPECT_EQ(choice({0, 1, 1.9f, 0, 0, 0}), 1);
  // Without a history there is nothing to penalise.
  sample.repetition_penalty = 100;
  EXPECT_EQ(Sample({1, 5, 2}, sample).token_id, 1);
}

TEST(SamplerTest, PenaltiesBeyondFloatsSaturate) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const std::vector<int32_t> counts = {3, 0, 1};
  const std::vector<uint8_t> in_prompt = {1, 0, 1};
  const TokenHistory history{counts.data(), in_prompt.data()};
  for (const float temperature : {0.0f, 1e-45f, 1.0f}) {
    SampleRow sample;
    sample.temperature = temperature;
    sample.repetition_penalty = 1e-45f;  // the seen tokens' logits pass the largest float
    EXPECT_THAT(Sample({5, 50, 4}, sample, history).token_id, ::testing::AnyOf(0, 2));
    sample.top_p = 0.5f;
    sample.min_p = 0.5f;
    EXPECT_THAT(Sample({5, 50, 4}, sample, history).token_id, ::testing::AnyOf(0, 2));
    sample.frequency_penalty = kLargest;  // and back
    sample.presence_penalty = kLargest;
    Sample({5, 50, 4}, sample, history);
    sample.repetition_penalty = kLargest;
    Sample({-5, -50, -4}, sample, history);
  }
}

TEST(SamplerTest, BannedTokensAreNeverDrawn) {
  const std::vector<float> logits = {3, 2, 1, 0};
  SampleRow sample;
  sample.num_banned = 4;
  sample.banned[0] = 0;
  sample.banned[1] = 2;
  sample.banned[2] = 1 << 20;  // outside the vocabulary: never looked up
  sample.banned[3] = -1;
  for (uint32_t position = 0; position < 300; ++position) {
    sample.position = position;
    sample.temperature = 2;
    EXPECT_THAT(Sample(logits, sample).token_id, ::testing::AnyOf(1, 3));
    sample.temperature = 0;
    EXPECT_EQ(Sample(logits, sample).token_id, 1);
  }
}

TEST(SamplerTest, LogprobsAreOfTheModelsOwnDistribution) {
  for (const size_t vocab : {1, 5, 1000, 102400}) {
    SCOPED_TRACE(vocab);
    const std::vector<float> logits = RandomTensor(vocab, 4, 3);
    std::vector<int32_t> order(vocab);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    double sum = 0;
    for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
    const std::vector<int32_t> counts(vocab, 1);
    const std::vector<uint8_t> in_prompt(vocab, 0);
    SampleRow sample;  // none of these may show in the log-probabilities
    sample.temperature = 0.5f;
    sample.top_k = 3;
    sample.presence_penalty = 1.5f;
    sample.num_banned = vocab > 1 ? 1 : 0;
    sample.banned[0] = order[0];
    sample.num_logprobs = kMaxLogprobs;
    const SampleResult result = Sample(logits, sample, {counts.data(), in_prompt.data()});
    EXPECT_NEAR(result.logprob, logits[result.token_id] - std::log(sum), 2e-6);
    for (size_t i = 0; i < kMaxLogprobs; ++i) {
      if (i < vocab) {
        EXPECT_EQ(result.top_ids[i], order[i]);
        EXPECT_NEAR(result.top_logprobs[i], logits[order[i]] - std::log(sum), 2e-6);
      } else {
        EXPECT_EQ(result.top_ids[i], -1);
        EXPECT_EQ(result.top_logprobs[i], -kInfinity);
      }
    }
  }
}

TEST(SamplerTest, EqualAlternativesComeInIdOrder) {
  SampleRow sample;
  sample.temperature = 0;
  sample.num_logprobs = 4;
  const SampleResult result = Sample({1, 2, 2, 0, 2, 1}, sample);
  EXPECT_THAT(absl::MakeConstSpan(result.top_ids, 4), ::testing::ElementsAre(1, 2, 4, 0));
  sample.num_logprobs = 0;
  EXPECT_NEAR(Sample({0, 0, 0, 0}, sample).logprob, -std::log(4.0), 1e-6);
}

TEST(SamplerTest, LargeLogitsDoNotOverflow) {
  SampleRow sample;
  sample.num_logprobs = 2;
  const SampleResult result = Sample({30000, 29999, -30000}, sample);
  EXPECT_NEAR(result.top_logprobs[0], -std::log1p(std::exp(-1.0)), 1e-2);  // 30000 has 2^-9 left
  EXPECT_LT(result.token_id, 2);
}

TEST(SamplerTest, LogitsThatAreNoNumbersAreAnError) {
  const SampleRow sample;
  for (const std::vector<float>& logits :
       {std::vector<float>{0, kNan, 1}, {kInfinity, 0}, {-kInfinity, -kInfinity}}) {
    EXPECT_EQ(Fail(logits, sample).code(), absl::StatusCode::kInternal);
  }
  for (size_t place = 0; place < 37; ++place) {  // wherever it stands
    std::vector<float> logits(37, 0.5f);
    logits[place] = kNan;
    EXPECT_EQ(Fail(logits, sample).code(), absl::StatusCode::kInternal);
  }
  SampleRow banned;
  banned.num_banned = 2;
  banned.banned[1] = 1;
  EXPECT_THAT(Fail({1, 2}, banned).ToString(), HasSubstr("leave no token"));
}

TEST(SamplerTest, ParametersOutsideTheirRangeAreRefused) {
  const auto refused = [](auto change) {
    SampleRow sample;
    change(sample);
    EXPECT_EQ(Fail({1, 2}, sample).code(), absl::StatusCode::kInvalidArgument);
  };
  refused([](SampleRow& s) { s.temperature = -1; });
  refused([](SampleRow& s) { s.temperature = kNan; });
  refused([](SampleRow& s) { s.temperature = kInfinity; });
  refused([](SampleRow& s) { s.repetition_penalty = 0; });
  refused([](SampleRow& s) { s.top_k = -1; });
  refused([](SampleRow& s) { s.top_p = kNan; });
  refused([](SampleRow& s) { s.min_p = kNan; });
  refused([](SampleRow& s) { s.presence_penalty = kInfinity; });
  refused([](SampleRow& s) { s.num_logprobs = kMaxLogprobs + 1; });
  refused([](SampleRow& s) { s.num_banned = kMaxBannedTokens + 1; });
}

TEST(LogitScanTest, WeightsAndBucketsFollowTheLogits) {
  std::vector<float> logits;
  for (int i = 0; i < 20000; ++i) logits.push_back(-0.005f * static_cast<float>(i));
  logits.push_back(-1e30f);
  logits.push_back(-kInfinity);
  std::vector<float> weights(logits.size());
  std::vector<uint16_t> buckets(logits.size());
  for (const float temperature : {1.0f, 0.3f, 7.0f}) {
    Weigh(logits, 0, temperature, weights.data(), buckets.data());
    EXPECT_EQ(weights[0], 1.0f);
    EXPECT_EQ(buckets[0], 0);
    EXPECT_EQ(weights.back(), 0.0f);
    EXPECT_EQ(buckets.back(), kNumBuckets - 1);
    for (size_t i = 1; i < logits.size(); ++i) {
      ASSERT_GE(buckets[i], buckets[i - 1]);
      const double exact = std::exp(static_cast<double>(logits[i]) / temperature);
      // 1 ulp of exp and the rounding of the quotient, which is at most 88.
      ASSERT_NEAR(weights[i], exact, exact * 6e-6 + 1.2e-38) << logits[i];
    }
  }
}

}  // namespace
}  // namespace kernels::cpu
