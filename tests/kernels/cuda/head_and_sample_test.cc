#include "kernels/head_and_sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kHidden = 40;
constexpr int32_t kVocab = 3000;
constexpr int32_t kRows = 90;
constexpr int32_t kSlots = 3;
constexpr int64_t kStride = kHidden + 3;

class CudaHeadAndSampleTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (device_ == nullptr) return;
    // Rows with two elements: both backends add the same two products in the same order and so
    // sample from the same logits.  Coarse weights make ties.
    hidden_ = std::vector<float>(kRows * kStride, 0.0f);
    for (int32_t row = 0; row < kRows; ++row) {
      hidden_[row * kStride + row % kHidden] = 2;
      hidden_[row * kStride + (row * 7 + 3) % kHidden] = -1;
    }
    weight_ = RandomTensor(kVocab * kHidden, 3);
    for (float& x : weight_) x = std::round(x * 4) / 4;
    norm_weight_ = RandomTensor(kHidden, 2);
    counts_ = std::vector<int32_t>(kSlots * kVocab, 0);
    in_prompt_ = std::vector<uint8_t>(kSlots * kVocab, 0);
    const WeightTensor tensor{weight_.data(), DType::kFloat32, kVocab, kHidden};
    host_head_ = *host_->PackLinear({tensor});
    device_head_ = *device_->PackLinear({tensor});
  }

  struct Outcome {
    std::vector<SampleResult> results;
    std::vector<int32_t> sampled_ids;
    std::vector<int32_t> counts;
    std::vector<uint8_t> in_prompt;
    std::vector<float> logits;
  };

  HeadAndSampleParams Params(const std::vector<SampleRow>& samples,
                             const std::vector<PenaltyReset>& resets,
                             const std::vector<int32_t>& logit_rows) const {
    HeadAndSampleParams p;
    p.hidden_row_stride = kStride;
    p.vocab_size = kVocab;
    p.num_samples = static_cast<int32_t>(samples.size());
    p.num_penalty_resets = static_cast<int32_t>(resets.size());
    p.num_logit_rows = static_cast<int32_t>(logit_rows.size());
    p.penalties.num_slots = kSlots;
    return p;
  }

  Outcome RunOnHost(const std::vector<SampleRow>& samples,
                    const std::vector<PenaltyReset>& resets = {},
                    const std::vector<int32_t>& history = {},
                    const std::vector<int32_t>& logit_rows = {}) {
    Outcome outcome{std::vector<SampleResult>(samples.size()), std::vector<int32_t>(samples.size()),
                    counts_, in_prompt_, std::vector<float>(logit_rows.size() * kVocab)};
    HeadAndSampleParams p = Params(samples, resets, logit_rows);
    p.hidden = hidden_.data();
    p.norm_weight = norm_weight_.data();
    p.head = host_head_.get();
    p.samples = samples.data();
    p.penalty_resets = resets.data();
    p.history_tokens = history.data();
    p.penalties.output_counts = outcome.counts.data();
    p.penalties.in_prompt = outcome.in_prompt.data();
    p.results = outcome.results.data();
    p.sampled_ids = outcome.sampled_ids.data();
    p.logit_rows = logit_rows.data();
    p.logits = outcome.logits.data();
    std::vector<std::byte> workspace(
        host_->HeadAndSampleWorkspaceBytes(p.num_samples, kHidden, kVocab) + 64);
    p.workspace = workspace.data() + 64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64;
    const absl::Status status = host_->HeadAndSample({}, p);
    EXPECT_TRUE(status.ok()) << status;
    return outcome;
  }

  Outcome RunOnDevice(const std::vector<SampleRow>& samples,
                      const std::vector<PenaltyReset>& resets = {},
                      const std::vector<int32_t>& history = {},
                      const std::vector<int32_t>& logit_rows = {}) {
    HeadAndSampleParams p = Params(samples, resets, logit_rows);
    p.hidden = Upload(hidden_);
    p.norm_weight = Upload(norm_weight_);
    p.head = device_head_.get();
    p.samples = Upload(samples);
    p.penalty_resets = Upload(resets);
    p.history_tokens = Upload(history);
    p.penalties.output_counts = Upload(counts_);
    p.penalties.in_prompt = Upload(in_prompt_);
    p.results = Upload(std::vector<SampleResult>(samples.size()));
    p.sampled_ids = Upload(std::vector<int32_t>(samples.size(), -7));
    p.logit_rows = Upload(logit_rows);
    p.logits = Upload(std::vector<float>(logit_rows.size() * kVocab, kNan));
    p.workspace = Workspace(device_->HeadAndSampleWorkspaceBytes(p.num_samples, kHidden, kVocab));
    const absl::Status status = device_->HeadAndSample({}, p);
    EXPECT_TRUE(status.ok()) << status;
    return {Download(p.results, samples.size()), Download(p.sampled_ids, samples.size()),
            Download(p.penalties.output_counts, counts_.size()),
            Download(p.penalties.in_prompt, in_prompt_.size()),
            Download(p.logits, logit_rows.size() * kVocab)};
  }

  static void Compare(const Outcome& actual, const Outcome& expected) {
    EXPECT_EQ(actual.sampled_ids, expected.sampled_ids);
    EXPECT_EQ(actual.counts, expected.counts);
    EXPECT_EQ(actual.in_prompt, expected.in_prompt);
    for (size_t i = 0; i < expected.results.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "sample " << i);
      const SampleResult &a = actual.results[i], &e = expected.results[i];
      EXPECT_EQ(a.token_id, e.token_id);
      EXPECT_NEAR(a.logprob, e.logprob, 2e-5);
      for (int32_t n = 0; n < kMaxLogprobs; ++n) {
        EXPECT_EQ(a.top_ids[n], e.top_ids[n]);
        EXPECT_NEAR(a.top_logprobs[n], e.top_logprobs[n], 2e-5);
      }
    }
  }

  std::vector<float> hidden_, norm_weight_, weight_;
  std::unique_ptr<PackedLinear> host_head_, device_head_;
  std::vector<int32_t> counts_;
  std::vector<uint8_t> in_prompt_;
};

