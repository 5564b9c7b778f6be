#include "router/tenant_rates.h"

#include <algorithm>
#include <vector>

namespace router {
namespace {

constexpr absl::Duration kLongest = absl::Hours(24 * 365);  // times stay finite

}  // namespace

void TenantRates::Forget(absl::Time now) {
  absl::erase_if(full_at_, [now](const auto& known) { return known.second <= now; });
  if (full_at_.size() >= kMaxKnown) {
    std::vector<absl::Time> times;
    for (const auto& [tenant, full_at] : full_at_) times.push_back(full_at);
    const auto middle = times.begin() + static_cast<int64_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    size_t left = times.size() / 2;  // to forget: many may have the same time
    absl::erase_if(full_at_, [&left, last = *middle](const auto& known) {
      return known.second <= last && left > 0 && left-- > 0;
    });
  }
  look_at_size_ = std::clamp<size_t>(2 * full_at_.size(), 1024, kMaxKnown);
}

absl::Duration TenantRates::Take(const std::string& tenant, double rate, int64_t num_requests,
                                 absl::Time now) {
  if (full_at_.size() >= look_at_size_) Forget(now);
  const absl::Duration each = std::min(absl::Seconds(1 / rate), kLongest);
  const absl::Duration saved = std::max(absl::Seconds(1), each);
  const absl::Duration cost = each * static_cast<double>(num_requests);
  const auto it = full_at_.find(tenant);
  const absl::Time full_at = it == full_at_.end() ? now : std::max(it->second, now);
  const absl::Duration wait = full_at + std::min(cost, saved) - saved - now;
  if (wait > absl::ZeroDuration()) return wait;
  full_at_[tenant] = full_at + cost;
  return absl::ZeroDuration();
}

}  // namespace router
