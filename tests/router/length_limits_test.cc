#include "router/length_limits.h"

#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace router {
namespace {

constexpr int32_t kAny = std::numeric_limits<int32_t>::max();

TEST(LengthLimitsTest, AWorkersContextOrItsCacheEndsThePrompt) {
  EXPECT_EQ(LongestPrompt(4096, 64, 1000), 4095);
  EXPECT_EQ(LongestPrompt(4096, 64, 64), 4095);
  EXPECT_EQ(LongestPrompt(4096, 64, 63), 63 * 64 - 1);
  EXPECT_EQ(LongestPrompt(0, 64, 10), 639) << "not stated";
  EXPECT_EQ(LongestPrompt(4096, 64, 0), 0);
  EXPECT_EQ(LongestPrompt(0, 1 << 28, 1 << 28), kAny - 1);
}

TEST(LengthLimitsTest, WithoutARoomNothingFits) {
  LengthLimits none;
  none.Add({.prompt = 0, .total = 100});
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(none.prompt(), 0);
  EXPECT_EQ(none.TotalFor(1), 0);
  EXPECT_FALSE(none.Holds(1, 2));
}

TEST(LengthLimitsTest, ARequestMustFitOneRoomWithPromptAndOutput) {
  LengthLimits limits;
  limits.Add({.prompt = 100, .total = 5000});
  limits.Add({.prompt = 999, .total = 1000});
  EXPECT_EQ(limits.prompt(), 999);
  EXPECT_EQ(limits.TotalFor(100), 5000);
  EXPECT_EQ(limits.TotalFor(101), 1000);
  EXPECT_EQ(limits.TotalFor(1000), 0);
  EXPECT_TRUE(limits.Holds(100, 5000));
  EXPECT_FALSE(limits.Holds(101, 1001)) << "each fits a room, together they fit none";
  const LengthLimits within = limits.Within(800);
  EXPECT_EQ(within.prompt(), 799);
  EXPECT_EQ(within.TotalFor(100), 800);
  EXPECT_EQ(limits.Within(0).TotalFor(100), 5000) << "of a model without such a bound";
  EXPECT_TRUE(LengthLimits::OfContext(0).Holds(kAny - 1, kAny));
  EXPECT_FALSE(LengthLimits::OfContext(800).Holds(800, 801));
}

// Against all rooms, none left out.
TEST(LengthLimitsTest, WhatIsLeftOutChangesNoAnswer) {
  std::minstd_rand random(1);
  for (int round = 0; round < 200; ++round) {
    LengthLimits limits;
    std::vector<LengthRoom> all;
    for (int i = 0; i < 12; ++i) {
      const auto prompt = static_cast<int32_t>(1 + random() % 20);
      all.push_back({.prompt = prompt, .total = prompt + 1 + static_cast<int32_t>(random() % 10)});
      limits.Add(all.back());
      for (int32_t p = 1; p <= 21; ++p) {
        int32_t most = 0;
        for (const LengthRoom& room : all) {
          if (p <= room.prompt) most = std::max(most, room.total);
        }
        ASSERT_EQ(limits.TotalFor(p), most) << "round " << round << ", prompt " << p;
      }
    }
  }
}

}  // namespace
}  // namespace router
