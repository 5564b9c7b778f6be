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
// Of most clusters here; decode workers have the slots behind the prefill workers.
constexpr int kPrefills = 128;
constexpr int kDecodes = 64;
constexpr double kPromptSeconds = 0.102;  // a prompt of 2048 tokens

std::vector<WorkerModel> Cluster(int prefills = kPrefills, int decodes = kDecodes) {
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
  ClusterSimulation cluster({.report_period = absl::Milliseconds(200)}, Cluster());
  Prompts prompts;
  constexpr int kRequests = 20 * kPrefills;
  for (int i = 0; i < kRequests; ++i) {
    cluster.Submit({.arrival = After(0.1 + i * 0.15),  // the one before has ended
                    .prompt_tokens = 2048,
                    .output_tokens = 2,
                    .chain = prompts.Make(2048)});
  }
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  for (WorkerSlot slot = 0; slot < kPrefills + kDecodes; ++slot) {
    const int share = kRequests / (slot < kPrefills ? kPrefills : kDecodes);
    EXPECT_GT(cluster.num_assigned(slot), share / 4) << slot;
    EXPECT_LT(cluster.num_assigned(slot), share * 5 / 2) << slot;
  }
}

// Prefill workers that are four times as slow as they say get less, and few requests wait for them.
TEST(RoutingSimulationTest, ASlowWorkerIsFoundOutAndGetsLess) {
  const std::vector<WorkerSlot> slow = {3, 40, 77, 101};
  std::map<bool, int32_t> assigned;  // by whether its speed is observed: of the slow ones the most
  for (const bool observe : {true, false}) {
    ClusterSimulation cluster({.observe_speed = observe}, Cluster());
    for (const WorkerSlot slot : slow) cluster.SetSlowness(cluster.Start(), slot, 4);
    Prompts prompts;
    constexpr int kRequests = 24 * kPrefills;
    SubmitPoisson(&cluster, 0.6 * kPrefills / kPromptSeconds, kRequests, 2048, 16,
                  [&](int) { return prompts.Make(2048); });
    cluster.Run();
    EXPECT_EQ(NumDone(cluster), kRequests);
    for (const WorkerSlot slot : slow) {
      assigned[observe] = std::max(assigned[observe], cluster.num_assigned(slot));
    }
    if (observe) {
      EXPECT_LT(PercentileTtft(cluster, 0.99), 300);
    }
  }
  EXPECT_LT(assigned[true], 24 / 3);
  EXPECT_GT(assigned[false], assigned[true]) << "its queue alone would have told as much";
}

// A worker that was slow for a while has its share again a minute later.
TEST(RoutingSimulationTest, AWorkerThatIsFastAgainIsRegained) {
  ClusterSimulation cluster({}, Cluster(16, 8));
  Prompts prompts;
  cluster.SetSlowness(After(0), 3, 4);
  cluster.SetSlowness(After(10), 3, 1);
  constexpr double kRate = 0.6 * 16 / kPromptSeconds;
  constexpr double kLater = 60;
  constexpr double kEnd = 80;
  SubmitPoisson(&cluster, kRate, static_cast<int>(kRate * kEnd), 2048, 16,
                [&](int) { return prompts.Make(2048); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), static_cast<int>(kRate * kEnd));
  int32_t later = 0;
  for (size_t id = 0; id < cluster.requests().size(); ++id) {
    later += cluster.requests()[id].arrival > After(kLater) && cluster.outcomes()[id].prefill == 3;
  }
  EXPECT_GT(later, 0.7 * kRate * (kEnd - kLater) / 16);
}

