#include "worker/ended_requests.h"

#include <algorithm>

namespace worker {

void EndedRequests::Add(const std::string& request_id, uint32_t attempt) {
  const auto [newest, added] = newest_.emplace(request_id, attempt);
  newest->second = std::max(newest->second, attempt);
  if (added) order_.push_back(request_id);
  if (order_.size() > kMost) {
    newest_.erase(order_.front());
    order_.pop_front();
  }
}

std::optional<uint32_t> EndedRequests::newest(const std::string& request_id) const {
  const auto found = newest_.find(request_id);
  if (found == newest_.end()) return std::nullopt;
  return found->second;
}

}  // namespace worker
