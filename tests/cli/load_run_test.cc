// Load runs against servers whose delays are known, on clocks that only these delays move: every
// number of the report is the one that the delays make, however busy the machine is.

#include "cli/load_run.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cli/load_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace cli {
namespace {

using testing::ElementsAre;

constexpr uint64_t kSeed = 1000;

// Each thread's own time, which its sleeps and its requests move.
class OwnTimes final : public LoadClock {
 public:
  absl::Duration Now() override { return now_; }
  void SleepUntil(absl::Duration moment) override { now_ = std::max(now_, moment); }
  static void Pass(double ms) { now_ += absl::Milliseconds(ms); }
  static void Reset() { now_ = absl::ZeroDuration(); }

 private:
  static thread_local absl::Duration now_;
};
thread_local absl::Duration OwnTimes::now_;

// The delays of request `number`: to the first output, then to each further one.
std::vector<double> Delays(uint64_t number) {
  std::vector<double> delays = {100 + 7.0 * static_cast<double>(number * 31 % 97)};
  for (uint64_t i = 0; i < 1 + number % 9; ++i) {
    delays.push_back(3 + static_cast<double>((number * 17 + i * 5) % 40));
  }
  return delays;
}

class KnownServer final : public LoadBackend {
 public:
  absl::StatusOr<LoadAnswer> Send(const LoadRequest& request,
                                  const std::function<void(uint32_t)>& on_output) override {
    const uint64_t number = request.seed - kSeed;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      prompts_[number] = request.prompt.ids;
    }
    if (fails_ == number || all_fail_) {
      OwnTimes::Pass(11);
      return absl::UnavailableError("gone");
    }
    LoadAnswer answer;
    for (const double ms : Delays(number)) {
      OwnTimes::Pass(ms);
      on_output(1);
      if (tells_ids_) answer.output_ids.push_back(static_cast<uint32_t>(answer.output_ids.size()));
    }
    OwnTimes::Pass(1000);  // until the stream ends, which no user waits for
    answer.output_tokens = static_cast<uint32_t>(Delays(number).size());
    return answer;
  }

  std::optional<uint64_t> fails_;
  bool all_fail_ = false;
  bool tells_ids_ = false;
  std::mutex mutex_;  // guards prompts_
  std::map<uint64_t, std::vector<uint32_t>> prompts_;
};

// The smallest of `values` that at least `share` of them do not exceed, found by counting.
double ShareOf(const std::vector<double>& values, double share) {
  double best = 1e18;
  for (const double candidate : values) {
    const auto within =
        std::count_if(values.begin(), values.end(), [&](double v) { return v <= candidate; });
    if (static_cast<double>(within) >= share * static_cast<double>(values.size()) - 1e-9)
      best = std::min(best, candidate);
  }
  return best;
}

void ExpectStats(const LatencyStats& stats, const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  EXPECT_NEAR(stats.mean, sum / static_cast<double>(values.size()), 1e-6);
  EXPECT_NEAR(stats.median, ShareOf(values, 0.5), 1e-6);
  EXPECT_NEAR(stats.p90, ShareOf(values, 0.9), 1e-6);
  EXPECT_NEAR(stats.p99, ShareOf(values, 0.99), 1e-6);
}

LoadReport Measure(const TraceShape& shape, const LoadOptions& options, KnownServer& server) {
  OwnTimes::Reset();
  OwnTimes clock;
  LoadProgress progress;
  const LoadResult result = RunLoad(*MakeTrace(shape), options, server, clock, progress);
  EXPECT_EQ(progress.running, 0);
  EXPECT_EQ(progress.good, static_cast<int32_t>(result.good.size()));
  LoadReport report;
  report.seconds = result.seconds;
  report.good = result.good;
  report.failures = result.failures;
  return report;
}

TraceShape Single(int32_t requests) {
  return {.num_conversations = requests, .input = {4, 4}, .output = {5, 5}, .vocab_size = 100};
}

TEST(LoadRunTest, StatisticsAreThoseOfTheDelays) {
  constexpr int kRequests = 250;
  std::vector<double> ttft, tpot, itl, e2e;
  for (int i = 0; i < kRequests; ++i) {
    const std::vector<double> delays = Delays(i);
    double rest = 0;
    for (size_t k = 1; k < delays.size(); ++k) {
      rest += delays[k];
      itl.push_back(delays[k]);
    }
    ttft.push_back(delays[0]);
    e2e.push_back(delays[0] + rest);
    tpot.push_back(rest / static_cast<double>(delays.size() - 1));
  }
  for (const int concurrency : {1, 7}) {
    KnownServer server;
    LoadReport report =
        Measure(Single(kRequests), {.concurrency = concurrency, .seed = kSeed}, server);
    ASSERT_EQ(report.good.size(), size_t{kRequests});
    ExpectStats(report.Stats(&MeasuredRequest::ttft_ms), ttft);
    ExpectStats(report.Stats(&MeasuredRequest::tpot_ms), tpot);
    ExpectStats(report.InterTokenStats(), itl);
    ExpectStats(report.Stats(&MeasuredRequest::e2e_ms), e2e);
    report.level = {.ttft_ms = 400, .tpot_ms = 20, .e2e_ms = 500};
    int within = 0;
    for (int i = 0; i < kRequests; ++i) within += ttft[i] <= 400 && tpot[i] <= 20 && e2e[i] <= 500;
    EXPECT_GT(within, 0);
    EXPECT_LT(within, kRequests);
    EXPECT_EQ(report.num_within_level(), within);
    if (concurrency == 1) {
      double all = 1000.0 * (kRequests - 1);  // the last stream's end is not waited for
      for (const double one : e2e) all += one;
      EXPECT_NEAR(report.seconds, all / 1e3, 1e-9);
    }
  }
}

