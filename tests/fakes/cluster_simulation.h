// ClusterSimulation: routers and workers on a virtual clock, to see what a routing policy does to
// hundreds of workers in milliseconds of real time.
//
// The routers are the real ones as far as decisions go: PrefixIndex, LoadLedger and Choose, each
// router with its own, fed by reports and events of the workers as over the wire.  The workers are
// models: a prefill worker computes one prompt at a time, a decode worker runs steps over all its
// sequences; both keep an LRU cache of blocks.  Deterministic: equal options give equal outcomes.
//
// One thread.

#ifndef TESTS_FAKES_CLUSTER_SIMULATION_H_
#define TESTS_FAKES_CLUSTER_SIMULATION_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <vector>

#include "absl/time/time.h"
#include "block_hash/block_hash.h"
#include "router/load_ledger.h"
#include "router/placement.h"
#include "router/prefill_speeds.h"
#include "router/prefix_index.h"
#include "router/routing_policy.h"
#include "tests/fakes/simulated_worker.h"

namespace router {

using Chain = std::vector<block_hash::BlockHash>;

struct SimulatedRequest {
  absl::Time arrival;
  int32_t prompt_tokens = 0;
  int32_t output_tokens = 1;
  std::shared_ptr<const Chain> chain;  // of the prompt's full blocks
  int router = 0;
};

struct SimulatedOutcome {
  bool done = false;
  WorkerSlot prefill = -1;  // -1: computed where it was decoded
  WorkerSlot decode = -1;
  int32_t reused_tokens = 0;  // of the prompt, where it was computed
  absl::Time first_token;
  absl::Time end;
};

class ClusterSimulation final {
 public:
  struct Options {
    PolicyOptions policy = {};
    int num_routers = 1;
    uint64_t seed = 1;
    absl::Duration report_period = absl::Milliseconds(50);
    absl::Duration event_delay = absl::Milliseconds(5);
    // Off: the routers forget what they have just decided, and see reports alone.
    bool charge = true;
    // Off: the routers believe what workers say of their speed.
    bool observe_speed = true;
  };

  ClusterSimulation(const Options& options, const std::vector<WorkerModel>& workers);
  ~ClusterSimulation();

  static absl::Time Start() { return absl::UnixEpoch(); }

  // Before Run.  Ids count from 0.
  int Submit(SimulatedRequest request);
  // At `time` a worker joins; returns its slot.
  WorkerSlot AddWorker(absl::Time time, const WorkerModel& model);
  // From `time` on it takes so many times as long as it says.
  void SetSlowness(absl::Time time, WorkerSlot slot, double slowness);
  // From `time` on it gets nothing new.
  void Drain(absl::Time time, WorkerSlot slot);

  // Until every request has ended, or nothing happens any more.
  void Run();

  const std::vector<SimulatedRequest>& requests() const { return requests_; }
  const std::vector<SimulatedOutcome>& outcomes() const { return outcomes_; }
  double TtftMs(int id) const;
  // Requests that went to the worker, for either half.
  int32_t num_assigned(WorkerSlot slot) const;
  // Share of all prompt tokens that nobody had to compute.
  double hit_rate() const;

 private:
  struct Router {
    explicit Router(uint32_t seed) : index({}), state{.random = std::minstd_rand(seed)} {}
    PrefixIndex index;
    LoadLedger ledger;
    PrefillSpeeds speeds;
    PolicyState state;
    std::deque<int> waiting;
    std::vector<WorkerLoad> loads;  // by slot; as last reported
  };

  void At(absl::Time time, std::function<void()> action);
  void Join(WorkerSlot slot);
  void Report(WorkerSlot slot);
  void Publish(WorkerSlot slot);
  void Pump(int router);
  bool TryPlace(int router, int id);
  std::vector<WorkerView> Views(Router& router, const SimulatedRequest& request);
  void Forward(int id, const Placement& placement);
  void StartPrompt(WorkerSlot slot);
  void OnComputed(WorkerSlot slot);
  void Decode(int id);
  void StartStep(WorkerSlot slot);
  void End(int id);

  const Options options_;
  absl::Time now_ = Start();
  uint64_t next_event_ = 0;
  struct Event {
    absl::Time time;
    uint64_t number;
    std::function<void()> action;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : number > other.number;
    }
  };
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::unique_ptr<Router>> routers_;
  std::vector<std::unique_ptr<SimulatedWorker>> workers_;  // by slot
  std::vector<SimulatedRequest> requests_;
  std::vector<SimulatedOutcome> outcomes_;
  std::vector<Placement> placements_;  // by request
  int num_done_ = 0;
};

}  // namespace router

#endif  // TESTS_FAKES_CLUSTER_SIMULATION_H_
