// Does routing by cost pay?  A seeded trace of conversations over shared system prompts, with a
// known share that could be reused, through 8 prefill and 4 decode workers on a virtual clock
// (tests/fakes/cluster_simulation.h): hit rate and time to the first token of each policy, and of
// several routers side by side.
//
//   routing_policies [--conversations=400] [--load=0.6] [--report_ms=50]

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/fakes/cluster_simulation.h"

namespace {

using router::Chain;
using router::ClusterSimulation;

constexpr int32_t kBlock = 64;
constexpr int kPrefills = 8;
constexpr int kDecodes = 4;
constexpr int32_t kBlocks = 64000;  // a node's: the trace evicts little
// Tokens in and out of the average turn: 12k and 350.
constexpr int32_t kSystemTokens = 2048;
constexpr int kSystems = 20;
constexpr int32_t kTurnTokens = 2304;   // what a turn adds to its conversation
constexpr int32_t kFreshTokens = 6400;  // and to itself alone: documents that no later turn repeats
constexpr int32_t kOutputTokens = 350;

struct Trace {
  std::vector<router::SimulatedRequest> requests;
  double reusable = 0;  // share of the prompt tokens that an endless cache would hold
};

class TraceMaker {
 public:
  explicit TraceMaker(uint64_t seed) : random_(seed) {}

  Trace Make(int conversations, double requests_per_s) {
    std::vector<Chain> systems(kSystems);
    for (Chain& system : systems) Extend(&system, kSystemTokens);
    std::vector<bool> system_seen(kSystems, false);
    std::exponential_distribution<double> gap(requests_per_s / kMeanTurns);
    std::exponential_distribution<double> think(1.0 / 30);
    double prompt_tokens = 0, reusable_tokens = 0;
    Trace trace;
    double start = 0.1;
    for (int c = 0; c < conversations; ++c, start += gap(random_)) {
      const size_t which = random_() % kSystems;
      Chain history = systems[which];
      double time = start;
      const int turns = 1 + static_cast<int>(random_() % (2 * kMeanTurns - 1));
      for (int turn = 0; turn < turns; ++turn, time += 2 + think(random_)) {
        const size_t reused = turn > 0 || system_seen[which] ? history.size() : 0;
        system_seen[which] = true;
        Extend(&history, kTurnTokens);
        Chain prompt = history;
        Extend(&prompt, kFreshTokens);
        const auto tokens = static_cast<int32_t>(prompt.size()) * kBlock;
        prompt_tokens += tokens;
        reusable_tokens += static_cast<double>(reused) * kBlock;
        trace.requests.push_back({.arrival = ClusterSimulation::Start() + absl::Seconds(time),
                                  .prompt_tokens = tokens,
                                  .output_tokens = kOutputTokens,
                                  .chain = std::make_shared<const Chain>(std::move(prompt))});
      }
    }
    trace.reusable = reusable_tokens / prompt_tokens;
    return trace;
  }

  static constexpr int kMeanTurns = 3;

 private:
  void Extend(Chain* chain, int32_t tokens) {
    for (int32_t i = 0; i < tokens / kBlock; ++i) {
      block_hash::BlockHash hash;
      for (uint8_t& byte : hash.bytes) byte = static_cast<uint8_t>(random_());
      chain->push_back(hash);
    }
  }

  std::mt19937_64 random_;
};

void Row(const std::string& name, const Trace& trace, router::Policy policy, int routers,
         absl::Duration report_period) {
  ClusterSimulation::Options options;
  options.report_period = report_period;
  options.policy.policy = policy;
  options.num_routers = routers;
  std::vector<router::WorkerModel> workers(kPrefills, router::PrefillModel());
  workers.insert(workers.end(), kDecodes, router::DecodeModel());
  for (router::WorkerModel& worker : workers) worker.facts.num_blocks = kBlocks;
  ClusterSimulation cluster(options, workers);
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    router::SimulatedRequest request = trace.requests[i];
    request.router = static_cast<int>(i) % routers;
    cluster.Submit(std::move(request));
  }
  cluster.Run();
  std::vector<double> ttfts;
  double sum = 0;
  for (size_t id = 0; id < trace.requests.size(); ++id) {
    ttfts.push_back(cluster.TtftMs(static_cast<int>(id)));
    sum += ttfts.back();
  }
  std::sort(ttfts.begin(), ttfts.end());
  int32_t most = 0;
  for (router::WorkerSlot slot = 0; slot < kPrefills; ++slot) {
    most = std::max(most, cluster.num_assigned(slot));
  }
  std::printf("%-22s %6.1f %%   %8.0f %8.0f %8.0f   %6.2f\n", name.c_str(),
              100 * cluster.hit_rate(), sum / ttfts.size(), ttfts[ttfts.size() * 9 / 10],
              ttfts[ttfts.size() * 99 / 100],
              static_cast<double>(most) * kPrefills / trace.requests.size());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  int conversations = 400;
  double load = 0.6;
  double report_ms = 50;
  CLI::App app("compares routing policies on a virtual clock");
  app.add_option("--conversations", conversations)->check(CLI::PositiveNumber);
  app.add_option("--load", load, "share of what the prefill workers can compute without any reuse")
      ->check(CLI::Range(0.01, 2.0));
  app.add_option("--report_ms", report_ms, "between two load reports of a worker")
      ->check(CLI::Range(1.0, 60000.0));
  CLI11_PARSE(app, argc, argv);
  // The mean prompt: the history of the middle turn, and the turn's own.
  const double mean_tokens =
      kSystemTokens + TraceMaker::kMeanTurns / 2.0 * kTurnTokens + kFreshTokens;
  const double rate =
      load * kPrefills * router::PrefillModel().facts.prefill_tokens_per_s / mean_tokens;
  const Trace trace = TraceMaker(1).Make(conversations, rate);
  std::printf(
      "%zu requests at %.1f/s, %d prefill and %d decode workers; %.1f %% of the prompt "
      "tokens were in an earlier prompt\n",
      trace.requests.size(), rate, kPrefills, kDecodes, 100 * trace.reusable);
  std::printf("%-22s %8s   %26s   %s\n", "", "hits", "TTFT ms: mean, p90, p99",
              "busiest / mean prefill worker");
  const absl::Duration period = absl::Milliseconds(report_ms);
  Row("cost", trace, router::Policy::kCost, 1, period);
  Row("least load", trace, router::Policy::kLeastLoad, 1, period);
  Row("round robin", trace, router::Policy::kRoundRobin, 1, period);
  Row("cost, 2 routers", trace, router::Policy::kCost, 2, period);
  Row("cost, 4 routers", trace, router::Policy::kCost, 4, period);
  return 0;
}
