// Gate: lets callers through while open.
//
// Thread-safe.

#ifndef TESTS_PREFILL_WORKER_GATE_H_
#define TESTS_PREFILL_WORKER_GATE_H_

#include <condition_variable>
#include <mutex>

namespace prefill_worker {

class Gate {
 public:
  void Close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
  }
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  // Returns when `count` callers have come, in all.
  void WaitForArrivals(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= count; });
  }

 private:
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  bool open_ = true;
  int arrived_ = 0;
};

}  // namespace prefill_worker

#endif  // TESTS_PREFILL_WORKER_GATE_H_
