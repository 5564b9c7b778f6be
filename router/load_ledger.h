// LoadLedger: the load that this router has put on workers and that their reports may not show yet.
// A decision charges its workers at once, so that the next decision sees it ("select and charge");
// the sum of reported and uncommitted load is what the policy looks at, never one of them.  What a
// report shows of a request that has ended since is credited until the next report, so that a
// worker does not look busy with what it has done.
//
// Owned by the loop's thread.

#ifndef ROUTER_LOAD_LEDGER_H_
#define ROUTER_LOAD_LEDGER_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "router/prefix_index.h"

namespace router {

class LoadLedger final {
 public:
  using ChargeId = int64_t;  // 0: none

  struct Load {
    int64_t prefill_tokens = 0;  // to compute
    int32_t requests = 0;
    int32_t kv_blocks = 0;      // of the prompt
    int32_t growth_blocks = 0;  // that the output may need: until the end, no report shows it

    Load& operator+=(const Load& other);
    Load& operator-=(const Load& other);
    friend bool operator==(const Load&, const Load&) = default;
  };

  ChargeId Charge(WorkerSlot slot, const Load& load, absl::Time now);
  // The worker has what was charged: two reports from now its own numbers contain it (the next one
  // may have been written before).  Growth stays until Release.
  void Commit(ChargeId id);
  // Takes the rest of the charge back, and what the last report shows of it.  0 and unknown ids are
  // ignored.
  void Release(ChargeId id);
  void OnReport(WorkerSlot slot);

  // What the worker's reports do not show; negative where they show what is over.
  Load uncommitted(WorkerSlot slot) const;
  // Charged and not released: that many the worker has, whatever it says.
  int32_t requests_in_flight(WorkerSlot slot) const;
  // Requests sent to the worker lately, each counting e^(-age / 2 s): breaks ties when a client
  // that sends one request at a time sees no load anywhere.
  double recent_assignments(WorkerSlot slot, absl::Time now) const;
  size_t num_charges() const { return charges_.size(); }

 private:
  struct Entry {
    WorkerSlot slot = 0;
    Load load;
    Load shown;                      // what reports show of it, once they do
    int reports_until_visible = -1;  // -1: not committed
  };
  struct Worker {
    Load load;
    Load credits;  // in `load`, until the next report
    int32_t requests_in_flight = 0;
    double recent = 0;
    absl::Time recent_at = absl::InfinitePast();
    std::vector<ChargeId> committed;  // waiting for reports
  };
  Worker& WorkerAt(WorkerSlot slot);

  ChargeId next_id_ = 1;
  absl::flat_hash_map<ChargeId, Entry> charges_;
  std::vector<Worker> workers_;  // by slot
};

}  // namespace router

#endif  // ROUTER_LOAD_LEDGER_H_
