// TenantRates: how many requests a second each tenant may send.  A tenant has what comes to it in a
// second saved up, at least one request, and gets more as time passes.  Who has saved all that may
// send one call of any number of requests, and is in debt for those that were not saved.
//
// Owned by the loop's thread.

#ifndef ROUTER_TENANT_RATES_H_
#define ROUTER_TENANT_RATES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"

namespace router {

class TenantRates final {
 public:
  // Zero: `tenant` may send `num_requests` at `now`, and they are counted.  Else how long it has to
  // wait.  REQUIRES: `rate` > 0, in requests a second.
  absl::Duration Take(const std::string& tenant, double rate, int64_t num_requests, absl::Time now);

  // However many names are invented.  The debt of those who would soonest have none is forgotten:
  // another name would have given them as much.
  static constexpr size_t kMaxKnown = 65536;
  size_t num_known() const { return full_at_.size(); }

 private:
  void Forget(absl::Time now);

  // When a tenant will have saved up all it can.  Who has is as good as unknown and is forgotten
  // now and then.
  absl::flat_hash_map<std::string, absl::Time> full_at_;
  size_t look_at_size_ = 1024;  // with so many tenants, who can be forgotten is
};

}  // namespace router

#endif  // ROUTER_TENANT_RATES_H_
