#include "kernels/cpu/head_and_sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/linear.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kHidden = 40;
constexpr int32_t kVocab = 300;
constexpr int32_t kRows = 90;
constexpr int32_t kSlots = 3;
constexpr int64_t kStride = kHidden + 3;

class HeadAndSampleTest : public ::testing::Test {
 protected:
  HeadAndSampleTest() {
    hidden_ = RandomTensor(kRows * kStride, 1);
    norm_weight_ = RandomTensor(kHidden, 2);
    weight_ = RandomTensor(kVocab * kHidden, 3);
    counts_.assign(kSlots * kVocab, 0);
    in_prompt_.assign(kSlots * kVocab, 0);
    auto packed =
        PackLinear(pool_, {WeightTensor{weight_.data(), DType::kFloat32, kVocab, kHidden}});
    EXPECT_TRUE(packed.ok()) << packed.status();
    head_ = std::move(*packed);
  }

  HeadAndSampleParams Params(const std::vector<SampleRow>& samples) {
    results_.assign(samples.size(), SampleResult());
    sampled_ids_.assign(samples.size(), -7);
    const int64_t bytes =
        HeadAndSampleWorkspaceBytes(static_cast<int32_t>(samples.size()), kHidden, kVocab);
    workspace_.assign(bytes / 64 + 2, Line());
    HeadAndSampleParams p;
    p.hidden = hidden_.data();
    p.hidden_row_stride = kStride;
    p.vocab_size = kVocab;
    p.norm_weight = norm_weight_.data();
    p.head = head_.get();
    p.samples = samples.data();
    p.num_samples = static_cast<int32_t>(samples.size());
    p.penalties = {counts_.data(), in_prompt_.data(), kSlots};
    p.results = results_.data();
    p.sampled_ids = sampled_ids_.data();
    p.workspace = reinterpret_cast<std::byte*>(workspace_.data());
    return p;
  }

  void Run(ThreadPool& pool, const HeadAndSampleParams& params) {
    const absl::Status status = HeadAndSample(pool, params);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(workspace_.back().bytes[0], std::byte{0x5a}) << "workspace overrun";
  }

  std::vector<double> Logits(int32_t row) const {
    const float* x = hidden_.data() + row * kStride;
    double sum = 0;
    for (int32_t i = 0; i < kHidden; ++i) sum += static_cast<double>(x[i]) * x[i];
    std::vector<double> logits(kVocab, 0.0);
    for (int32_t token = 0; token < kVocab; ++token) {
      for (int32_t i = 0; i < kHidden; ++i) {
        logits[token] += static_cast<double>(weight_[token * kHidden + i]) * x[i] /
                         std::sqrt(sum / kHidden + 1e-6) * norm_weight_[i];
      }
    }
    return logits;
  }
  int32_t Argmax(int32_t row) const {
    const std::vector<double> logits = Logits(row);
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }

  struct alignas(64) Line {
    std::byte bytes[64] = {std::byte{0x5a}};
  };
  ThreadPool pool_{2};
  std::vector<float> hidden_, norm_weight_, weight_;
  std::unique_ptr<PackedLinear> head_;
  std::vector<int32_t> counts_;
  std::vector<uint8_t> in_prompt_;
  std::vector<SampleResult> results_;
  std::vector<int32_t> sampled_ids_;
  std::vector<Line> workspace_;
};

TEST_F(HeadAndSampleTest, SamplesTheRowsItIsGiven) {
  std::vector<SampleRow> samples;
  for (const int32_t row : {7, 89, 0, 7, 31}) {
    samples.emplace_back();
    samples.back().row = row;
    samples.back().temperature = 0;
    samples.back().num_logprobs = 3;
  }
  Run(pool_, Params(samples));
  for (size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ(sampled_ids_[i], Argmax(samples[i].row));
    EXPECT_EQ(results_[i].token_id, sampled_ids_[i]);
    EXPECT_EQ(results_[i].top_ids[0], sampled_ids_[i]);
    double sum = 0;
    const std::vector<double> logits = Logits(samples[i].row);
    for (const double logit : logits) sum += std::exp(logit);
    EXPECT_NEAR(results_[i].logprob, logits[sampled_ids_[i]] - std::log(sum), 2e-5);
  }
}

