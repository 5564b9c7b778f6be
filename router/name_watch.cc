#include "router/name_watch.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace router {

struct NameWatch::Shared {
  const std::vector<WorkerName> names;
  const absl::Duration period;
  const std::function<void(size_t, Found)> on_found;
  const std::function<Found(const WorkerName&)> look_up;
  std::mutex mutex;  // guards stopped, and is held while on_found runs
  std::condition_variable wake;
  bool stopped = false;
};

NameWatch::NameWatch(std::vector<WorkerName> names, absl::Duration period,
                     std::function<void(size_t, Found)> on_found,
                     std::function<Found(const WorkerName&)> look_up)
    : shared_(new Shared{.names = std::move(names),
                         .period = period,
                         .on_found = std::move(on_found),
                         .look_up = std::move(look_up),
                         .mutex = {},
                         .wake = {}}) {
  // Detached: a resolver whose servers are silent comes back after half a minute.
  if (!shared_->names.empty()) std::thread([shared = shared_] { Main(shared); }).detach();
}

NameWatch::~NameWatch() {
  const std::lock_guard lock(shared_->mutex);
  shared_->stopped = true;
  shared_->wake.notify_all();
}

void NameWatch::Main(const std::shared_ptr<Shared>& shared) {
  while (true) {
    for (size_t i = 0; i < shared->names.size(); ++i) {
      Found found = shared->look_up(shared->names[i]);
      const std::lock_guard lock(shared->mutex);
      if (shared->stopped) return;
      shared->on_found(i, std::move(found));
    }
    std::unique_lock lock(shared->mutex);
    if (shared->wake.wait_for(lock, absl::ToChronoMilliseconds(shared->period),
                              [&shared] { return shared->stopped; })) {
      return;
    }
  }
}

}  // namespace router
