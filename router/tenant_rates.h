// TenantRates: how many requests a second each tenant may send.  A tenant has what comes to it in a
// second saved up, at least one request, and gets more as time passes.
//
// Owned by the loop's thread.

#ifndef ROUTER_TENANT_RATES_H_
#define ROUTER_TENANT_RATES_H_

#include <cstddef>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"

namespace router {

class TenantRates final {
 public:
  // Zero: `tenant` may send a request at `now`, and it is counted.  Else how long it has to wait.
  // REQUIRES: `rate` > 0, in requests a second.
  absl::Duration Take(const std::string& tenant, double rate, absl::Time now);

  size_t num_known() const { return full_at_.size(); }

 private:
  // When a tenant will have saved up all it can.  Who has is as good as unknown and is forgotten
  // now and then.
  absl::flat_hash_map<std::string, absl::Time> full_at_;
  size_t look_at_size_ = 1024;  // with so many tenants, who can be forgotten is
};

}  // namespace router

#endif  // ROUTER_TENANT_RATES_H_
