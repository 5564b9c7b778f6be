#include "cli/load_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace cli {
namespace {

using ::testing::HasSubstr;

LoadReport Report() {
  LoadReport report{.model = "m",
                    .num_requests = 4,
                    .input_tokens = 10,
                    .output_tokens = 5,
                    .concurrency = 2,
                    .seconds = 2};
  report.good = {
      {.ttft_ms = 100, .tpot_ms = 10, .total_ms = 140, .itl_ms = {9, 11}, .num_tokens = 5},
      {.ttft_ms = 600, .tpot_ms = 10, .total_ms = 640, .itl_ms = {10, 10}, .num_tokens = 5},
      {.ttft_ms = 100, .tpot_ms = 30, .total_ms = 220, .itl_ms = {1, 59}, .num_tokens = 5}};
  report.failures = {{"UNAVAILABLE: gone", 1}};
  return report;
}

TEST(LoadReportTest, GoodputCountsWhatKeepsEveryPromise) {
  LoadReport report = Report();
  EXPECT_EQ(report.num_within_level(), 3);  // nothing is promised
  report.level = {.ttft_ms = 500};
  EXPECT_EQ(report.num_within_level(), 2);
  report.level = {.ttft_ms = 500, .tpot_ms = 20};
  EXPECT_EQ(report.num_within_level(), 1);
  EXPECT_THAT(report.Text(),
              HasSubstr("goodput 0.50 requests/s: 1 of 4 within TTFT 500 ms, TPOT 20 ms"));
}

TEST(LoadReportTest, TextAndJsonTellTheSame) {
  LoadReport report = Report();
  report.request_rate = 2.5;
  const std::string text = report.Text();
  EXPECT_THAT(text, HasSubstr("2.5 a second, at most 2 at a time: 3 good, 1 failed"));
  EXPECT_THAT(text, HasSubstr("throughput 1.50 requests/s, 7.5 output tokens/s, 22.5 tokens/s"));
  EXPECT_THAT(text, HasSubstr("1 x UNAVAILABLE: gone"));
  const nlohmann::json json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json["output_tokens_per_s"], 7.5);
  EXPECT_EQ(json["ttft_ms"]["median"], 100);
  EXPECT_EQ(json["itl_ms"]["p99"], 59);
  EXPECT_EQ(json["failures"]["UNAVAILABLE: gone"], 1);
}

}  // namespace
}  // namespace cli
