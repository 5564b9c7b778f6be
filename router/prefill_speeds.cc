#include "router/prefill_speeds.h"

#include <algorithm>
#include <cmath>

namespace router {
namespace {

constexpr absl::Duration kMemory = absl::Seconds(10);
// As if so much had been computed in just the time predicted: a prompt of a few milliseconds does
// not decide.
constexpr double kUnsurprisingSeconds = 0.1;

double Fading(absl::Duration age) { return std::exp(-absl::FDivDuration(age, kMemory)); }

}  // namespace

void PrefillSpeeds::Observe(WorkerSlot slot, const std::string& epoch, absl::Duration predicted,
                            absl::Duration observed, absl::Time now) {
  if (predicted <= absl::ZeroDuration() || predicted == absl::InfiniteDuration() ||
      observed <= absl::ZeroDuration()) {
    return;
  }
  if (workers_.size() <= static_cast<size_t>(slot)) workers_.resize(slot + 1);
  Worker& worker = workers_[slot];
  if (worker.epoch != epoch) worker = {.epoch = epoch};
  const double fading = Fading(now - worker.at);
  worker.predicted_s = worker.predicted_s * fading + absl::ToDoubleSeconds(predicted);
  worker.observed_s =
      worker.observed_s * fading +
      absl::ToDoubleSeconds(std::clamp(observed, predicted / kMost, predicted * kMost));
  worker.at = now;
}

double PrefillSpeeds::slowdown(WorkerSlot slot, const std::string& epoch, absl::Time now) const {
  if (slot >= static_cast<WorkerSlot>(workers_.size()) || workers_[slot].epoch != epoch) return 1;
  const Worker& worker = workers_[slot];
  const double fading = Fading(now - worker.at);
  return (kUnsurprisingSeconds + worker.observed_s * fading) /
         (kUnsurprisingSeconds + worker.predicted_s * fading);
}

}  // namespace router
