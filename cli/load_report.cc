#include "cli/load_report.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace cli {
namespace {

// Requests sent later than this make times that are the load generator's own.
constexpr double kMaxLateMs = 20;

struct Throughput {
  double requests_per_s = 0;
  double output_tokens_per_s = 0;
  double tokens_per_s = 0;   // in and out
  double goodput_per_s = 0;  // requests within the service level
};

template <typename T>
int64_t Sum(const std::vector<MeasuredRequest>& all, T MeasuredRequest::*member) {
  int64_t sum = 0;
  for (const MeasuredRequest& one : all) {
    if constexpr (std::is_integral_v<T>) {
      sum += one.*member;
    } else {
      sum += (one.*member).value_or(0);
    }
  }
  return sum;
}

// Whether every request has it.
template <typename T>
bool Told(const std::vector<MeasuredRequest>& all, std::optional<T> MeasuredRequest::*member) {
  return !all.empty() && std::all_of(all.begin(), all.end(), [member](const MeasuredRequest& one) {
    return (one.*member).has_value();
  });
}

Throughput ThroughputOf(const LoadReport& report) {
  const auto output = static_cast<double>(Sum(report.good, &MeasuredRequest::num_tokens));
  const auto prompts = static_cast<double>(Sum(report.good, &MeasuredRequest::prompt_tokens));
  const double seconds = std::max(report.seconds, 1e-9);
  return {.requests_per_s = static_cast<double>(report.good.size()) / seconds,
          .output_tokens_per_s = output / seconds,
          .tokens_per_s = (output + prompts) / seconds,
          .goodput_per_s = report.num_within_level() / seconds};
}

// Of the prompts' tokens: how many were not computed again, and how many need not have been.
std::string ReuseText(const std::vector<MeasuredRequest>& good) {
  if (!Told(good, &MeasuredRequest::prompt_tokens)) return "";
  const double prompts = std::max<double>(1, Sum(good, &MeasuredRequest::prompt_tokens));
  const auto percent = [&](auto member) {
    return Told(good, member)
               ? absl::StrFormat("%.1f %%", 100 * static_cast<double>(Sum(good, member)) / prompts)
               : "not known";
  };
  return absl::StrCat("prompt tokens from cache: measured ",
                      percent(&MeasuredRequest::cached_tokens), ", attainable ",
                      percent(&MeasuredRequest::attainable_tokens), "\n");
}

std::string MovedText(const std::vector<MeasuredRequest>& good) {
  if (!Told(good, &MeasuredRequest::kv_bytes)) return "";
  const auto moved = std::count_if(good.begin(), good.end(),
                                   [](const MeasuredRequest& one) { return *one.kv_bytes > 0; });
  if (moved == 0) {
    return "cache moved: nothing; decode workers had or computed it all (short prompts: "
           "--local_prefill_tokens of ferry-router)\n";
  }
  return absl::StrFormat("cache moved: %.1f MB, for %d of %d requests\n",
                         static_cast<double>(Sum(good, &MeasuredRequest::kv_bytes)) / 1e6, moved,
                         good.size());
}

nlohmann::ordered_json ToJson(const LatencyStats& stats, bool any) {
  if (!any) return nullptr;  // no values are not zeros
  return {{"mean", stats.mean}, {"median", stats.median}, {"p90", stats.p90}, {"p99", stats.p99}};
}

}  // namespace

bool ServiceLevel::Holds(const MeasuredRequest& request) const {
  return (ttft_ms <= 0 || request.ttft_ms <= ttft_ms) &&
         (tpot_ms <= 0 || request.tpot_ms <= tpot_ms) &&
         (itl_ms <= 0 || Summarize(request.itl_ms).p99 <= itl_ms) &&
         (e2e_ms <= 0 || request.e2e_ms <= e2e_ms);
}

