#include "worker/ended_requests.h"

#include <algorithm>

namespace worker {

void EndedRequests::Add(const std::string& request_id, uint32_t attempt) {
  const auto found = requests_.find(request_id);
  if (found != requests_.end()) {
    found->second.newest = std::max(found->second.newest, attempt);
    order_.splice(order_.end(), order_, found->second.place);
    return;
  }
  requests_[request_id] = {attempt, order_.insert(order_.end(), request_id)};
  if (order_.size() > kMost) {
    requests_.erase(order_.front());
    order_.pop_front();
  }
}

std::optional<uint32_t> EndedRequests::newest(const std::string& request_id) const {
  const auto found = requests_.find(request_id);
  if (found == requests_.end()) return std::nullopt;
  return found->second.newest;
}

}  // namespace worker
