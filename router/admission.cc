#include "router/admission.h"

#include <algorithm>

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
  const bool inserted = models_[entry->model].entries.emplace(KeyOf(*entry), entry).second;
  FERRY_CHECK(inserted) << "arrival=" << entry->arrival;
  ++num_requests_;
  num_bytes_ += entry->bytes;
}

bool AdmissionQueue::Leave(Entry* entry) {
  const auto model = models_.find(entry->model);
  if (model == models_.end()) return false;
  Entries& entries = model->second.entries;
  const auto it = entries.find(KeyOf(*entry));
  if (it == entries.end() || it->second != entry) return false;
  entries.erase(it);
  if (entries.empty()) models_.erase(model);
  --num_requests_;
  num_bytes_ -= entry->bytes;
  return true;
}

void AdmissionQueue::ForEach(absl::Time now, const std::function<Visit(Entry*)>& visit) {
  for (auto& [name, model] : models_) {
    Entries& entries = model.entries;
    bool room = true;
    // From `it` on; returns where it stopped.
    const auto look = [&](Entries::iterator it) {
      for (int skips = 0; it != entries.end() && skips < kMaxSkips / 2;) {
        Entry* const entry = it->second;
        const Visit result = entry->not_before > now ? Visit::kSkip : visit(entry);
        if (result == Visit::kNoRoom) {
          room = false;
          break;
        }
        if (result == Visit::kSkip) {
          skips += entry->not_before <= now;
          ++it;
          continue;
        }
        it = entries.erase(it);
        --num_requests_;
        num_bytes_ -= entry->bytes;
      }
      return it;
    };
    const auto stopped = look(entries.begin());
    if (!room || stopped == entries.end()) continue;
    const auto last = look(entries.lower_bound(std::max(model.resume, stopped->first)));
    model.resume = last == entries.end() ? Model().resume : last->first;
  }
  absl::erase_if(models_, [](const auto& model) { return model.second.entries.empty(); });
}

}  // namespace router
