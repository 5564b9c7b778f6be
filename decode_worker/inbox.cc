#include "decode_worker/inbox.h"

#include <utility>

namespace decode_worker {

bool Inbox::TryPost(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (closed_ || tasks_.size() >= capacity_) return false;
    tasks_.push_back(std::move(task));
  }
  arrived_.notify_one();
  return true;
}

bool Inbox::Post(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    tasks_.push_back(std::move(task));
  }
  arrived_.notify_one();
  return true;
}

void Inbox::RunAll() {
  std::deque<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (Task& task : tasks) task();
}

void Inbox::WaitUntil(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  const auto ready = [this] { return !tasks_.empty() || closed_; };
  if (until == Clock::time_point::max()) {
    arrived_.wait(lock, ready);
  } else {
    arrived_.wait_until(lock, until, ready);
  }
}

void Inbox::Close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  arrived_.notify_all();
}

}  // namespace decode_worker