// Workers that report a tenth of their load do not draw everything to themselves.
TEST(RoutingSimulationTest, AWorkerThatLiesAboutItsLoadIsNotFlooded) {
  std::vector<WorkerModel> workers = Cluster();
  for (const WorkerSlot slot : {3, 77, kPrefills + 20}) workers[slot].admitted_load = 0.1;
  ClusterSimulation cluster({}, workers);
  Prompts prompts;
  constexpr int kRequests = 30 * kPrefills;
  SubmitPoisson(&cluster, 0.7 * kPrefills / kPromptSeconds, kRequests, 2048, 64,
                [&](int) { return prompts.Make(2048); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  EXPECT_LT(cluster.num_assigned(3), 2.0 * kRequests / kPrefills);
  EXPECT_LT(cluster.num_assigned(77), 2.0 * kRequests / kPrefills);
  EXPECT_LT(cluster.num_assigned(kPrefills + 20), 4.0 * kRequests / kDecodes);
  EXPECT_LT(PercentileTtft(cluster, 0.99), 1000);
}

// New workers have nothing cached, and get their share of traffic with a common prefix all the
// same.
TEST(RoutingSimulationTest, ANewEmptyWorkerGetsWork) {
  constexpr int kNewPrefills = kPrefills / 4;
  constexpr int kNewDecodes = kDecodes / 4;
  ClusterSimulation cluster({}, Cluster(kPrefills - kNewPrefills, kDecodes - kNewDecodes));
  Prompts prompts;
  constexpr int kRequests = 32 * kPrefills;
  // More than the first ones can do, with the prefix cached; less than all can.
  const double rate = 1.1 * (kPrefills - kNewPrefills) / 0.052;
  const absl::Time half = After(kRequests / rate / 2);
  std::vector<WorkerSlot> prefills, decodes;
  for (int i = 0; i < kNewPrefills; ++i)
    prefills.push_back(cluster.AddWorker(half, PrefillModel()));
  for (int i = 0; i < kNewDecodes; ++i) decodes.push_back(cluster.AddWorker(half, DecodeModel()));
  const auto prefix = prompts.Make(1024);
  SubmitPoisson(&cluster, rate, kRequests, 2048, 16,
                [&](int) { return prompts.Make(2048, prefix.get(), 1024 / kBlock); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  const auto expect_share = [&](const std::vector<WorkerSlot>& slots, double share) {
    for (const WorkerSlot slot : slots) {
      EXPECT_GT(cluster.num_assigned(slot), 0.5 * share) << slot;
      EXPECT_LT(cluster.num_assigned(slot), 2 * share) << slot;
    }
  };
  expect_share(prefills, kRequests / 2.0 / kPrefills);
  expect_share(decodes, kRequests / 2.0 / kDecodes);
}

TEST(RoutingSimulationTest, DrainingWorkersGetNothingNewAndNothingIsLost) {
  ClusterSimulation cluster({}, Cluster());
  Prompts prompts;
  constexpr int kRequests = 24 * kPrefills;
  const double rate = 0.5 * kPrefills / kPromptSeconds;
  const absl::Time half = After(kRequests / rate / 2);
  const auto drains = [](WorkerSlot slot) { return slot % 8 == 2; };
  for (WorkerSlot slot = 0; slot < kPrefills + kDecodes; ++slot) {
    if (drains(slot)) cluster.Drain(half, slot);
  }
  SubmitPoisson(&cluster, rate, kRequests, 2048, 64, [&](int) { return prompts.Make(2048); });
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  int before = 0;
  for (int id = 0; id < kRequests; ++id) {
    const SimulatedOutcome& outcome = cluster.outcomes()[id];
    before += drains(outcome.prefill);
    if (cluster.requests()[id].arrival > half) {
      EXPECT_FALSE(drains(outcome.prefill)) << id;
      EXPECT_FALSE(drains(outcome.decode)) << id;
    }
  }
  EXPECT_GT(before, kRequests / 32);
}

// Conversations over a common system prompt: 2 and 4 routers beside one.
TEST(RoutingSimulationTest, SeveralRoutersHitNearlyAsOftenAsOneAndHerdNobody) {
  constexpr int kConversations = 600;
  constexpr int kTurns = 4;
  std::map<int, double> hit_rate;
  std::map<int, int32_t> most;
  for (const int routers : {1, 2, 4}) {
    ClusterSimulation cluster({.num_routers = routers}, Cluster());
    Prompts prompts;
    std::mt19937 random(3);
    // In every turn another order; any router gets any turn.
    std::vector<int> order(kConversations);
    std::iota(order.begin(), order.end(), 0);
    std::vector<std::shared_ptr<const Chain>> last(kConversations, prompts.Make(1024));
    SubmitPoisson(
        &cluster, 320, kConversations * kTurns, 4096, 32,
        [&](int i) {
          if (i % kConversations == 0) std::shuffle(order.begin(), order.end(), random);
          auto& before = last[order[i % kConversations]];
          const size_t shared = std::min<size_t>(before->size(), 16 + 8 * (i / kConversations));
          before = prompts.Make(4096, before.get(), shared);
          return before;
        },
        routers);
    cluster.Run();
    EXPECT_EQ(NumDone(cluster), kConversations * kTurns);
    hit_rate[routers] = cluster.hit_rate();
    most[routers] = MostAssigned(cluster, 0, kPrefills);
  }
  EXPECT_GT(hit_rate[1], 0.3);
  for (const int routers : {2, 4}) {
    EXPECT_NEAR(hit_rate[routers], hit_rate[1], 0.03) << routers;
    EXPECT_LT(most[routers], 1.25 * most[1]) << routers;
  }
}

// The same burst through four routers at once, which know nothing of each other yet.
TEST(RoutingSimulationTest, SeveralRoutersDoNotHerdABurst) {
  ClusterSimulation cluster({.num_routers = 4}, Cluster(100, 100));
  Prompts prompts;
  constexpr int kRequests = 400;
  constexpr int32_t kTokens = 8192;
  const auto prefix = prompts.Make(kTokens);
  for (int i = 0; i < kRequests; ++i) {
    cluster.Submit({.arrival = After(0.1),
                    .prompt_tokens = kTokens,
                    .output_tokens = 32,
                    .chain = prompts.Make(kTokens, prefix.get(), 7168 / kBlock),
                    .router = i % 4});
  }
  cluster.Run();
  EXPECT_EQ(NumDone(cluster), kRequests);
  // Each takes a worker for as many as one router would; now and then two, or three, the same.
  EXPECT_LE(MostAssigned(cluster, 0, 200), 3 * (4 + 8));
  EXPECT_GE(cluster.hit_rate(), 0.5);
}

}  // namespace
}  // namespace router
