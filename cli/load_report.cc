#include "cli/load_report.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/latency_stats.h"
#include "nlohmann/json.hpp"

namespace cli {
namespace {

LatencyStats Stats(const std::vector<MeasuredRequest>& all, double MeasuredRequest::*member) {
  std::vector<double> values;
  for (const MeasuredRequest& one : all) values.push_back(one.*member);
  return Summarize(std::move(values));
}

LatencyStats InterTokenStats(const std::vector<MeasuredRequest>& all) {
  std::vector<double> values;
  for (const MeasuredRequest& one : all) {
    values.insert(values.end(), one.itl_ms.begin(), one.itl_ms.end());
  }
  return Summarize(std::move(values));
}

struct Throughput {
  double requests_per_s = 0;
  double output_tokens_per_s = 0;
  double tokens_per_s = 0;   // in and out
  double goodput_per_s = 0;  // requests within the service level
};

Throughput ThroughputOf(const LoadReport& report) {
  int64_t output = 0;
  for (const MeasuredRequest& one : report.good) output += one.num_tokens;
  const auto requests = static_cast<int64_t>(report.good.size());
  const double seconds = std::max(report.seconds, 1e-9);
  return {.requests_per_s = static_cast<double>(requests) / seconds,
          .output_tokens_per_s = static_cast<double>(output) / seconds,
          .tokens_per_s =
              static_cast<double>(output + requests * int64_t{report.input_tokens}) / seconds,
          .goodput_per_s = report.num_within_level() / seconds};
}

nlohmann::json ToJson(const LatencyStats& stats) {
  return {{"mean", stats.mean}, {"median", stats.median}, {"p99", stats.p99}};
}

}  // namespace

bool ServiceLevel::Holds(const MeasuredRequest& request) const {
  return (ttft_ms <= 0 || request.ttft_ms <= ttft_ms) &&
         (tpot_ms <= 0 || request.tpot_ms <= tpot_ms);
}

int32_t LoadReport::num_failed() const {
  int32_t count = 0;
  for (const auto& [what, times] : failures) count += times;
  return count;
}

int32_t LoadReport::num_within_level() const {
  return static_cast<int32_t>(std::count_if(
      good.begin(), good.end(), [this](const MeasuredRequest& one) { return level.Holds(one); }));
}

std::string LoadReport::Text() const {
  std::string text = absl::StrFormat(
      "%s: %d requests of %d in, %d out, %s: %d good, %d failed, %.2f s, seed %u\n", model,
      num_requests, input_tokens, output_tokens,
      request_rate > 0
          ? absl::StrFormat("%g a second, at most %d at a time", request_rate, concurrency)
          : absl::StrFormat("%d at a time", concurrency),
      good.size(), num_failed(), seconds, seed);
  const auto add = [&text](const char* what, const LatencyStats& stats) {
    absl::StrAppendFormat(&text, "%-10s mean %9.2f  median %9.2f  p99 %9.2f\n", what, stats.mean,
                          stats.median, stats.p99);
  };
  add("TTFT ms", Stats(good, &MeasuredRequest::ttft_ms));
  add("TPOT ms", Stats(good, &MeasuredRequest::tpot_ms));
  add("ITL ms", InterTokenStats(good));
  add("total ms", Stats(good, &MeasuredRequest::total_ms));
  const Throughput throughput = ThroughputOf(*this);
  absl::StrAppendFormat(
      &text, "throughput %.2f requests/s, %.1f output tokens/s, %.1f tokens/s in and out\n",
      throughput.requests_per_s, throughput.output_tokens_per_s, throughput.tokens_per_s);
  if (level.any()) {
    absl::StrAppendFormat(
        &text, "goodput %.2f requests/s: %d of %d within TTFT %g ms, TPOT %g ms\n",
        throughput.goodput_per_s, num_within_level(), num_requests, level.ttft_ms, level.tpot_ms);
  }
  for (const auto& [what, count] : failures) absl::StrAppend(&text, count, " x ", what, "\n");
  return text;
}

std::string LoadReport::Json() const {
  const Throughput throughput = ThroughputOf(*this);
  const nlohmann::json json = {{"model", model},
                               {"num_requests", num_requests},
                               {"input_tokens", input_tokens},
                               {"output_tokens", output_tokens},
                               {"concurrency", concurrency},
                               {"request_rate", request_rate},
                               {"seed", seed},
                               {"seconds", seconds},
                               {"good", good.size()},
                               {"failures", failures},
                               {"ttft_ms", ToJson(Stats(good, &MeasuredRequest::ttft_ms))},
                               {"tpot_ms", ToJson(Stats(good, &MeasuredRequest::tpot_ms))},
                               {"itl_ms", ToJson(InterTokenStats(good))},
                               {"total_ms", ToJson(Stats(good, &MeasuredRequest::total_ms))},
                               {"requests_per_s", throughput.requests_per_s},
                               {"output_tokens_per_s", throughput.output_tokens_per_s},
                               {"tokens_per_s", throughput.tokens_per_s},
                               {"slo", {{"ttft_ms", level.ttft_ms}, {"tpot_ms", level.tpot_ms}}},
                               {"within_slo", num_within_level()},
                               {"goodput_per_s", throughput.goodput_per_s}};
  return json.dump();
}

}  // namespace cli