std::string ServiceLevel::Text() const {
  std::vector<std::string> limits;
  for (const auto& [name, ms] : {std::pair{"TTFT", ttft_ms}, std::pair{"TPOT", tpot_ms},
                                 std::pair{"ITL", itl_ms}, std::pair{"E2E", e2e_ms}}) {
    if (ms > 0) limits.push_back(absl::StrFormat("%s %g ms", name, ms));
  }
  return absl::StrJoin(limits, ", ");
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

std::vector<double> LoadReport::Values(double MeasuredRequest::*member) const {
  std::vector<double> values;
  for (const MeasuredRequest& one : good) values.push_back(one.*member);
  return values;
}

std::vector<double> LoadReport::InterTokenTimes() const {
  std::vector<double> values;
  for (const MeasuredRequest& one : good) {
    values.insert(values.end(), one.itl_ms.begin(), one.itl_ms.end());
  }
  return values;
}

LatencyStats LoadReport::Stats(double MeasuredRequest::*member) const {
  return Summarize(Values(member));
}
LatencyStats LoadReport::InterTokenStats() const { return Summarize(InterTokenTimes()); }

std::string LoadReport::Text() const {
  std::string text = absl::StrFormat(
      "%s by %s: %s, %s: %d good, %d failed, %.2f s, seed %u\n", model, backend, load,
      request_rate > 0
          ? absl::StrFormat("%g a second, at most %d at a time", request_rate, concurrency)
          : absl::StrFormat("%d at a time", concurrency),
      good.size(), num_failed(), seconds, seed);
  const auto add = [&text](const char* what, const LatencyStats& stats) {
    absl::StrAppendFormat(&text, "%-8s mean %9.2f  median %9.2f  p90 %9.2f  p99 %9.2f\n", what,
                          stats.mean, stats.median, stats.p90, stats.p99);
  };
  if (!good.empty()) {
    add("TTFT ms", Stats(&MeasuredRequest::ttft_ms));
    add("TPOT ms", Stats(&MeasuredRequest::tpot_ms));
    add("ITL ms", InterTokenStats());
    add("E2E ms", Stats(&MeasuredRequest::e2e_ms));
    const Throughput throughput = ThroughputOf(*this);
    absl::StrAppendFormat(&text, "throughput %.2f requests/s, %.1f output tokens/s",
                          throughput.requests_per_s, throughput.output_tokens_per_s);
    if (Told(good, &MeasuredRequest::prompt_tokens)) {
      absl::StrAppendFormat(&text, ", %.1f tokens/s in and out", throughput.tokens_per_s);
    }
    if (!std::all_of(good.begin(), good.end(), [](const auto& one) { return one.tokens_told; })) {
      absl::StrAppend(&text, " (the server does not count tokens: a message counts as one)");
    }
    absl::StrAppend(&text, "\n");
    if (level.any()) {
      absl::StrAppendFormat(&text, "goodput %.2f requests/s: %d of %d within %s\n",
                            throughput.goodput_per_s, num_within_level(), num_requests(),
                            level.Text());
    }
    absl::StrAppend(&text, ReuseText(good), MovedText(good));
    const double late = Stats(&MeasuredRequest::late_ms).p99;
    if (late > kMaxLateMs) {
      absl::StrAppendFormat(&text,
                            "requests were sent late (p99 %.1f ms): more --concurrency, or "
                            "a machine of its own for the load\n",
                            late);
    }
  }
  for (const auto& [what, count] : failures) absl::StrAppend(&text, count, " x ", what, "\n");
  return text;
}

std::string LoadReport::Json() const {
  const Throughput throughput = ThroughputOf(*this);
  const bool any = !good.empty();
  const auto stats = [&](double MeasuredRequest::*member) { return ToJson(Stats(member), any); };
  const auto sum = [this](auto member) {
    return Told(good, member) ? nlohmann::ordered_json(Sum(good, member)) : nullptr;
  };
  const std::vector<double> gaps = InterTokenTimes();
  const nlohmann::ordered_json json = {
      {"model", model},
      {"backend", backend},
      {"load", load},
      {"num_requests", num_requests()},
      {"concurrency", concurrency},
      {"request_rate", request_rate},
      {"seed", seed},
      {"seconds", seconds},
      {"good", good.size()},
      {"failed", num_failed()},
      {"failures", failures},
      {"ttft_ms", stats(&MeasuredRequest::ttft_ms)},
      {"tpot_ms", stats(&MeasuredRequest::tpot_ms)},
      {"itl_ms", ToJson(Summarize(gaps), !gaps.empty())},
      {"e2e_ms", stats(&MeasuredRequest::e2e_ms)},
      {"late_ms", stats(&MeasuredRequest::late_ms)},
      {"requests_per_s", throughput.requests_per_s},
      {"output_tokens_per_s", throughput.output_tokens_per_s},
      {"tokens_per_s", throughput.tokens_per_s},
      {"slo",
       {{"ttft_ms", level.ttft_ms},
        {"tpot_ms", level.tpot_ms},
        {"itl_ms", level.itl_ms},
        {"e2e_ms", level.e2e_ms}}},
      {"within_slo", num_within_level()},
      {"goodput_per_s", throughput.goodput_per_s},
      {"output_tokens", Sum(good, &MeasuredRequest::num_tokens)},
      {"prompt_tokens", sum(&MeasuredRequest::prompt_tokens)},
      {"cached_tokens", sum(&MeasuredRequest::cached_tokens)},
      {"attainable_tokens", sum(&MeasuredRequest::attainable_tokens)},
      {"kv_bytes", sum(&MeasuredRequest::kv_bytes)}};
  return json.dump(1);
}

}  // namespace cli
