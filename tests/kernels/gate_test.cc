#include "kernels/cpu/gate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kernels::cpu {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;

struct Selection {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Selection Select(const GateConfig& gate, const std::vector<float>& logits,
                 const std::vector<float>& bias = {}) {
  EXPECT_TRUE(CheckGate(gate).ok()) << CheckGate(gate);
  Selection selection;
  selection.ids.resize(static_cast<size_t>(gate.top_k));
  selection.weights.resize(static_cast<size_t>(gate.top_k));
  SelectExperts(gate, logits.data(), bias.empty() ? nullptr : bias.data(), selection.ids.data(),
                selection.weights.data());
  return selection;
}

// Logit whose sigmoid is p.
float Logit(double p) { return static_cast<float>(std::log(p / (1 - p))); }

TEST(GateTest, GreedyTakesTheLargestProbabilitiesUnnormalised) {
  const GateConfig gate = {.num_experts = 4, .top_k = 2, .routed_scaling_factor = 2};
  const float l = std::log(2.0f);  // probabilities 1/8 * {1, 4, 1, 2}
  const Selection selection = Select(gate, {0, 2 * l, 0, l});
  EXPECT_THAT(selection.ids, ElementsAre(1, 3));
  EXPECT_THAT(selection.weights, ElementsAre(FloatNear(1.0f, 1e-6f), FloatNear(0.5f, 1e-6f)));
}

TEST(GateTest, NormalisationComesBeforeTheFactor) {
  const GateConfig gate = {
      .num_experts = 4, .top_k = 2, .norm_topk_prob = true, .routed_scaling_factor = 3};
  const float l = std::log(2.0f);
  const Selection selection = Select(gate, {0, 2 * l, 0, l});
  EXPECT_THAT(selection.weights, ElementsAre(FloatNear(2.0f, 1e-6f), FloatNear(1.0f, 1e-6f)));
}

TEST(GateTest, TiesGoToTheLowerId) {
  GateConfig gate = {.num_experts = 6, .top_k = 3};
  EXPECT_THAT(Select(gate, {1, 1, 1, 1, 1, 1}).ids, ElementsAre(0, 1, 2));
  EXPECT_THAT(Select(gate, {0, 1, 2, 1, 2, 1}).ids, ElementsAre(1, 2, 4));
  gate = {.method = GateMethod::kNoAuxTc,
          .num_experts = 6,
          .top_k = 2,
          .num_groups = 3,
          .top_k_groups = 1};
  EXPECT_THAT(Select(gate, {0, 0, 0, 0, 0, 0}).ids, ElementsAre(0, 1));
}

// Group {2, 3} has the best expert, group {0, 1} the larger sum.
TEST(GateTest, GroupScoreIsTheBestExpertForSoftmaxAndTheBestTwoForNoAux) {
  const std::vector<float> logits = {Logit(0.5), Logit(0.5), Logit(0.7), Logit(0.1)};
  GateConfig gate = {.method = GateMethod::kGroupLimitedGreedy,
                     .num_experts = 4,
                     .top_k = 2,
                     .num_groups = 2,
                     .top_k_groups = 1};
  EXPECT_THAT(Select(gate, logits).ids, ElementsAre(2, 3));
  gate.method = GateMethod::kNoAuxTc;
  EXPECT_THAT(Select(gate, logits).ids, ElementsAre(0, 1));
}

TEST(GateTest, BiasChoosesButDoesNotWeigh) {
  const GateConfig gate = {.method = GateMethod::kNoAuxTc, .num_experts = 4, .top_k = 1};
  const Selection selection =
      Select(gate, {Logit(0.9), Logit(0.25), Logit(0.5), Logit(0.1)}, {0, 1, 0, 0});
  EXPECT_THAT(selection.ids, ElementsAre(1));
  EXPECT_THAT(selection.weights, ElementsAre(FloatNear(0.25f, 1e-6f)));
}

// With a mask of 0 instead of -inf expert 2 would beat the negative scores of the kept group.
TEST(GateTest, AMaskedGroupIsNeverChosenOverNegativeScores) {
  const GateConfig gate = {.method = GateMethod::kNoAuxTc,
                           .num_experts = 4,
                           .top_k = 2,
                           .num_groups = 2,
                           .top_k_groups = 1};
  const Selection selection =
      Select(gate, {Logit(0.5), Logit(0.5), Logit(0.5), Logit(0.5)}, {-1, -1, -2, -2});
  EXPECT_THAT(selection.ids, ElementsAre(0, 1));
}

// models.md 7.8: weights are those of the scores alone, normalised, then scaled.
TEST(GateTest, SqrtSoftplusIsBiasedForTheChoiceAndNormalised) {
  const GateConfig gate = {.method = GateMethod::kSqrtSoftplus,
                           .num_experts = 4,
                           .top_k = 2,
                           .norm_topk_prob = true,
                           .routed_scaling_factor = 1.5f};
  // ln(1 + e^x) of 4, 1, 0.25, 9: scores 2, 1, 0.5, 3.
  const auto logit = [](double softplus) {
    return static_cast<float>(std::log(std::exp(softplus) - 1));
  };
  const std::vector<float> logits = {logit(4), logit(1), logit(0.25), logit(9)};
  Selection selection = Select(gate, logits);
  EXPECT_THAT(selection.ids, ElementsAre(0, 3));
  EXPECT_THAT(selection.weights, ElementsAre(FloatNear(0.6f, 1e-6f), FloatNear(0.9f, 1e-6f)));
  selection = Select(gate, logits, {0, 0, 2, 0});
  EXPECT_THAT(selection.ids, ElementsAre(2, 3));
  EXPECT_THAT(selection.weights,
              ElementsAre(FloatNear(1.5f * 0.5f / 3.5f, 1e-6f), FloatNear(1.5f * 3 / 3.5f, 1e-6f)));
  // Far out: e^200 is no float, e^-200 is 0.
  selection = Select(gate, {200, -200, -200, -200});
  EXPECT_THAT(selection.ids, ElementsAre(0, 1));
  EXPECT_THAT(selection.weights, ElementsAre(FloatNear(1.5f, 1e-6f), FloatNear(0, 1e-6f)));
}

TEST(GateTest, ChosenExpertsAreWeighedByTheirScores) {
  const GateConfig gate = {.method = GateMethod::kSqrtSoftplus,
                           .num_experts = 5,
                           .top_k = 3,
                           .norm_topk_prob = true,
                           .routed_scaling_factor = 2};
  const auto logit = [](double softplus) {
    return static_cast<float>(std::log(std::exp(softplus) - 1));
  };
  const std::vector<float> logits = {logit(9), logit(1), logit(4), logit(9), logit(25)};
  const int32_t chosen[] = {4, 1, 2};
  std::vector<int32_t> ids(3);
  std::vector<float> weights(3);
  WeighExperts(gate, logits.data(), chosen, ids.data(), weights.data());
  EXPECT_THAT(ids, ElementsAre(1, 2, 4));
  EXPECT_THAT(weights, ElementsAre(FloatNear(0.25f, 1e-6f), FloatNear(0.5f, 1e-6f),
                                   FloatNear(1.25f, 1e-6f)));
}

TEST(GateTest, NaNLogitsStillGiveDifferentValidExperts) {
  for (const GateMethod method : {GateMethod::kGreedy, GateMethod::kGroupLimitedGreedy,
                                  GateMethod::kNoAuxTc, GateMethod::kSqrtSoftplus}) {
    const GateConfig gate = {
        .method = method, .num_experts = 8, .top_k = 3, .num_groups = 4, .top_k_groups = 2};
    const std::vector<int32_t> ids =
        Select(gate, std::vector<float>(8, std::numeric_limits<float>::quiet_NaN())).ids;
    EXPECT_TRUE(std::is_sorted(ids.begin(), ids.end()));
    EXPECT_EQ(std::adjacent_find(ids.begin(), ids.end()), ids.end());
    EXPECT_GE(ids.front(), 0);
    EXPECT_LT(ids.back(), 8);
  }
}

// A second implementation by sorting, in double, over random configurations.
Selection SelectBySorting(const GateConfig& gate, const std::vector<float>& logits,
                          const std::vector<float>& bias) {
  const int32_t n = gate.num_experts;
  std::vector<double> score(static_cast<size_t>(n)), choice;
  double sum = 0;
  for (int32_t e = 0; e < n; ++e) {
    const size_t i = static_cast<size_t>(e);
    const double logit = logits[i];
    score[i] = gate.method == GateMethod::kNoAuxTc        ? 1 / (1 + std::exp(-logit))
               : gate.method == GateMethod::kSqrtSoftplus ? std::sqrt(std::log(1 + std::exp(logit)))
                                                          : std::exp(logit);
    sum += score[i];
  }
  choice = score;
  for (size_t i = 0; i < score.size(); ++i) {
    if (gate.method == GateMethod::kNoAuxTc || gate.method == GateMethod::kSqrtSoftplus) {
      choice[i] += bias[i];
    } else {
      choice[i] = score[i] /= sum;
    }
  }
  std::vector<int32_t> kept(static_cast<size_t>(n));
  std::iota(kept.begin(), kept.end(), 0);
  if (gate.method == GateMethod::kGroupLimitedGreedy || gate.method == GateMethod::kNoAuxTc) {
    const int32_t size = n / gate.num_groups;
    std::vector<std::pair<double, int32_t>> groups;
    for (int32_t g = 0; g < gate.num_groups; ++g) {
      std::vector<double> members(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(members.rbegin(), members.rend());
      double value = members[0];
      if (gate.method == GateMethod::kNoAuxTc && size > 1) value += members[1];
      groups.push_back({-value, g});
    }
    std::sort(groups.begin(), groups.end());
    groups.resize(static_cast<size_t>(gate.top_k_groups));
    std::erase_if(kept, [&](int32_t e) {
      return std::none_of(groups.begin(), groups.end(),
                          [&](const auto& group) { return group.second == e / size; });
    });
  }
  std::stable_sort(kept.begin(), kept.end(), [&](int32_t a, int32_t b) {
    return choice[static_cast<size_t>(a)] > choice[static_cast<size_t>(b)];
  });
  kept.resize(static_cast<size_t>(gate.top_k));
  std::sort(kept.begin(), kept.end());
  Selection selection = {kept, {}};
  double chosen = 0;
  for (const int32_t e : kept) chosen += score[static_cast<size_t>(e)];
  for (const int32_t e : kept) {
    const double weight = score[static_cast<size_t>(e)] / (gate.norm_topk_prob ? chosen : 1);
    selection.weights.push_back(static_cast<float>(weight * gate.routed_scaling_factor));
  }
  return selection;
}

TEST(GateTest, EqualsASecondImplementationOverRandomConfigurations) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 3000; ++round) {
    GateConfig gate;
    gate.method = static_cast<GateMethod>(random() % 4);
    gate.num_groups = static_cast<int32_t>(1 + random() % 8);
    const int32_t group_size = static_cast<int32_t>(1 + random() % 20);
    gate.num_experts = gate.num_groups * group_size;
    gate.top_k_groups = static_cast<int32_t>(1 + random() % static_cast<uint32_t>(gate.num_groups));
    gate.top_k =
        static_cast<int32_t>(1 + random() % static_cast<uint32_t>(gate.top_k_groups * group_size));
    gate.norm_topk_prob = random() % 2 == 0;
    gate.routed_scaling_factor = 2.5f;
    std::vector<float> logits, bias;
    for (int32_t e = 0; e < gate.num_experts; ++e) {
      logits.push_back(normal(random));
      bias.push_back(normal(random));
    }
    const Selection expected = SelectBySorting(gate, logits, bias);
    const Selection actual = Select(gate, logits, bias);
    ASSERT_EQ(actual.ids, expected.ids) << "round " << round;
    for (size_t i = 0; i < expected.weights.size(); ++i) {
      ASSERT_NEAR(actual.weights[i], expected.weights[i], 2e-6 * (1 + expected.weights[i]));
    }
  }
}

TEST(GateTest, ImpossibleChoicesAreNamed) {
  const auto message = [](const GateConfig& gate) {
    EXPECT_EQ(CheckGate(gate).code(), absl::StatusCode::kInvalidArgument);
    return std::string(CheckGate(gate).message());
  };
  EXPECT_THAT(message({.num_experts = 4, .top_k = 5}), HasSubstr("5 of 4 experts"));
  EXPECT_THAT(message({.num_experts = 4, .top_k = 0}), HasSubstr("0 of 4 experts"));
  EXPECT_THAT(message({.num_experts = 5000, .top_k = 1}), HasSubstr("1 of 5000 experts"));
  EXPECT_THAT(
      message({.method = GateMethod::kNoAuxTc, .num_experts = 9, .top_k = 1, .num_groups = 2}),
      HasSubstr("1 of 2 groups of 9 experts"));
  EXPECT_THAT(message({.method = GateMethod::kNoAuxTc,
                       .num_experts = 8,
                       .top_k = 5,
                       .num_groups = 2,
                       .top_k_groups = 1}),
              HasSubstr("5 experts from 1 of 2 groups"));
}

}  // namespace
}  // namespace kernels::cpu
