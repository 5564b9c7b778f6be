#include "router/event_loop.h"

#include "status/check.h"
#include "steady_time/steady_time.h"

namespace router {
namespace {

// A timer that is so late says that the loop could not run.
constexpr absl::Duration kMissedTime = absl::Milliseconds(250);

}  // namespace

EventLoop::EventLoop() : thread_([this] { Main(); }) {}

EventLoop::~EventLoop() { Stop(); }

absl::Time EventLoop::Now() { return steady_time::Now(); }

void EventLoop::Post(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    posted_.push_back(std::move(task));
    if (posted_.size() > 1) return;  // the loop has been woken for the first of them
  }
  wake_.notify_one();
}

void EventLoop::Run(Task task) {
  FERRY_CHECK(std::this_thread::get_id() != thread_.get_id());
  std::mutex mutex;  // guards done
  std::condition_variable finished;
  bool done = false;
  Post([&] {
    task();
    std::lock_guard lock(mutex);
    done = true;
    finished.notify_one();  // under the lock: `finished` lives on the waiter's stack
  });
  std::unique_lock lock(mutex);
  finished.wait(lock, [&] { return done; });
}

EventLoop::TimerId EventLoop::After(absl::Duration delay, Task task) {
  const TimerId id = next_timer_++;
  const absl::Time when = Now() + delay;
  timers_.emplace(std::pair(when, id), std::move(task));
  timer_times_.emplace(id, when);
  return id;
}

void EventLoop::CancelTimer(TimerId id) {
  const auto it = timer_times_.find(id);
  if (it == timer_times_.end()) return;
  timers_.erase(std::pair(it->second, id));
  timer_times_.erase(it);
}

absl::Time EventLoop::RunTimers() {
  if (!timers_.empty()) {
    const absl::Duration late = Now() - timers_.begin()->first.first;
    if (late > kMissedTime) missed_ += late;
  }
  while (!timers_.empty()) {
    const auto first = timers_.begin();
    if (first->first.first > Now()) return first->first.first;
    Task task = std::move(first->second);
    timer_times_.erase(first->first.second);
    timers_.erase(first);
    task();
  }
  return absl::InfiniteFuture();
}

void EventLoop::Main() {
  std::vector<Task> batch;
  while (true) {
    const absl::Time next = RunTimers();
    bool stop = false;
    {
      std::unique_lock lock(mutex_);
      const auto ready = [this] { return stopping_ || !posted_.empty(); };
      if (next == absl::InfiniteFuture()) {
        wake_.wait(lock, ready);
      } else {
        wake_.wait_for(lock, absl::ToChronoNanoseconds(next - Now()), ready);
      }
      batch.swap(posted_);
      stop = stopping_ && batch.empty();
    }
    if (stop) break;
    for (Task& task : batch) {
      task();
      task = nullptr;  // what it owned ends here, in order
    }
    batch.clear();
  }
  timers_.clear();
}

void EventLoop::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

}  // namespace router
