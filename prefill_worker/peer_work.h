// PeerWork: what has to be done with the links to peers and may block, on a few threads.  Work for
// one peer runs one piece at a time and in the order in which it was added, so that a link made
// anew cannot be cut by the fence of the one before it; different peers are served side by side.
//
// Thread-safe.

#ifndef PREFILL_WORKER_PEER_WORK_H_
#define PREFILL_WORKER_PEER_WORK_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "kv_transfer/transport.h"

namespace prefill_worker {

class PeerWork final {
 public:
  // Returns whether it is done.  If not, it runs again before anything else of its peer.
  using Run = std::function<bool()>;

  explicit PeerWork(int num_threads);
  ~PeerWork();

  // Does nothing after Close.
  void Add(const kv_transfer::Epoch& peer, Run run);

  // Starts nothing more, and waits for what runs.
  void Close();

 private:
  struct Work {
    kv_transfer::Epoch peer;
    Run run;
  };

  void RunWork();
  // The first whose peer is not busy, or the end.  mutex_ is held.
  std::deque<Work>::iterator NextWork();

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<Work> work_;                         // in the order of Add
  absl::flat_hash_set<kv_transfer::Epoch> busy_;  // peers whose work runs
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_PEER_WORK_H_