TEST(LoadRunTest, InAnOpenLoopTimesCountFromWhenARequestWasDue) {
  // One user, who is late more and more: requests come faster than they are answered.
  KnownServer server;
  const LoadReport report =
      Measure(Single(40), {.concurrency = 1, .request_rate = 2, .seed = kSeed}, server);
  ASSERT_EQ(report.good.size(), 40u);
  double free_at = 0, last_due = 0;
  for (size_t i = 0; i < report.good.size(); ++i) {
    const MeasuredRequest& one = report.good[i];
    const double sent = std::max(one.due_ms, free_at);
    EXPECT_GT(one.due_ms, last_due);
    EXPECT_NEAR(one.late_ms, sent - one.due_ms, 1e-6);
    EXPECT_NEAR(one.ttft_ms, sent - one.due_ms + Delays(i)[0], 1e-6);
    free_at = one.due_ms + one.e2e_ms + 1000;
    last_due = one.due_ms;
  }
  EXPECT_GT(report.good.back().late_ms, 10'000);
  // 40 arrivals at 2 a second take 20 s, give or take.
  EXPECT_GT(last_due, 10'000);
  EXPECT_LT(last_due, 40'000);
}

TEST(LoadRunTest, ATurnBeginsWithAllThatCameBeforeIt) {
  const TraceShape shape = {.num_conversations = 2,
                            .turns = 3,
                            .input = {4, 4},
                            .output = {5, 5},
                            .shared_prefix_tokens = 6,
                            .vocab_size = 100,
                            .seed = 9};
  for (const bool tells_ids : {true, false}) {
    KnownServer server;
    server.tells_ids_ = tells_ids;
    const LoadReport report =
        Measure(shape, {.concurrency = 2, .seed = kSeed, .vocab_size = 100}, server);
    ASSERT_EQ(report.good.size(), 6u);
    std::multiset<int32_t> attainable, expected;
    for (const MeasuredRequest& one : report.good) attainable.insert(*one.attainable_tokens);
    for (uint64_t number = 0; number < 6; ++number) {
      const std::vector<uint32_t>& prompt = server.prompts_[number];
      if (number % 3 == 0) {
        EXPECT_EQ(prompt.size(), 10u);
        expected.insert(number == 0 ? 0 : 6);
        continue;
      }
      const std::vector<uint32_t>& before = server.prompts_[number - 1];
      const size_t answer = tells_ids ? Delays(number - 1).size() : 5;
      ASSERT_EQ(prompt.size(), before.size() + answer + 4);
      EXPECT_TRUE(std::equal(before.begin(), before.end(), prompt.begin()));
      if (tells_ids) {
        for (size_t i = 0; i < answer; ++i) EXPECT_EQ(prompt[before.size() + i], i);
      }
      // The last token of an answer has no cache; a stand-in's tokens are news to the server.
      expected.insert(static_cast<int32_t>(before.size() + (tells_ids ? answer - 1 : 0)));
    }
    EXPECT_EQ(attainable, expected);
  }
}

TEST(LoadRunTest, FailuresAreCountedByWhatTheySay) {
  KnownServer server;
  server.fails_ = 4;  // the second turn of the second conversation
  TraceShape shape = Single(3);
  shape.turns = 3;
  const LoadReport report =
      Measure(shape, {.concurrency = 1, .seed = kSeed, .vocab_size = 100}, server);
  EXPECT_EQ(report.good.size(), 7u);
  EXPECT_THAT(report.failures,
              ElementsAre(std::pair("ABORTED: not sent: a turn before it failed", 1),
                          std::pair("UNAVAILABLE: gone", 1)));
  server.all_fail_ = true;
  const LoadReport none = Measure(Single(5), {.concurrency = 2, .seed = kSeed}, server);
  EXPECT_EQ(none.good.size(), 0u);
  EXPECT_EQ(none.num_failed(), 5);
  EXPECT_GE(none.seconds, 0.011);
}

}  // namespace
}  // namespace cli
