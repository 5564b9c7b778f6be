#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "status/check.h"

namespace kernels::cpu {
namespace {

constexpr uint64_t kInsideMask = (uint64_t{1} << 16) - 1;
constexpr uint64_t kOpen = uint64_t{1} << 16;
constexpr int kLoopShift = 17;
constexpr std::chrono::microseconds kMaxSpin{50};

bool IsOpen(uint64_t state) { return (state & kOpen) != 0; }
uint64_t LoopNumber(uint64_t state) { return state >> kLoopShift; }

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Looks at `done` until it is true or the spin time is over.
template <typename Done>
bool SpinUntil(Done done) {
  const auto deadline = std::chrono::steady_clock::now() + kMaxSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace

void ThreadPool::FreeDeleter::operator()(std::byte* bytes) const { std::free(bytes); }

ThreadPool::ThreadPool(int32_t num_threads) {
  FERRY_CHECK(num_threads >= 1 && num_threads <= static_cast<int32_t>(kInsideMask))
      << "num_threads=" << num_threads;
  workers_.reserve(static_cast<size_t>(num_threads) - 1);
  for (int32_t i = 1; i < num_threads; ++i) workers_.emplace_back([this] { RunWorker(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t num_tasks, absl::FunctionRef<void(int64_t)> task) {
  if (num_tasks <= 1 || workers_.empty()) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  const uint64_t closed = state_.load();
  FERRY_CHECK(!IsOpen(closed)) << "ParallelFor inside ParallelFor";
  task_ = &task;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  const uint64_t loop = LoopNumber(closed) + 1;
  state_.store(loop << kLoopShift | kOpen);  // publishes the three fields above
  if (num_sleeping_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  RunTasks();
  // All tasks are taken; nobody may join any more, and those inside finish their last one.
  state_.fetch_and(~kOpen);
  const auto all_left = [this] { return (state_.load() & kInsideMask) == 0; };
  if (SpinUntil(all_left)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true);
  idle_.wait(lock, all_left);
  caller_sleeps_.store(false);
}

void ThreadPool::RunTasks() {
  // Order is carried by state_; the counter only hands out numbers.
  for (;;) {
    const int64_t i = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (i >= num_tasks_) return;
    (*task_)(i);
  }
}

bool ThreadPool::TryJoin(uint64_t* seen) {
  uint64_t state = state_.load();
  while (IsOpen(state) && LoopNumber(state) != *seen) {
    if (state_.compare_exchange_weak(state, state + 1)) {
      *seen = LoopNumber(state);
      return true;
    }
  }
  return false;
}

void ThreadPool::RunWorker() {
  uint64_t seen = 0;
  while (!stopping_.load()) {
    bool joined = SpinUntil([&] { return TryJoin(&seen); });
    if (!joined) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return stopping_.load() || (joined = TryJoin(&seen)); });
      num_sleeping_.fetch_sub(1);
    }
    if (!joined) continue;
    RunTasks();
    const uint64_t left = state_.fetch_sub(1) - 1;
    if (!IsOpen(left) && (left & kInsideMask) == 0 && caller_sleeps_.load()) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      idle_.notify_one();
    }
  }
}

std::byte* ThreadPool::Scratch(int64_t size_bytes) {
  if (size_bytes > scratch_bytes_) {
    const size_t rounded = (static_cast<size_t>(size_bytes) + 4095) / 4096 * 4096;
    scratch_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, rounded)));
    FERRY_CHECK(scratch_ != nullptr) << "out of memory: " << rounded << " bytes of scratch";
    scratch_bytes_ = static_cast<int64_t>(rounded);
  }
  return scratch_.get();
}

}  // namespace kernels::cpu
