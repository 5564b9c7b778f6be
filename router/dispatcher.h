// Dispatcher: takes requests from the queue to workers.  Selection and charging are one step on the
// loop's thread, so that two decisions never see the same room.
//
// It runs (Pump) whenever a worker's load or state changes, when a charge is released and, while
// anybody waits, on a timer.  Owned by the loop's thread.

#ifndef ROUTER_DISPATCHER_H_
#define ROUTER_DISPATCHER_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "block_hash/block_hash.h"
#include "router/admission.h"
#include "router/circuit_breakers.h"
#include "router/event_loop.h"
#include "router/load_ledger.h"
#include "router/metrics.h"
#include "router/placement.h"
#include "router/prefix_index.h"
#include "router/request.h"
#include "router/routing_policy.h"
#include "router/wait_estimate.h"
#include "router/worker_registry.h"

namespace router {

// A request as the dispatcher sees it.
class Waiting {
 public:
  virtual ~Waiting() = default;
  // It has left the queue and is charged; the receiver releases the charges.
  virtual void OnPlaced(const Placement& placement) = 0;
  // It has left the queue: nobody can serve it, and has not been able to for `worker_wait`, or not
  // for a while though every worker is there.  `status` says why: kInvalidArgument, kUnavailable,
  // kFailedPrecondition / INCOMPATIBLE, or kResourceExhausted / DEADLINE_UNREACHABLE: its first
  // token would come later than it may.
  virtual void OnUnplaceable(const absl::Status& status) = 0;

  AdmissionQueue::Entry entry;  // set by the owner; untouched while it waits
  const PreparedRequest* request = nullptr;
  WorkerSlot held_at = -1;  // the prefill worker that holds the computed prompt; -1: none
  // Workers that have failed this request, by (slot, epoch): avoided where another will do, and not
  // used at all before the time given.
  absl::flat_hash_map<std::pair<WorkerSlot, std::string>, absl::Time> avoid;

 private:
  friend class Dispatcher;
  absl::Time unplaceable_since_ = absl::InfiniteFuture();
  bool only_broken_ = false;  // the workers that could serve it have open breakers
  absl::flat_hash_map<int32_t, std::vector<block_hash::BlockHash>> chains_;  // by block size
};

class Dispatcher final {
 public:
  struct Options {
    AdmissionQueue::Limits queue;
    PolicyOptions policy;
    uint64_t hash_seed = 0;
    // How long nobody may be able to serve a request: while every worker is there, and while one is
    // away that may come back.
    absl::Duration grace = absl::Seconds(2);
    absl::Duration worker_wait = absl::Seconds(30);
    absl::Duration max_ttft = {};  // of a request that states none; 0: any
  };

  // Everything must outlive the dispatcher.
  Dispatcher(const Options& options, EventLoop* loop, WorkerRegistry* registry, PrefixIndex* index,
             LoadLedger* ledger, CircuitBreakers* breakers, RouterMetrics* metrics);
  ~Dispatcher();

  // Enters the queue; placed or refused later, never from inside this call.
  // Errors: kResourceExhausted / QUEUE_FULL, TENANT_LIMIT or DEADLINE_UNREACHABLE, with a time to
  // come back; kInvalidArgument / CALL_TOO_LARGE.
  absl::Status Enter(Waiting* waiting);
  // Comes back after a failed try: keeps its place, is not refused for lack of room.
  void Return(Waiting* waiting);
  void Leave(Waiting* waiting);
  // Leaves and does not come back.
  void Ended(Waiting* waiting);
  // The longest time from its arrival to its first token; infinite: any.
  absl::Duration MaxTtft(const Waiting& waiting) const;
  // For a request that has waited so long.
  absl::Status TooLate(const Waiting& waiting) const;
  // Its first token has come, `observed` after it was placed.
  void OnFirstToken(const Waiting& waiting, const Placement& placement, absl::Duration observed);

  void Release(LoadLedger::ChargeId charge);
  // Something has changed: look at the queue soon.
  void SchedulePump();

  const AdmissionQueue& queue() const { return queue_; }

 private:
  void Pump();
  // `backing_off`: only workers that have just failed this request could serve it.
  Decision Decide(Waiting* waiting, std::vector<WorkerView>* views, absl::Time now,
                  bool* backing_off);
  void BeginAtBreakers(const Waiting& waiting, const Placement& placement, absl::Time now);
  int64_t TokensBefore(const Waiting& waiting) const;
  // OK, or why the choice's first token would come too late.
  absl::Status CheckTtft(const Waiting& waiting, const Choice& choice,
                         const std::vector<WorkerView>& views, absl::Time now) const;
  // Only broken workers are left, and it has waited for them as long as it can.
  bool IsLastResort(const Waiting& waiting, absl::Time now) const;
  const std::vector<block_hash::BlockHash>& Chain(Waiting* waiting, int32_t block_size);
  // Nobody can serve it now; true: it is worth waiting for a change.
  bool MayBePlaceableYet(const Waiting& waiting, absl::Time now) const;
  absl::Status Unplaceable(const Waiting& waiting) const;

  const Options options_;
  EventLoop* const loop_;
  WorkerRegistry* const registry_;
  PrefixIndex* const index_;
  LoadLedger* const ledger_;
  CircuitBreakers* const breakers_;
  RouterMetrics* const metrics_;
  const block_hash::BlockHasher hasher_;
  AdmissionQueue queue_;
  PolicyState policy_state_;
  absl::flat_hash_map<AdmissionQueue::Entry*, Waiting*> waiting_;
  absl::flat_hash_map<std::string, WaitEstimate> estimates_;  // by model
  bool pump_scheduled_ = false;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace router

#endif  // ROUTER_DISPATCHER_H_
