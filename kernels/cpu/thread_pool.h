// ThreadPool: the threads that share the work of one launch.  The caller takes part, so a pool of
// one thread has no workers and runs everything in place.  Not a queue: one ParallelFor runs at a
// time.
//
// Workers spin for at most 50 us after their last task, then sleep; a worker that wakes too late
// for a loop does not hold it up.
//
// Thread-compatible: one thread makes every call.

#ifndef KERNELS_CPU_THREAD_POOL_H_
#define KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace kernels::cpu {

class ThreadPool final {
 public:
  // REQUIRES: num_threads >= 1, the caller of ParallelFor counted.
  explicit ThreadPool(int32_t num_threads);
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t num_threads() const { return static_cast<int32_t>(workers_.size()) + 1; }

  // Calls task(i) once for each i in [0, num_tasks), on any threads in any order, and returns when
  // all have returned; what they wrote is visible to the caller.  Allocates nothing. REQUIRES: not
  // called from inside a task of this pool.
  void ParallelFor(int64_t num_tasks, absl::FunctionRef<void(int64_t)> task);

  // Memory of the launch in progress, 64-byte aligned, undefined content, valid until the next
  // call. Grows to the largest size asked for and stays: launches of a size seen before allocate
  // nothing.
  std::byte* Scratch(int64_t size_bytes);

 private:
  struct FreeDeleter {
    void operator()(std::byte* bytes) const;
  };

  void RunWorker();
  void RunTasks();
  // Joins the open loop if there is one newer than `*seen`; sets `*seen` to it.
  bool TryJoin(uint64_t* seen);

  // One word that opens, closes and counts a loop: loop number << 17 | open bit << 16 | workers
  // inside.
  std::atomic<uint64_t> state_{0};
  // The open loop.  Written by the caller while the loop is closed and nobody is inside; workers
  // read them after joining (the compare-exchange in TryJoin pairs with the store that opens the
  // loop).
  absl::FunctionRef<void(int64_t)>* task_ = nullptr;
  int64_t num_tasks_ = 0;
  std::atomic<int64_t> next_task_{0};

  // Guards sleeping only: a sleeper announces itself in the counter before its last look at state_,
  // and whoever changes state_ looks at the counter afterwards, so no wake-up is lost.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::atomic<int32_t> num_sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stopping_{false};

  std::vector<std::thread> workers_;
  std::unique_ptr<std::byte, FreeDeleter> scratch_;
  int64_t scratch_bytes_ = 0;
};

}  // namespace kernels::cpu

#endif  // KERNELS_CPU_THREAD_POOL_H_
