#include "cli/latency_stats.h"

#include <vector>

#include "gtest/gtest.h"

namespace cli {
namespace {

TEST(LatencyStatsTest, PercentilesAreMeasuredValues) {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const LatencyStats stats = Summarize(values);
  EXPECT_DOUBLE_EQ(stats.mean, 50.5);
  EXPECT_EQ(stats.median, 50);
  EXPECT_EQ(stats.p90, 90);
  EXPECT_EQ(stats.p99, 99);
}

TEST(LatencyStatsTest, FewAndNoValues) {
  EXPECT_EQ(Summarize({7}).p99, 7);
  EXPECT_EQ(Summarize({9, 1}).median, 1);
  EXPECT_EQ(Summarize({9, 1}).p99, 9);
  EXPECT_EQ(Summarize({}).mean, 0);
}

}  // namespace
}  // namespace cli
