// WorkPool: a few threads for work that is too long for an RPC thread (tokenising a long prompt).
//
// Thread-safe.

#ifndef ROUTER_WORK_POOL_H_
#define ROUTER_WORK_POOL_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace router {

class WorkPool final {
 public:
  WorkPool(int num_threads, size_t max_waiting);
  ~WorkPool();  // runs what is waiting

  // False if too much is waiting already.
  bool Submit(std::function<void()> work);

 private:
  void Main();

  const size_t max_waiting_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable wake_;
  std::deque<std::function<void()>> waiting_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // touched by constructor and destructor only
};

}  // namespace router

#endif  // ROUTER_WORK_POOL_H_
