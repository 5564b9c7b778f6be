// When is a prompt better computed on its decode worker?  A prefill and a decode worker, real
// processes on this machine, with streams that decode all the while; prompts of several lengths and
// cached shares go once over the prefill worker and once the short way (--local_prefill_tokens).
// Prints the time to the first token of both ways and what both do to the streams' next token.
//
//   FERRY_BIN_DIR=build/release/bin local_prefill --model build/release/long_model [--streams 4]

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "status/check.h"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"

namespace {

using integration::FerrySystem;

constexpr int32_t kVocabSize = 500;
constexpr int32_t kBlock = 64;
const std::vector<int32_t> kLengths = {128, 256, 512, 1024, 2048, 4096};
const std::vector<double> kCachedShares = {0, 0.5, 0.9};

struct Options {
  std::string model;
  int streams = 4;
  int repeats = 5;
};

double Percentile(std::vector<double> values, double share) {
  FERRY_CHECK(!values.empty()) << "nothing was measured";
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

ferry::v1::GenerateRequest Request(std::vector<int32_t> prompt, uint32_t max_tokens) {
  ferry::v1::GenerateRequest request;
  for (const int32_t token : prompt) request.mutable_tokens()->add_ids(token);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

// Streams that decode until the end, and the gaps between their messages.
class Background {
 public:
  Background(ferry::Client* client, int streams) : client_(client) {
    for (int i = 0; i < streams; ++i) Start(i);
  }
  ~Background() {
    for (const auto& run : runs_) run->Cancel();
  }
  std::vector<double> TakeGaps() {
    std::lock_guard lock(mutex_);
    return std::exchange(gaps_ms_, {});
  }

 private:
  void Start(int i) {
    auto last = std::make_shared<absl::Time>(absl::InfiniteFuture());
    runs_.push_back(client_->Start(
        Request(integration::MakePrompt(16, 9000 + i, kVocabSize), 7500),
        [this, last](const ferry::v1::GenerateResponse&) {
          const absl::Time now = absl::Now();
          std::lock_guard lock(mutex_);
          if (*last < now) gaps_ms_.push_back(absl::ToDoubleMilliseconds(now - *last));
          *last = now;
          return true;
        },
        [](const absl::Status&) {}));
  }

  ferry::Client* const client_;
  std::mutex mutex_;  // guards gaps_ms_
  std::vector<double> gaps_ms_;
  std::vector<std::unique_ptr<ferry::RunningGeneration>> runs_;
};

struct Cell {
  double ttft_ms = 0;  // median
  double gap_ms = 0;   // 99th percentile of the streams' gaps meanwhile
};

Cell Measure(FerrySystem& system, const Options& options, int32_t length, double share,
             bool expect_local, uint32_t* salt) {
  Background background(&system.client(), options.streams);
  std::vector<double> ttfts, gaps;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    const auto cached = static_cast<int32_t>(share * length) / kBlock * kBlock;
    std::vector<int32_t> prompt = integration::MakePrompt(length, ++*salt, kVocabSize);
    if (cached > 0) {
      // One token more than the cached blocks, so that they are all kept.
      const std::vector<int32_t> prefix(prompt.begin(), prompt.begin() + cached);
      auto primed = prefix;
      primed.push_back(1);
      const auto done = system.client().Complete(Request(primed, 1));
      FERRY_CHECK(done.ok()) << done.status();
    }
    (void)background.TakeGaps();
    const absl::Time start = absl::Now();
    absl::Time first = absl::InfiniteFuture();
    bool local = false;
    const absl::Status status = system.client().Generate(
        Request(prompt, 2), [&](const ferry::v1::GenerateResponse& response) {
          first = std::min(first, absl::Now());
          if (response.has_summary())
            local = response.summary().prefill_worker() == response.summary().decode_worker();
          return true;
        });
    FERRY_CHECK(status.ok()) << status;
    FERRY_CHECK(local == expect_local) << "the prompt went the other way";
    ttfts.push_back(absl::ToDoubleMilliseconds(first - start));
    for (const double gap : background.TakeGaps()) gaps.push_back(gap);
  }
  return {Percentile(ttfts, 0.5), gaps.empty() ? 0 : Percentile(gaps, 0.99)};
}

std::vector<Cell> MeasureAll(const Options& options, bool local) {
  integration::SystemOptions system_options;
  system_options.model_dir = options.model;
  system_options.router_flags = {absl::StrCat("--local_prefill_tokens=", local ? 1 << 20 : 1),
                                 "--log_level=warn"};
  const auto system = FerrySystem::Start(system_options);
  std::vector<Cell> cells;
  uint32_t salt = 0;
  for (const double share : kCachedShares) {
    for (const int32_t length : kLengths) {
      cells.push_back(Measure(*system, options, length, share, local, &salt));
    }
  }
  return cells;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("compares prompts computed on the decode worker with prompts computed remotely");
  app.add_option("--model", options.model, "with room for 8192 tokens")->required();
  app.add_option("--streams", options.streams)->check(CLI::Range(0, 64));
  app.add_option("--repeats", options.repeats)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const std::vector<Cell> remote = MeasureAll(options, false);
  const std::vector<Cell> local = MeasureAll(options, true);
  std::printf("%d streams decode meanwhile; medians of %d; ms\n", options.streams, options.repeats);
  std::printf("%7s %7s   %22s   %22s\n", "cached", "tokens", "TTFT remote, local",
              "gap p99 remote, local");
  size_t i = 0;
  for (const double share : kCachedShares) {
    for (const int32_t length : kLengths) {
      std::printf("%6.0f%% %7d   %10.1f %10.1f%s   %10.1f %10.1f\n", 100 * share, length,
                  remote[i].ttft_ms, local[i].ttft_ms,
                  local[i].ttft_ms < remote[i].ttft_ms ? " <" : "  ", remote[i].gap_ms,
                  local[i].gap_ms);
      ++i;
    }
  }
  return 0;
}