TEST_F(HeadAndSampleTest, FullLogitsOnRequestAlsoWithoutSamples) {
  std::vector<int32_t> rows(kRows);  // more than are gathered at once
  for (int32_t i = 0; i < kRows; ++i) rows[i] = (i * 37) % kRows;
  std::vector<float> logits(kRows * kVocab + 1, -99.0f);
  std::vector<double> expected;
  for (const int32_t row : rows) {
    const std::vector<double> of_row = Logits(row);
    expected.insert(expected.end(), of_row.begin(), of_row.end());
  }
  for (const size_t num_samples : {0, 2}) {
    const std::vector<SampleRow> samples(num_samples);
    HeadAndSampleParams params = Params(samples);
    params.logit_rows = rows.data();
    params.num_logit_rows = kRows;
    params.logits = logits.data();
    Run(pool_, params);
    // Logits are sums of 40 products, largest about 30.
    EXPECT_TRUE(numerics::AllClose(absl::MakeConstSpan(logits).subspan(0, kRows * kVocab),
                                   absl::MakeConstSpan(expected), {.abs = 2e-5, .rel = 1e-5}));
    EXPECT_EQ(logits.back(), -99.0f);
  }
}

TEST_F(HeadAndSampleTest, BranchesShareARowAndDrawDifferently) {
  std::vector<SampleRow> samples(200);
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].row = 4;
    samples[i].temperature = 50;  // nearly flat
    samples[i].seed = 5;
    samples[i].branch = static_cast<uint32_t>(i);
  }
  Run(pool_, Params(samples));
  std::vector<int32_t> ids = sampled_ids_;
  std::sort(ids.begin(), ids.end());
  EXPECT_GT(std::unique(ids.begin(), ids.end()) - ids.begin(), 100);
}

TEST_F(HeadAndSampleTest, ASamplesTokenDoesNotDependOnItsBatchOrOnThreads) {
  std::vector<SampleRow> samples(64);
  for (size_t i = 0; i < samples.size(); ++i) {
    SampleRow& sample = samples[i];
    sample.row = static_cast<int32_t>(i * 13 % kRows);
    sample.temperature = 3;
    sample.top_p = i % 2 == 0 ? 0.95f : 1.0f;
    sample.top_k = i % 3 == 0 ? 40 : 0;
    sample.seed = i;
    sample.position = static_cast<uint32_t>(100 + i);
    sample.num_logprobs = 5;
  }
  Run(pool_, Params(samples));
  const std::vector<SampleResult> together = results_;
  ThreadPool single(1);
  for (size_t i = 0; i < samples.size(); ++i) {
    const std::vector<SampleRow> alone = {samples[i]};
    Run(single, Params(alone));
    EXPECT_EQ(std::memcmp(&results_[0], &together[i], sizeof(SampleResult)), 0);
  }
}

