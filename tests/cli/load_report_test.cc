#include "cli/load_report.h"

#include <string>

#include "cli/load_plot.h"
#include "cli/load_progress.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

LoadReport Report() {
  LoadReport report{
      .model = "m", .backend = "grpc", .load = "4 requests", .concurrency = 2, .seconds = 2};
  report.good = {
      {.ttft_ms = 100, .tpot_ms = 10, .e2e_ms = 140, .itl_ms = {9, 11}, .num_tokens = 5},
      {.ttft_ms = 600, .tpot_ms = 10, .e2e_ms = 640, .itl_ms = {10, 10}, .num_tokens = 5},
      {.ttft_ms = 100, .tpot_ms = 30, .e2e_ms = 220, .itl_ms = {1, 59}, .num_tokens = 5}};
  for (MeasuredRequest& one : report.good) one.prompt_tokens = 10;
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
              HasSubstr("goodput 0.50 requests/s: 1 of 4 within TTFT 500 ms, TPOT 20 ms\n"));
  report.level = {.e2e_ms = 200};
  EXPECT_EQ(report.num_within_level(), 1);
}

TEST(LoadReportTest, TextAndJsonTellTheSame) {
  LoadReport report = Report();
  report.request_rate = 2.5;
  const std::string text = report.Text();
  EXPECT_THAT(
      text,
      HasSubstr("m by grpc: 4 requests, 2.5 a second, at most 2 at a time: 3 good, 1 failed"));
  EXPECT_THAT(text, HasSubstr("throughput 1.50 requests/s, 7.5 output tokens/s, 22.5 tokens/s"));
  EXPECT_THAT(text, HasSubstr("1 x UNAVAILABLE: gone"));
  EXPECT_THAT(text,
              HasSubstr("TTFT ms  mean    266.67  median    100.00  p90    600.00  p99    600.00"));
  const nlohmann::json json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json["output_tokens_per_s"], 7.5);
  EXPECT_EQ(json["ttft_ms"]["median"], 100);
  EXPECT_EQ(json["ttft_ms"]["p90"], 600);
  EXPECT_EQ(json["itl_ms"]["p99"], 59);
  EXPECT_EQ(json["failures"]["UNAVAILABLE: gone"], 1);
  EXPECT_EQ(json["num_requests"], 4);
  EXPECT_EQ(json["prompt_tokens"], 30);
}

TEST(LoadReportTest, WhatNobodyMeasuredIsNoZero) {
  LoadReport report = Report();
  report.good.clear();
  EXPECT_EQ(report.Text(),
            "m by grpc: 4 requests, 2 at a time: 0 good, 1 failed, 2.00 s, seed 0\n1 x "
            "UNAVAILABLE: gone\n");
  const nlohmann::json json = nlohmann::json::parse(report.Json());
  EXPECT_TRUE(json["ttft_ms"].is_null());
  EXPECT_TRUE(json["itl_ms"].is_null());
  EXPECT_EQ(json["good"], 0);
}

TEST(LoadReportTest, ReuseAndMovedCacheAreSaidWhereTheyAreKnown) {
  LoadReport report = Report();
  EXPECT_THAT(report.Text(), HasSubstr("from cache: measured not known, attainable not known\n"));
  EXPECT_THAT(report.Text(), Not(HasSubstr("cache moved")));
  for (MeasuredRequest& one : report.good) {
    one.cached_tokens = 3;
    one.attainable_tokens = 6;
    one.kv_bytes = 0;
  }
  EXPECT_THAT(report.Text(),
              HasSubstr("from cache: measured 30.0 %, attainable 60.0 %\ncache moved: nothing"));
  report.good[1].kv_bytes = 2'500'000;
  EXPECT_THAT(report.Text(), HasSubstr("cache moved: 2.5 MB, for 1 of 3 requests\n"));
  EXPECT_EQ(nlohmann::json::parse(report.Json())["kv_bytes"], 2'500'000);
}

TEST(LoadReportTest, ALoadGeneratorThatIsLateSaysSo) {
  LoadReport report = Report();
  EXPECT_THAT(report.Text(), Not(HasSubstr("late")));
  report.good[2].late_ms = 50;
  EXPECT_THAT(report.Text(), HasSubstr("requests were sent late (p99 50.0 ms)"));
}

TEST(LoadProgressTest, OneLineSaysHowFarTheRunIs) {
  LoadProgress progress;
  progress.running = 4;
  progress.good = 59;
  progress.failed = 1;
  progress.output_tokens = 1880;
  EXPECT_EQ(
      ProgressText(progress, 120, 10),
      "[===============>              ] 60/120  6.0 requests/s  188 tokens/s  4 running  1 failed");
  progress.good = 119;
  EXPECT_THAT(ProgressText(progress, 120, 10),
              HasSubstr("[==============================] 120/120"));
}

TEST(LoadPlotTest, ThePageHasTheTextAndEveryTime) {
  LoadReport report = Report();
  report.model = "a<b&c";
  const std::string svg = LoadPlotSvg(report);
  EXPECT_THAT(svg, HasSubstr(">a&lt;b&amp;c by grpc: 4 requests"));
  for (const char* panel : {"TTFT: % of 3", "TPOT: % of 3", "ITL: % of 6", "E2E: % of 3",
                            "TTFT ms by when", "requests under way"}) {
    EXPECT_THAT(svg, HasSubstr(panel));
  }
  EXPECT_THAT(svg, HasSubstr("p99 600.00 ms"));
  EXPECT_THAT(LoadPlotHtml(report), HasSubstr("<title>ferry bench: a&lt;b&amp;c</title>"));
  report.good.clear();
  EXPECT_THAT(LoadPlotSvg(report), HasSubstr("TTFT: % of 0"));
}

}  // namespace
}  // namespace cli
