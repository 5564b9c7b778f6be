#include "router/circuit_breakers.h"

#include <utility>

namespace router {

const char* BreakerStateName(BreakerState state) {
  switch (state) {
    case BreakerState::kClosed:
      return "closed";
    case BreakerState::kOpen:
      return "open";
    case BreakerState::kHalfOpen:
      return "half_open";
  }
  return "unknown";
}

const CircuitBreakers::Breaker* CircuitBreakers::Find(WorkerSlot slot,
                                                      const std::string& epoch) const {
  if (slot < 0 || slot >= static_cast<WorkerSlot>(breakers_.size())) return nullptr;
  const Breaker& breaker = breakers_[slot];
  return breaker.epoch == epoch ? &breaker : nullptr;
}

CircuitBreakers::Breaker* CircuitBreakers::Find(WorkerSlot slot, const std::string& epoch) {
  return const_cast<Breaker*>(std::as_const(*this).Find(slot, epoch));
}

BreakerState CircuitBreakers::state(WorkerSlot slot, const std::string& epoch,
                                    absl::Time now) const {
  const Breaker* const breaker = Find(slot, epoch);
  if (breaker == nullptr || breaker->open_until == absl::InfinitePast()) {
    return BreakerState::kClosed;
  }
  return now < breaker->open_until ? BreakerState::kOpen : BreakerState::kHalfOpen;
}

bool CircuitBreakers::Admits(WorkerSlot slot, const std::string& epoch, absl::Time now) const {
  const BreakerState current = state(slot, epoch, now);
  return current == BreakerState::kClosed ||
         (current == BreakerState::kHalfOpen && breakers_[slot].probe == 0);
}

void CircuitBreakers::Begin(WorkerSlot slot, const std::string& epoch, int64_t request,
                            absl::Time now) {
  if (slot >= static_cast<WorkerSlot>(breakers_.size())) breakers_.resize(slot + 1);
  Breaker& breaker = breakers_[slot];
  if (breaker.epoch != epoch) breaker = {.epoch = epoch};
  if (state(slot, epoch, now) != BreakerState::kClosed) breaker.probe = request;
}

void CircuitBreakers::Answered(WorkerSlot slot, const std::string& epoch, int64_t request) {
  Breaker* const breaker = Find(slot, epoch);
  if (breaker == nullptr || breaker->probe != request) return;
  breaker->probe = 0;
  breaker->open_until = absl::InfinitePast();
  // Not forgiven yet: a worker that fails behind its first answers opens again at once.
  breaker->failures = options_.failures - 1;
}

void CircuitBreakers::Completed(WorkerSlot slot, const std::string& epoch, int64_t request) {
  Answered(slot, epoch, request);
  Breaker* const breaker = Find(slot, epoch);
  // What was under way when it opened proves nothing of now.
  if (breaker != nullptr && breaker->open_until == absl::InfinitePast()) breaker->failures = 0;
}

bool CircuitBreakers::Failed(WorkerSlot slot, const std::string& epoch, int64_t request,
                             absl::Time began, absl::Time now) {
  Breaker* const found = Find(slot, epoch);
  if (options_.failures == 0 || found == nullptr) return false;
  Breaker& breaker = *found;
  if (breaker.open_until != absl::InfinitePast()) {
    if (breaker.probe != request) return false;
    breaker.probe = 0;
    breaker.open_until = now + options_.open_for;
    return true;
  }
  // One request alone, however often it comes back, may be the cause itself.
  if (breaker.last_failed == request || began <= breaker.last_failure) return false;
  breaker.last_failed = request;
  breaker.last_failure = now;
  if (++breaker.failures < options_.failures) return false;
  breaker.open_until = now + options_.open_for;
  return true;
}

void CircuitBreakers::Left(WorkerSlot slot, const std::string& epoch, int64_t request) {
  Breaker* const breaker = Find(slot, epoch);
  if (breaker != nullptr && breaker->probe == request) breaker->probe = 0;
}

}  // namespace router
