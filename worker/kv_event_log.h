// KvEventLog: what a worker tells the router about its cached blocks: numbered frames, a ring for
// replay and the whole set for snapshots (serving.md 6.2).
//
// Thread-safe: the scheduler appends, RPC threads read.

#ifndef WORKER_KV_EVENT_LOG_H_
#define WORKER_KV_EVENT_LOG_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "engine/block_pool.h"

namespace worker {

class KvEventLog final {
 public:
  struct Frame {
    uint64_t seq = 0;  // 1, 2, ...
    std::vector<engine::BlockEvent> events;
    bool snapshot = false;  // replaces everything known, as of seq
  };

  // The last frames are kept for replay: at most so many, and of no more events than a snapshot has
  // (or kLeastReplayed, if it has fewer), because a reader that has missed more begins anew for
  // less.
  explicit KvEventLog(size_t ring_frames = 65536);
  static constexpr size_t kLeastReplayed = 1024;

  // One frame of events; nothing for an empty list.  Wakes the readers.
  void Append(std::vector<engine::BlockEvent> events);

  // Frames from `from_seq` on: a replay if the ring still has them all, else one snapshot frame
  // (parents before children).  Empty if there is nothing newer.
  std::vector<Frame> Read(uint64_t from_seq) const;
  uint64_t last_seq() const;

  // Calls `wake` after every Append until Unsubscribe(id) has returned.  `wake` must not block; it
  // may Read.  Const: a reader changes nothing that is told.
  int64_t Subscribe(std::function<void()> wake) const;
  void Unsubscribe(int64_t id) const;

 private:
  // Everything stored, parents before children.  REQUIRES: mutex_ is held.
  std::vector<engine::BlockEvent> Snapshot() const;

  const size_t ring_frames_;
  mutable std::mutex mutex_;  // guards ring_ .. by_hash_
  std::deque<Frame> ring_;
  size_t ring_events_ = 0;  // of all frames in ring_
  uint64_t last_seq_ = 0;
  std::list<engine::BlockEvent> stored_;  // the whole set, in order of storing
  absl::flat_hash_map<block_hash::BlockHash, std::list<engine::BlockEvent>::iterator> by_hash_;

  mutable std::mutex subscribers_mutex_;  // guards the rest; never taken while mutex_ is held
  mutable int64_t next_subscriber_ = 1;
  mutable absl::flat_hash_map<int64_t, std::function<void()>> subscribers_;
};

}  // namespace worker

#endif  // WORKER_KV_EVENT_LOG_H_
