#include "worker/kv_event_log.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"

namespace worker {

KvEventLog::KvEventLog(size_t ring_frames) : ring_frames_(ring_frames) {}

void KvEventLog::Append(std::vector<engine::BlockEvent> events) {
  if (events.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const engine::BlockEvent& event : events) {
      const auto found = by_hash_.find(event.hash);
      if (found != by_hash_.end()) {
        stored_.erase(found->second);
        by_hash_.erase(found);
      }
      if (event.stored) by_hash_[event.hash] = stored_.insert(stored_.end(), event);
    }
    ring_events_ += events.size();
    ring_.push_back(Frame{++last_seq_, std::move(events), /*snapshot=*/false});
    const size_t most_events = std::max(kLeastReplayed, by_hash_.size());
    while (ring_.size() > ring_frames_ || ring_events_ > most_events) {
      ring_events_ -= ring_.front().events.size();
      ring_.pop_front();
    }
  }
  const std::lock_guard<std::mutex> lock(subscribers_mutex_);
  for (const auto& [id, wake] : subscribers_) wake();
}

std::vector<KvEventLog::Frame> KvEventLog::Read(uint64_t from_seq) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (from_seq == 0) from_seq = 1;
  std::vector<Frame> frames;
  if (from_seq == last_seq_ + 1) return frames;
  const uint64_t first_in_ring = last_seq_ - ring_.size() + 1;
  // A number from the future is not one of ours: whoever asks needs the whole truth.
  if (from_seq > last_seq_ || from_seq < first_in_ring) {
    frames.push_back(Frame{last_seq_, Snapshot(), /*snapshot=*/true});
  } else {
    frames.assign(ring_.begin() + (from_seq - first_in_ring), ring_.end());
  }
  return frames;
}

std::vector<engine::BlockEvent> KvEventLog::Snapshot() const {
  std::vector<engine::BlockEvent> result;
  result.reserve(by_hash_.size());
  absl::flat_hash_set<block_hash::BlockHash> emitted;
  std::vector<const engine::BlockEvent*> line;
  // A parent that was evicted and stored again stands behind its children in `stored_`.
  for (const engine::BlockEvent& event : stored_) {
    const engine::BlockEvent* next = &event;
    while (next != nullptr && emitted.insert(next->hash).second) {
      line.push_back(next);
      const auto parent = by_hash_.find(next->parent);
      next = parent == by_hash_.end() ? nullptr : &*parent->second;
    }
    for (; !line.empty(); line.pop_back()) result.push_back(*line.back());
  }
  return result;
}

uint64_t KvEventLog::last_seq() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_seq_;
}

int64_t KvEventLog::Subscribe(std::function<void()> wake) const {
  const std::lock_guard<std::mutex> lock(subscribers_mutex_);
  subscribers_[next_subscriber_] = std::move(wake);
  return next_subscriber_++;
}

void KvEventLog::Unsubscribe(int64_t id) const {
  const std::lock_guard<std::mutex> lock(subscribers_mutex_);
  subscribers_.erase(id);
}

}  // namespace worker
