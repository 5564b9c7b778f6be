// A value that another thread sets; waiting for it is bounded.

#ifndef TESTS_KV_TRANSFER_PROMISED_H_
#define TESTS_KV_TRANSFER_PROMISED_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/time/time.h"

namespace kv_transfer {

// A handle: copies share the value, so a callback that comes late, after its test has failed, finds
// it alive.
template <typename T>
class Promised {
 public:
  void Set(T value) const {
    std::lock_guard lock(state_->mutex);
    ++state_->times;
    state_->value = std::move(value);
    state_->changed.notify_all();
  }
  // Nothing if it was not set in time.
  std::optional<T> Wait(absl::Duration timeout = absl::Seconds(20)) const {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                             [&] { return state_->value.has_value(); });
    return state_->value;
  }
  int times() const {
    std::lock_guard lock(state_->mutex);
    return state_->times;
  }

 private:
  struct State {
    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
    std::optional<T> value;
    int times = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_PROMISED_H_
