// What the routing policy does to a whole cluster, on a virtual clock: nobody is herded, starved or
// believed too long.

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "block_hash/block_hash.h"
#include "gtest/gtest.h"
#include "tests/fakes/cluster_simulation.h"

namespace router {
namespace {

constexpr int32_t kBlock = 64;

std::vector<WorkerModel> Cluster(int prefills, int decodes) {
  std::vector<WorkerModel> workers(prefills, PrefillModel());
  workers.insert(workers.end(), decodes, DecodeModel());
  return workers;
}

// Chains of prompts that share nothing but what they are told to.
class Prompts {
 public:
  // `prefix`: another chain, whose first `shared` blocks this one begins with.
  std::shared_ptr<const Chain> Make(int32_t tokens, const Chain* prefix = nullptr,
                                    size_t shared = 0) {
    auto chain = std::make_shared<Chain>();
    if (prefix != nullptr) chain->assign(prefix->begin(), prefix->begin() + shared);
    while (chain->size() < static_cast<size_t>(tokens / kBlock)) {
      block_hash::BlockHash hash;
      for (uint8_t& byte : hash.bytes) byte = static_cast<uint8_t>(random_());
      chain->push_back(hash);
    }
    return chain;
  }

 private:
  std::mt19937_64 random_{7};
};

absl::Time After(double seconds) { return ClusterSimulation::Start() + absl::Seconds(seconds); }

// Requests of one kind at a Poisson rate.
template <typename ChainOf>
void SubmitPoisson(ClusterSimulation* cluster, double rate, int count, int32_t prompt_tokens,
                   int32_t output_tokens, ChainOf chain, int routers = 1) {
  std::mt19937_64 random(11);
  std::exponential_distribution<double> gap(rate);
  double time = 0.1;
  for (int i = 0; i < count; ++i) {
    cluster->Submit({.arrival = After(time),
                     .prompt_tokens = prompt_tokens,
                     .output_tokens = output_tokens,
                     .chain = chain(i),
                     .router = i % routers});
    time += gap(random);
  }
}

int32_t MostAssigned(const ClusterSimulation& cluster, WorkerSlot from, WorkerSlot to) {
  int32_t most = 0;
  for (WorkerSlot slot = from; slot < to; ++slot) {
    most = std::max(most, cluster.num_assigned(slot));
  }
  return most;
}

int NumDone(const ClusterSimulation& cluster) {
  return static_cast<int>(std::count_if(cluster.outcomes().begin(), cluster.outcomes().end(),
                                        [](const SimulatedOutcome& one) { return one.done; }));
}

double PercentileTtft(const ClusterSimulation& cluster, double share) {
  std::vector<double> ttfts;
  for (size_t id = 0; id < cluster.requests().size(); ++id) {
    ttfts.push_back(cluster.TtftMs(static_cast<int>(id)));
  }
  std::sort(ttfts.begin(), ttfts.end());
  return ttfts[static_cast<size_t>(share * (ttfts.size() - 1))];
}

// 400 equal prefixes at once, 100 + 100 workers: a worker takes only what it would finish about as
// soon as an idle one that has to compute the prefix anew.
TEST(RoutingSimulationTest, ABurstOfEqualPrefixesIsNotHerded) {
  for (const bool charge : {true, false}) {
    ClusterSimulation cluster({.charge = charge}, Cluster(100, 100));
    Prompts prompts;
    constexpr int kRequests = 400;
    constexpr int32_t kTokens = 8192;
    const auto prefix = prompts.Make(kTokens);
    for (int i = 0; i < kRequests; ++i) {
      cluster.Submit({.arrival = After(0.1),
                      .prompt_tokens = kTokens,
                      .output_tokens = 32,
                      .chain = prompts.Make(kTokens, prefix.get(), 7168 / kBlock)});
    }
    cluster.Run();
    EXPECT_EQ(NumDone(cluster), kRequests);
    const int32_t most = std::max(MostAssigned(cluster, 0, 100), MostAssigned(cluster, 100, 200));
    // Computing the prefix takes as long as the rest of seven; and four each is the average.
    if (charge) {
      EXPECT_LE(most, 4 + 8);
      EXPECT_GE(cluster.hit_rate(), 0.5);
    } else {
      EXPECT_GT(most, 4 + 8) << "the simulation would not show herding";
    }
  }
}

// One request at a time sees no load anywhere.
TEST(RoutingSimulationTest, SerialTrafficDoesNotStickToOneWorker) {
  ClusterSimulation cluster({}, Cluster(8, 8));
  Prompts prompts;
  constexpr int kRequests = 800;
  for (int i = 0; i < kRequests; ++i) {
    cluster.Submit({.arrival = After(0.1 + i * 0.25),
                    .prompt_tokens = 2048,
                    .output_tokens = 4,
                    .chain = prompts.Make(2048)});
  }
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  for (WorkerSlot slot = 0; slot < 16; ++slot) {
    EXPECT_GT(cluster.num_assigned(slot), kRequests / 8 / 2) << slot;
    EXPECT_LT(cluster.num_assigned(slot), kRequests / 8 * 2) << slot;
  }
}

// A prefill worker that is four times as slow as it says gets less, and few requests wait for it.
TEST(RoutingSimulationTest, ASlowWorkerGetsLess) {
  std::vector<WorkerModel> workers = Cluster(16, 8);
  workers[3].slowness = 4;
  ClusterSimulation cluster({}, workers);
  Prompts prompts;
  constexpr int kRequests = 6000;
  // 100 ms a prompt and worker: 60 % of what the sixteen can do.
  SubmitPoisson(&cluster, 0.6 * 16 / 0.102, kRequests, 2048, 16,
                [&](int) { return prompts.Make(2048); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  const double average = kRequests / 16.0;
  EXPECT_LT(cluster.num_assigned(3), 0.5 * average);
  EXPECT_LT(PercentileTtft(cluster, 0.9), 500);
}

// A worker that reports a tenth of its load does not draw everything to itself.
TEST(RoutingSimulationTest, AWorkerThatLiesAboutItsLoadIsNotFlooded) {
  std::vector<WorkerModel> workers = Cluster(16, 8);
  workers[3].admitted_load = 0.1;
  workers[20].admitted_load = 0.1;
  ClusterSimulation cluster({}, workers);
  Prompts prompts;
  constexpr int kRequests = 6000;
  SubmitPoisson(&cluster, 0.7 * 16 / 0.102, kRequests, 2048, 64,
                [&](int) { return prompts.Make(2048); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  EXPECT_LT(cluster.num_assigned(3), 1.5 * kRequests / 16);
  EXPECT_LT(cluster.num_assigned(20), 2 * kRequests / 8);
  EXPECT_LT(PercentileTtft(cluster, 0.99), 2000);
}

// New workers have nothing cached, and get their share of traffic with a common prefix all the
// same.
TEST(RoutingSimulationTest, ANewEmptyWorkerGetsWork) {
  ClusterSimulation cluster({}, Cluster(4, 4));
  Prompts prompts;
  constexpr int kRequests = 4000;
  const double rate = 0.8 * 4 / 0.055;  // of the first four, with the prefix cached
  const WorkerSlot prefill = cluster.AddWorker(After(kRequests / rate / 2), PrefillModel());
  const WorkerSlot decode = cluster.AddWorker(After(kRequests / rate / 2), DecodeModel());
  const auto prefix = prompts.Make(1024);
  SubmitPoisson(&cluster, rate, kRequests, 2048, 64,
                [&](int) { return prompts.Make(2048, prefix.get(), 1024 / kBlock); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  const double share = kRequests / 2 / 5.0;
  EXPECT_GT(cluster.num_assigned(prefill), 0.5 * share);
  EXPECT_LT(cluster.num_assigned(prefill), 2 * share);
  EXPECT_GT(cluster.num_assigned(decode), 0.5 * share);
  EXPECT_LT(cluster.num_assigned(decode), 2 * share);
}

TEST(RoutingSimulationTest, ADrainingWorkerGetsNothingNewAndNothingIsLost) {
  ClusterSimulation cluster({}, Cluster(4, 4));
  Prompts prompts;
  constexpr int kRequests = 2000;
  const double rate = 0.5 * 4 / 0.102;
  cluster.Drain(After(20), 2);
  cluster.Drain(After(20), 6);
  SubmitPoisson(&cluster, rate, kRequests, 2048, 64, [&](int) { return prompts.Make(2048); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  int before = 0;
  for (int id = 0; id < kRequests; ++id) {
    const SimulatedOutcome& outcome = cluster.outcomes()[id];
    before += outcome.prefill == 2;
    if (cluster.requests()[id].arrival > After(20)) {
      EXPECT_NE(outcome.prefill, 2);
      EXPECT_NE(outcome.decode, 6);
    }
  }
  EXPECT_GT(before, 0);
}

// Conversations over a common system prompt: the hit rate of 2 and 4 routers beside that of one.
TEST(RoutingSimulationTest, SeveralRoutersHitNearlyAsOftenAsOne) {
  std::map<int, double> hit_rate;
  for (const int routers : {1, 2, 4}) {
    ClusterSimulation cluster({.num_routers = routers}, Cluster(8, 4));
    Prompts prompts;
    const auto system = prompts.Make(1024);
    // 200 conversations of 6 turns, interleaved; any router gets any turn.
    std::vector<std::shared_ptr<const Chain>> last(200, system);
    constexpr int kTurns = 6;
    SubmitPoisson(
        &cluster, 20, 200 * kTurns, 4096, 32,
        [&](int i) {
          auto& before = last[i % 200];
          const size_t shared = std::min<size_t>(before->size(), 16 + 8 * (i / 200));
          before = prompts.Make(4096, before.get(), shared);
          return before;
        },
        routers);
    cluster.Run();
    EXPECT_EQ(NumDone(cluster), 200 * kTurns);
    hit_rate[routers] = cluster.hit_rate();
    EXPECT_LT(MostAssigned(cluster, 0, 8), 2 * 200 * kTurns / 8) << routers << " routers";
  }
  EXPECT_GT(hit_rate[1], 0.3);
  EXPECT_NEAR(hit_rate[2], hit_rate[1], 0.03);
  EXPECT_NEAR(hit_rate[4], hit_rate[1], 0.03);
}

}  // namespace
}  // namespace router
