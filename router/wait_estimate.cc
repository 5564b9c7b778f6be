#include "router/wait_estimate.h"

#include <algorithm>
#include <cmath>

namespace router {
namespace {

constexpr absl::Duration kMemory = absl::Seconds(10);
constexpr double kNewest = 0.2;  // weight of the newest first token
// Beyond this the prediction is wrong in kind, not in degree.
constexpr double kMostCorrection = 2;

}  // namespace

void WaitEstimate::OnTaken(int64_t tokens, bool others_wait, absl::Time now) {
  if (others_waited_) {
    const absl::Duration passed = now - last_taken_;
    const double keep = std::exp(-absl::FDivDuration(passed, kMemory));
    tokens_ = tokens_ * keep + static_cast<double>(tokens);
    seconds_ = seconds_ * keep + absl::ToDoubleSeconds(passed);
  }
  others_waited_ = others_wait;
  last_taken_ = now;
}

void WaitEstimate::OnFirstToken(absl::Duration predicted, absl::Duration observed) {
  const double seconds = absl::ToDoubleSeconds(observed);
  first_token_s_ =
      first_token_s_ == 0 ? seconds : (1 - kNewest) * first_token_s_ + kNewest * seconds;
  if (predicted <= absl::ZeroDuration()) return;
  const double ratio =
      std::clamp(absl::FDivDuration(observed, predicted), 1 / kMostCorrection, kMostCorrection);
  correction_ = (1 - kNewest) * correction_ + kNewest * ratio;
}

absl::Duration WaitEstimate::Wait(int64_t tokens) const {
  if (tokens_ <= 0) return absl::ZeroDuration();
  return absl::Seconds(static_cast<double>(tokens) * seconds_ / tokens_);
}

}  // namespace router
