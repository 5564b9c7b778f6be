// Every golden case of every fixture, prefilled at once and decoded in absorbed form.

#include <algorithm>
#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/network_runner.h"

namespace model {
namespace {

class GoldenTest : public ::testing::TestWithParam<const char*> {};

int32_t Argmax(absl::Span<const float> row) {
  return static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

double MaxDelta(absl::Span<const float> actual, absl::Span<const float> expected) {
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double delta = std::abs(double{actual[i]} - double{expected[i]});
    worst = std::isnan(delta) ? INFINITY : std::max(worst, delta);
  }
  return worst;
}

// fixtures README: a float32 run is within 1e-3 in every logit; 5e-5 is usual.
TEST_P(GoldenTest, WholePrefillMatchesTransformers) {
  NetworkRunner runner(GoldenModel(GetParam()));
  const auto golden = Checkpoint::OpenFile(GoldenModel(GetParam()) + "/golden.safetensors");
  ASSERT_TRUE(golden.ok()) << golden.status();
  const std::vector<GoldenCase> cases = GoldenCases(**golden);
  ASSERT_GE(cases.size(), 4u);
  for (const GoldenCase& golden_case : cases) {
    SCOPED_TRACE(golden_case.name);
    runner.Reset();
    engine::Sequence seq = runner.NewSequence(golden_case.ids);
    const std::vector<float> logits = runner.Run(seq, /*chunk=*/512);
    ASSERT_EQ(logits.size(), golden_case.ids.size() * runner.vocab_size());
    const size_t compared = golden_case.logits.size();
    const double error =
        MaxDelta(absl::MakeConstSpan(logits).subspan(logits.size() - compared), golden_case.logits);
    EXPECT_LT(error, 1e-3);
    RecordProperty(std::string(golden_case.name) + "_max_delta", std::to_string(error));

    // Greedy continuation in absorbed form, fed with the golden tokens.
    std::vector<float> last(logits.end() - runner.vocab_size(), logits.end());
    for (size_t i = 0; i < golden_case.greedy.size(); ++i) {
      const auto expected = static_cast<int32_t>(golden_case.greedy[i]);
      if (golden_case.margin[i] > 2 * std::max(error, 5e-5)) {
        EXPECT_EQ(Argmax(last), expected) << "step " << i << " margin " << golden_case.margin[i];
      }
      seq.tokens.push_back(expected);
      last = runner.Run(seq, 512, /*absorbed_from=*/0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, GoldenTest,
                         ::testing::Values("v2_lite", "v2_group", "v3", "v3_odd", "v3_fp8", "v32",
                                           "v32_odd", "v32_native", "v4_odd", "v4_native"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace model
