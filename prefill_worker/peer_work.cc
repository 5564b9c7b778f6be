#include "prefill_worker/peer_work.h"

#include <algorithm>
#include <utility>

namespace prefill_worker {

PeerWork::PeerWork(int num_threads) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { RunWork(); });
}

PeerWork::~PeerWork() { Close(); }

void PeerWork::Add(const kv_transfer::Epoch& peer, Run run) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  work_.push_back({peer, std::move(run)});
  changed_.notify_one();
}

void PeerWork::Close() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    work_.clear();
    threads = std::move(threads_);
    changed_.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

std::deque<PeerWork::Work>::iterator PeerWork::NextWork() {
  return std::find_if(work_.begin(), work_.end(),
                      [this](const Work& work) { return !busy_.contains(work.peer); });
}

void PeerWork::RunWork() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || NextWork() != work_.end(); });
    if (closed_) return;
    const auto next = NextWork();
    Work work = std::move(*next);
    work_.erase(next);
    busy_.insert(work.peer);
    lock.unlock();
    const bool done = work.run();
    lock.lock();
    busy_.erase(work.peer);
    if (done || closed_) continue;
    const auto later = std::find_if(work_.begin(), work_.end(),
                                    [&work](const Work& other) { return other.peer == work.peer; });
    work_.insert(later, std::move(work));
  }
}

}  // namespace prefill_worker
