// AdmissionQueue: requests that wait for a worker, in the router, before anything is allocated
// anywhere.  Bounded by count and bytes, and a tenant's requests by count and rate.  The requests
// of one call are admitted or refused together.
//
// Who goes first, within a model:
//   - tenants have equal shares of what is served, in tokens (start-time fair queueing: the tenant
//     that has been served least goes next; one that comes newly starts level with the others);
//   - of one tenant's requests the one of higher priority, where each level is worth `ageing` of
//     waiting: so nobody is overtaken by those who come later than that, and nobody starves;
//   - a request that has been at a worker and comes back goes before those that have not.
// A tenant that has as many requests at workers as it may have waits for one of them to end.
//
// Owned by the loop's thread.

#ifndef ROUTER_ADMISSION_H_
#define ROUTER_ADMISSION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "router/tenant_rates.h"

namespace router {

// What a tenant may have at a time, and how fast; 0: any number.
struct TenantLimits {
  int64_t max_running = 0;  // at workers, or back in the queue from one
  int64_t max_queued = 0;   // waiting for the first worker
  double max_rate = 0;      // requests a second (tenant_rates.h)
};

// A call of several requests, which enter one after another, with nothing in between.
struct RequestCall {
  int64_t num_requests = 0;
  int64_t num_bytes = 0;                       // Entry::bytes of all
  std::optional<absl::Status> admission = {};  // of all of them, once the first has entered
};

class AdmissionQueue final {
 public:
  struct Limits {
    int64_t max_requests = 4096;
    int64_t max_bytes = int64_t{1} << 30;
    absl::Duration ageing = absl::Seconds(5);  // of waiting, worth one level of priority
    TenantLimits tenant = {};                  // of one that is not named here:
    std::map<std::string, TenantLimits> tenants = {};
  };
  // What stands in the queue; identity is the address, the owner keeps it alive until Ended.
  struct Entry {
    std::string model;
    std::string tenant = {};  // "": nobody's
    int32_t priority = 0;
    int64_t arrival = 0;    // unique, counts up
    absl::Time since = {};  // arrival's time: a request that comes back keeps its place
    int64_t tokens = 0;     // that it is expected to cost, counted when it is taken first
    int64_t bytes = 0;
    std::shared_ptr<RequestCall> call = {};        // null: of this request alone
    absl::Time not_before = absl::InfinitePast();  // left alone until then (back-off)
    // The queue's own:
    bool is_running = false;  // it has been taken and counts for its tenant
    enum class Standing : uint8_t { kNew, kInLine, kAway } standing = Standing::kNew;
  };
  enum class Visit {
    kTaken,    // out of the queue, served
    kRefused,  // out of the queue, with nothing for its tenant
    kSkip,     // stays in line; the next one may be tried
    kAway,  // stays, but not in line: nobody is there that could take it; the next one may be tried
    kNoRoom,  // stays; nobody behind it is tried either, so that large requests do not starve
  };

  explicit AdmissionQueue(const Limits& limits) : limits_(limits) {}

  // Errors: kResourceExhausted / QUEUE_FULL or TENANT_LIMIT naming the bound; with a RetryAfter
  // where that is known.  kInvalidArgument / CALL_TOO_LARGE: not even an empty queue has room for
  // all of the call.
  absl::Status Enter(Entry* entry);
  // A request that had been admitted once and comes back: not refused.
  void Return(Entry* entry);
  // False if it was not in.
  bool Leave(Entry* entry);
  // The request is over: leaves, and counts for its tenant no longer.  False if it was not in.
  bool Ended(Entry* entry);

  // One look at each model's entries: in order until half of kMaxSkips of them have been skipped,
  // then as many again from where the last look ended, so that whoever could go is found behind any
  // number of those who wait.  `visit` must not change the queue.
  static constexpr int kMaxSkips = 64;
  void ForEach(absl::Time now, const std::function<Visit(Entry*)>& visit);

  // Tokens that are served before `entry`, which need not be in, if nobody else comes.  Where the
  // last look found room behind those in line, only a request that `waits_in_line`, for the same as
  // they, has any before it.
  int64_t TokensBefore(const Entry& entry, bool waits_in_line) const;
  // At the last look somebody had to wait for room.
  bool has_line(const std::string& model) const {
    const auto it = models_.find(model);
    return it != models_.end() && it->second.has_line;
  }
  // Of tenants that have no request there, however many names are invented.
  static constexpr size_t kMaxIdleLanes = 1024;
  size_t num_lanes(const std::string& model) const {
    const auto it = models_.find(model);
    return it == models_.end() ? 0 : it->second.lanes.size();
  }
  int64_t num_requests() const { return num_requests_; }
  int64_t num_bytes() const { return num_bytes_; }
  struct TenantUse {
    std::string name;
    int64_t running = 0;
    int64_t queued = 0;
  };
  // Of each tenant that is named in the limits, and of all others together as "other".
  std::vector<TenantUse> UseByTenant() const;

 private:
  using Key = std::tuple<bool, absl::Time, int64_t>;  // has not run, since when in effect, arrival
  using Entries = std::map<Key, Entry*>;
  // A tenant's entries of one model.
  struct Lane {
    Entries entries;
    int64_t served_tokens = 0;  // on the model's scale, `level`
    Key resume;                 // where the next look goes on
    bool has_resume = false;
  };
  struct Model {
    std::map<std::string, Lane> lanes;  // with entries, or (some) served beyond the level
    int64_t level = 0;                  // what the tenant that went last had been served
    int64_t num_entries = 0;
    bool is_full = false;   // the last look ended at kNoRoom
    bool has_line = false;  // or somebody was skipped
  };
  class Look;

  Key KeyOf(const Entry& entry) const {
    return {!entry.is_running, entry.since - entry.priority * limits_.ageing, entry.arrival};
  }
  const TenantLimits& LimitsOf(const std::string& tenant) const;
  // Whether they could come if nobody else waited.
  absl::Status CheckSize(const std::string& tenant, int64_t num_requests, int64_t bytes) const;
  // Whether requests of that tenant, so many of so many bytes, may come at `now`.
  absl::Status Admit(const std::string& tenant, int64_t num_requests, int64_t bytes,
                     absl::Time now);
  bool MayRun(const Entry& entry) const;
  // Out of its lane and the counts; the iterator behind it.
  Entries::iterator Remove(Model* model, Lane* lane, Entries::iterator it);
  void Take(Model* model, Lane* lane, Entry* entry);
  void Forget(const std::string& tenant);
  static void ForgetLanes(Model* model);

  const Limits limits_;
  absl::flat_hash_map<std::string, Model> models_;
  std::map<std::string, TenantUse> tenants_;  // that have any
  TenantRates rates_;
  int64_t num_requests_ = 0;
  int64_t num_bytes_ = 0;
};

}  // namespace router

#endif  // ROUTER_ADMISSION_H_
