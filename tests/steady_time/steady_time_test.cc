#include "steady_time/steady_time.h"

#include "gtest/gtest.h"

namespace steady_time {
namespace {

TEST(SteadyTimeTest, ItIsTheSteadyClocksTime) {
  const auto before = std::chrono::steady_clock::now();
  const absl::Time now = Now();
  const auto after = std::chrono::steady_clock::now();
  EXPECT_LE(before, ToChrono(now));
  EXPECT_LE(ToChrono(now), after);
}

}  // namespace
}  // namespace steady_time
