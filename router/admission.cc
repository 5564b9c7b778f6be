#include "router/admission.h"

#include "absl/strings/str_cat.h"
#include "status/check.h"
#include "status/grpc_status.h"

namespace router {

absl::Status AdmissionQueue::Enter(Entry* entry) {
  if (num_requests_ >= limits_.max_requests) {
    return status::WithReason(absl::ResourceExhaustedError(absl::StrCat(
                                  "queue is full: ", num_requests_, " requests wait, the limit is ",
                                  limits_.max_requests)),
                              status::kQueueFull);
  }
  if (num_bytes_ + entry->bytes > limits_.max_bytes) {
    return status::WithReason(absl::ResourceExhaustedError(absl::StrCat(
                                  "queue is full: ", num_bytes_, " bytes wait, ", entry->bytes,
                                  " more pass the limit of ", limits_.max_bytes)),
                              status::kQueueFull);
  }
  Return(entry);
  return absl::OkStatus();
}

void AdmissionQueue::Return(Entry* entry) {
  const bool inserted = models_[entry->model].emplace(KeyOf(*entry), entry).second;
  FERRY_CHECK(inserted) << "arrival=" << entry->arrival;
  ++num_requests_;
  num_bytes_ += entry->bytes;
}

bool AdmissionQueue::Leave(Entry* entry) {
  const auto model = models_.find(entry->model);
  if (model == models_.end()) return false;
  const auto it = model->second.find(KeyOf(*entry));
  if (it == model->second.end() || it->second != entry) return false;
  model->second.erase(it);
  if (model->second.empty()) models_.erase(model);
  --num_requests_;
  num_bytes_ -= entry->bytes;
  return true;
}

void AdmissionQueue::ForEach(absl::Time now, const std::function<Visit(Entry*)>& visit) {
  for (auto& [model, entries] : models_) {
    int skips = 0;
    for (auto it = entries.begin(); it != entries.end() && skips < kMaxSkips;) {
      Entry* const entry = it->second;
      if (entry->not_before > now) {
        ++it;
        continue;
      }
      const Visit result = visit(entry);
      if (result == Visit::kNoRoom) break;
      if (result == Visit::kSkip) {
        ++skips;
        ++it;
        continue;
      }
      it = entries.erase(it);
      --num_requests_;
      num_bytes_ -= entry->bytes;
    }
  }
  absl::erase_if(models_, [](const auto& model) { return model.second.empty(); });
}

}  // namespace router
