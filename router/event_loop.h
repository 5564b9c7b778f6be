// EventLoop: the router's one thread of state.  Everything that the router knows (workers, index,
// ledger, queue, requests) belongs to this thread; gRPC callbacks only post to it.
//
// Post and Now may be called by any thread; the rest on the loop's thread only.

#ifndef ROUTER_EVENT_LOOP_H_
#define ROUTER_EVENT_LOOP_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"

namespace router {

class EventLoop final {
 public:
  using Task = absl::AnyInvocable<void()>;
  using TimerId = int64_t;  // 0: no timer

  EventLoop();
  ~EventLoop();  // Stop()
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs `task` on the loop, in order of posting.  After Stop: dropped.
  void Post(Task task);
  // Posts and waits.  REQUIRES: not on the loop's thread; not stopped.
  void Run(Task task);

  // A monotonic clock; only differences of its values have a meaning.
  static absl::Time Now();
  // The same clock without the time in which the loop could not run, because the process was
  // stopped or starved: whoever has not listened cannot say that others were silent.  Loop thread.
  absl::Time AwakeNow() const { return Now() - missed_; }

  // Runs `task` once, not earlier than after `delay`.
  TimerId After(absl::Duration delay, Task task);
  // The task will not run; unknown and past ids are ignored.
  void CancelTimer(TimerId id);

  // Runs what has been posted so far, drops timers and joins the thread.  Not on the loop's thread.
  void Stop();

 private:
  void Main();
  // Runs every timer that is due; returns when the next one is (infinite: none).
  absl::Time RunTimers();

  std::map<std::pair<absl::Time, TimerId>, Task> timers_;  // loop thread only
  absl::flat_hash_map<TimerId, absl::Time> timer_times_;   // loop thread only
  TimerId next_timer_ = 1;                                 // loop thread only
  absl::Duration missed_ = absl::ZeroDuration();           // loop thread only

  std::mutex mutex_;  // guards everything below
  std::condition_variable wake_;
  std::vector<Task> posted_;
  bool stopping_ = false;

  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace router

#endif  // ROUTER_EVENT_LOOP_H_