TEST_F(HeadAndSampleTest, CountsAreResetBeforeAndUpdatedAfter) {
  const int32_t best = Argmax(3);
  counts_.assign(counts_.size(), 77);
  in_prompt_.assign(in_prompt_.size(), 1);
  // Slot 1: prompt 5, 6, 6; output 9, best, 9, and ids that do not exist.
  const std::vector<int32_t> history = {-100, 5, 6, 6, 9, best, 9, -1, kVocab};
  const PenaltyReset reset{1, 1, 3, 5};
  std::vector<SampleRow> samples(3);
  samples[0].row = samples[1].row = samples[2].row = 3;
  for (SampleRow& sample : samples) sample.temperature = 0;
  samples[0].penalty_slot = 1;
  samples[0].presence_penalty = 1000;  // said before: not again
  samples[1].penalty_slot = 2;         // no penalty asked for, but counted
  HeadAndSampleParams params = Params(samples);
  params.penalty_resets = &reset;
  params.num_penalty_resets = 1;
  params.history_tokens = history.data();
  Run(pool_, params);
  EXPECT_NE(sampled_ids_[0], best);
  EXPECT_EQ(sampled_ids_[1], best);
  EXPECT_EQ(sampled_ids_[2], best);

  std::vector<int32_t> expected(kVocab, 0);
  expected[9] += 2;
  expected[best] += 1;
  expected[sampled_ids_[0]] += 1;
  std::vector<uint8_t> expected_prompt(kVocab, 0);
  expected_prompt[5] = expected_prompt[6] = 1;
  EXPECT_THAT(absl::MakeConstSpan(counts_).subspan(kVocab, kVocab),
              ::testing::ElementsAreArray(expected));
  EXPECT_THAT(absl::MakeConstSpan(in_prompt_).subspan(kVocab, kVocab),
              ::testing::ElementsAreArray(expected_prompt));
  EXPECT_THAT(absl::MakeConstSpan(counts_).subspan(0, kVocab), ::testing::Each(77));
  EXPECT_EQ(counts_[2 * kVocab + best], 78);
}

TEST_F(HeadAndSampleTest, ARowThatIsNoNumberGetsNoTokenAndTheOthersTheirs) {
  std::vector<SampleRow> samples(3);
  for (SampleRow& sample : samples) sample = {.row = 9, .temperature = 0, .penalty_slot = 0};
  Run(pool_, Params(samples));
  const int32_t token = results_[0].token_id;
  std::fill(counts_.begin(), counts_.end(), 0);

  hidden_[8 * kStride + 5] = std::numeric_limits<float>::quiet_NaN();
  samples[1].row = 8;
  Run(pool_, Params(samples));
  EXPECT_EQ(results_[0].token_id, token);
  EXPECT_EQ(results_[1].token_id, kNoToken);
  EXPECT_EQ(results_[2].token_id, token);
  EXPECT_THAT(sampled_ids_, ::testing::ElementsAre(token, 0, token));
  EXPECT_EQ(counts_[token], 2);
  EXPECT_EQ(std::accumulate(counts_.begin(), counts_.end(), 0), 2);
  // Poison in rows that nobody asked for does not matter.
  samples[1].row = 9;
  Run(pool_, Params(samples));
  EXPECT_EQ(results_[1].token_id, token);
}

TEST_F(HeadAndSampleTest, RefusesWhatCannotBe) {
  std::vector<SampleRow> samples(2);
  const auto refused = [&](auto change) {
    HeadAndSampleParams params = Params(samples);
    change(params);
    EXPECT_EQ(HeadAndSample(pool_, params).code(), absl::StatusCode::kInvalidArgument);
  };
  refused([](HeadAndSampleParams& p) { p.num_samples = -1; });
  refused([](HeadAndSampleParams& p) { p.vocab_size = kVocab - 1; });
  refused([](HeadAndSampleParams& p) { p.hidden_row_stride = kHidden - 1; });
  refused([](HeadAndSampleParams& p) { p.head = nullptr; });
  refused([](HeadAndSampleParams& p) { p.num_logit_rows = 1; });
  const PenaltyReset bad_slot{kSlots, 0, 0, 0};
  refused([&](HeadAndSampleParams& p) { p.penalty_resets = &bad_slot, p.num_penalty_resets = 1; });
  samples[1].row = -1;
  refused([](HeadAndSampleParams&) {});
  samples[1].row = 0;
  samples[1].penalty_slot = kSlots;
  refused([](HeadAndSampleParams&) {});
  samples[1].penalty_slot = -1;
  samples[1].temperature = -1;
  refused([](HeadAndSampleParams&) {});
}

}  // namespace
}  // namespace kernels::cpu