TEST_F(CudaHeadAndSampleTest, DrawsTheCpusTokens) {
  std::vector<SampleRow> samples;
  const float temperatures[] = {0, 0.2f, 1, 30, 1e4f};
  const int32_t top_ks[] = {0, 1, 40, kVocab};
  const float top_ps[] = {1, 0.9f, 0.1f};
  const float min_ps[] = {0, 0.05f};
  for (const float temperature : temperatures) {
    for (const int32_t top_k : top_ks) {
      for (const float top_p : top_ps) {
        for (const float min_p : min_ps) {
          SampleRow& sample = samples.emplace_back();
          sample.row = static_cast<int32_t>(samples.size() * 13 % kRows);
          sample.temperature = temperature;
          sample.top_k = top_k;
          sample.top_p = top_p;
          sample.min_p = min_p;
          sample.seed = samples.size() * 77;
          sample.branch = static_cast<uint32_t>(samples.size() % 3);
          sample.position = static_cast<uint32_t>(samples.size());
          sample.num_logprobs = static_cast<int32_t>(samples.size() % 5) - 1;
        }
      }
    }
  }
  samples[7].num_logprobs = kMaxLogprobs;
  const Outcome together = RunOnDevice(samples);
  Compare(together, RunOnHost(samples));
  // Alone as in the batch, and again.
  for (const size_t i : {size_t{3}, size_t{50}, samples.size() - 1}) {
    const Outcome alone = RunOnDevice({samples[i]});
    EXPECT_EQ(std::memcmp(&alone.results[0], &together.results[i], sizeof(SampleResult)), 0);
  }
}

TEST_F(CudaHeadAndSampleTest, PenaltiesResetsAndBansEqualTheCpu) {
  for (int32_t i = 0; i < kSlots * kVocab; ++i) {
    counts_[i] = i % 11 == 0 ? i % 4 : 0;
    in_prompt_[i] = i % 7 == 0;
  }
  // Slot 1: prompt 5, 6, 6; output 9, 20, 9, and ids that do not exist.
  const std::vector<int32_t> history = {-100, 5, 6, 6, 9, 20, 9, -1, kVocab};
  const std::vector<PenaltyReset> resets = {{1, 1, 3, 5}};
  std::vector<SampleRow> samples(40);
  for (size_t i = 0; i < samples.size(); ++i) {
    SampleRow& sample = samples[i];
    sample.row = static_cast<int32_t>(i * 7 % kRows);
    sample.temperature = i % 2 == 0 ? 0 : 5;
    sample.seed = i;
    sample.penalty_slot = static_cast<int32_t>(i % 4) - 1;
    sample.repetition_penalty = 1.3f;
    sample.presence_penalty = 0.5f;
    sample.frequency_penalty = 0.25f;
    sample.num_logprobs = 2;
    sample.num_banned = static_cast<int32_t>(i % 3);
    sample.banned[0] = static_cast<int32_t>(i * 31 % kVocab);
    sample.banned[1] = -1;  // ids that do not exist are no bans
  }
  Compare(RunOnDevice(samples, resets, history), RunOnHost(samples, resets, history));
}

TEST_F(CudaHeadAndSampleTest, FullLogitsOnRequest) {
  std::vector<int32_t> rows(kRows);  // more than are gathered at once
  for (int32_t i = 0; i < kRows; ++i) rows[i] = (i * 37) % kRows;
  for (const size_t num_samples : {0, 2}) {
    const std::vector<SampleRow> samples(num_samples);
    EXPECT_TRUE(numerics::AllClose(RunOnDevice(samples, {}, {}, rows).logits,
                                   RunOnHost(samples, {}, {}, rows).logits,
                                   {.abs = 2e-5, .rel = 1e-5}));
  }
}

TEST_F(CudaHeadAndSampleTest, ATieGoesToTheLowerIdAlsoOfZeros) {
  std::fill(weight_.begin(), weight_.end(), 0.0f);
  for (int32_t i = 0; i < kHidden; ++i) weight_[i] = -0.0f;  // token 0 has logit -0
  device_head_ =
      *device_->PackLinear({WeightTensor{weight_.data(), DType::kFloat32, kVocab, kHidden}});
  SampleRow sample;
  sample.temperature = 0;
  sample.num_logprobs = 3;
  const Outcome outcome = RunOnDevice({sample});
  EXPECT_EQ(outcome.sampled_ids[0], 0);
  EXPECT_EQ(outcome.results[0].top_ids[2], 2);
}

TEST_F(CudaHeadAndSampleTest, LogitsThatAreNotNumbersGiveNoTokenAndTheOthersTheirs) {
  std::vector<SampleRow> samples(3);
  for (int32_t i = 0; i < 3; ++i) samples[i] = {.row = i, .temperature = 0};
  const Outcome well = RunOnDevice(samples);
  hidden_[2 * kStride] = kNan;
  const Outcome outcome = RunOnDevice(samples);
  for (int32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(outcome.results[i].token_id, well.results[i].token_id);
    EXPECT_EQ(outcome.sampled_ids[i], well.sampled_ids[i]);
  }
  EXPECT_EQ(outcome.results[2].token_id, kNoToken);
  EXPECT_EQ(outcome.sampled_ids[2], 0);
}

}  // namespace
}  // namespace kernels
