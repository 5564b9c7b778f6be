#include "router/tenant_rates.h"

#include <algorithm>

namespace router {
namespace {

constexpr absl::Duration kLongest = absl::Hours(24 * 365);  // times stay finite

}  // namespace

absl::Duration TenantRates::Take(const std::string& tenant, double rate, absl::Time now) {
  if (full_at_.size() >= look_at_size_) {
    absl::erase_if(full_at_, [now](const auto& known) { return known.second <= now; });
    look_at_size_ = std::max<size_t>(1024, 2 * full_at_.size());
  }
  const absl::Duration each = std::min(absl::Seconds(1 / rate), kLongest);
  const absl::Duration saved = std::max(absl::Seconds(1), each);
  const auto it = full_at_.find(tenant);
  const absl::Time full_at = it == full_at_.end() ? now : std::max(it->second, now);
  const absl::Duration wait = full_at + each - saved - now;
  if (wait > absl::ZeroDuration()) return wait;
  full_at_[tenant] = full_at + each;
  return absl::ZeroDuration();
}

}  // namespace router
