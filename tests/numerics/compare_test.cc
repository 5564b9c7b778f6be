#include "tests/numerics/compare.h"

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace numerics {
namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

bool Close(const std::vector<float>& actual, const std::vector<double>& expected,
           const Tolerance& tolerance) {
  return static_cast<bool>(AllClose(actual, expected, tolerance));
}

TEST(CompareTest, AbsoluteOrRelativeIsEnough) {
  EXPECT_TRUE(Close({100.5f, 0.25f}, {100, 0}, {.abs = 0.25, .rel = 0.005}));
  EXPECT_FALSE(Close({100.5f, 0.25f}, {100, 0}, {.abs = 0.25, .rel = 0.004}));
  EXPECT_FALSE(Close({100.5f, 0.25f}, {100, 0}, {.abs = 0.24, .rel = 0.005}));
  EXPECT_FALSE(Close({1e-30f}, {0}, {.rel = 1000}));
  EXPECT_TRUE(Close({0}, {0}, {}));
}

TEST(CompareTest, SpecialValuesStandAtTheSamePlaces) {
  EXPECT_TRUE(Close({kNan, kInf, -kInf}, {kNan, kInf, -kInf}, {}));
  EXPECT_FALSE(Close({kNan}, {1}, {.abs = 1e30}));
  EXPECT_FALSE(Close({1}, {kNan}, {.abs = 1e30}));
  EXPECT_FALSE(Close({kInf}, {-kInf}, {.abs = 1e30}));
  EXPECT_FALSE(Close({kInf}, {3e38}, {.abs = 1e39, .rel = 10}));
}

TEST(CompareTest, CosineSeesWhatElementsDoNot) {
  const std::vector<float> actual = {1, 0.1f};
  EXPECT_TRUE(Close(actual, {1, -0.1}, {.abs = 0.3}));
  EXPECT_FALSE(Close(actual, {1, -0.1}, {.abs = 0.3, .cosine = 1e-3}));
  EXPECT_FALSE(Close({0, 0}, {0.1, 0}, {.abs = 0.3, .cosine = 0.5}));
}

TEST(CompareTest, SizesMustAgree) {
  EXPECT_FALSE(Close({1}, {1, 1}, {.abs = 10}));
  EXPECT_FALSE(static_cast<bool>(BitEqual(std::vector<float>{1}, std::vector<float>{})));
}

TEST(CompareTest, FailureNamesTheWorstElement) {
  const auto result = AllClose(std::vector<float>{1, 2, 3}, std::vector<double>{1, 2.5, 3.25}, {});
  EXPECT_THAT(std::string(result.message()), HasSubstr("2 of 3 elements"));
  EXPECT_THAT(std::string(result.message()), HasSubstr("worst abs error 0.5 at [1]"));
}

TEST(CompareTest, BitEqualTellsZeroFromMinusZero) {
  EXPECT_TRUE(static_cast<bool>(BitEqual(std::vector<float>{kNan}, std::vector<float>{kNan})));
  EXPECT_FALSE(static_cast<bool>(BitEqual(std::vector<float>{0.0f}, std::vector<float>{-0.0f})));
}

}  // namespace
}  // namespace numerics
