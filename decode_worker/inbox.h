// Inbox: where other threads leave work for the scheduler thread.
//
// New requests are refused when it is full.  What belongs to a request that is already known (a
// cancel, the end of a transfer) is always taken: its number is bounded by the number of requests.
// Thread-safe; one thread runs what is in it.

#ifndef DECODE_WORKER_INBOX_H_
#define DECODE_WORKER_INBOX_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "decode_worker/request.h"

namespace decode_worker {

class Inbox final {
 public:
  using Task = std::function<void()>;
  explicit Inbox(size_t capacity) : capacity_(capacity) {}
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  // False if it is full or closed: `task` will not run.
  bool TryPost(Task task);
  // False if it is closed.
  bool Post(Task task);

  // Runs what is there now, on the caller's thread.
  void RunAll();
  // Returns when something is there or `until` has passed.
  void WaitUntil(Clock::time_point until);
  // Takes nothing more; what is there can still be run.
  void Close();

 private:
  const size_t capacity_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable arrived_;
  std::deque<Task> tasks_;
  bool closed_ = false;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_INBOX_H_
