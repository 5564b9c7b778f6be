#include "router/admission.h"

#include <algorithm>
#include <queue>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "status/check.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"

namespace router {
namespace {

absl::Status Full(const std::string& message, const char* reason) {
  return status::WithReason(absl::ResourceExhaustedError(message), reason);
}

}  // namespace

const TenantLimits& AdmissionQueue::LimitsOf(const std::string& tenant) const {
  const auto named = limits_.tenants.find(tenant);
  return named != limits_.tenants.end() ? named->second : limits_.tenant;
}

absl::Status AdmissionQueue::CheckSize(const std::string& tenant, int64_t num_requests,
                                       int64_t bytes) const {
  const auto too_large = [](auto&&... words) {
    return status::WithReason(absl::InvalidArgumentError(absl::StrCat("prompt has ", words...)),
                              status::kCallTooLarge);
  };
  const int64_t of_tenant = LimitsOf(tenant).max_queued;
  if (of_tenant > 0 && num_requests > of_tenant) {
    return too_large(num_requests, " entries: at most ", of_tenant, " requests of ",
                     tenant.empty() ? "no tenant" : absl::StrCat("tenant ", tenant),
                     " may wait at a time, and each entry is one");
  }
  if (num_requests > limits_.max_requests) {
    return too_large(num_requests, " entries: at most ", limits_.max_requests,
                     " requests may wait at a time, and each entry is one");
  }
  if (bytes > limits_.max_bytes) {
    return too_large(bytes, " bytes in the queue: at most ", limits_.max_bytes,
                     " may wait at a time");
  }
  return absl::OkStatus();
}

absl::Status AdmissionQueue::Admit(const std::string& tenant, int64_t num_requests, int64_t bytes,
                                   absl::Time now) {
  RETURN_IF_ERROR(CheckSize(tenant, num_requests, bytes));
  const auto use = tenants_.find(tenant);
  const int64_t queued = use == tenants_.end() ? 0 : use->second.queued;
  const TenantLimits& limits = LimitsOf(tenant);
  const std::string who =
      tenant.empty() ? "requests of no tenant" : absl::StrCat("tenant ", tenant);
  const std::string passed =
      num_requests == 1 ? "the limit is " : absl::StrCat(num_requests, " more pass the limit of ");
  if (limits.max_queued > 0 && queued + num_requests > limits.max_queued) {
    return Full(absl::StrCat(who, ": ", queued, " requests wait, ", passed, limits.max_queued),
                status::kTenantLimit);
  }
  if (num_requests_ + num_requests > limits_.max_requests) {
    return Full(absl::StrCat("queue is full: ", num_requests_, " requests wait, ", passed,
                             limits_.max_requests),
                status::kQueueFull);
  }
  if (num_bytes_ + bytes > limits_.max_bytes) {
    return Full(absl::StrCat("queue is full: ", num_bytes_, " bytes wait, ", bytes,
                             " more pass the limit of ", limits_.max_bytes),
                status::kQueueFull);
  }
  // Last: what is refused for another reason does not count.
  if (limits.max_rate == 0) return absl::OkStatus();
  const absl::Duration wait = rates_.Take(tenant, limits.max_rate, num_requests, now);
  if (wait == absl::ZeroDuration()) return absl::OkStatus();
  return status::WithRetryAfter(
      Full(absl::StrCat(who, ": more than ", limits.max_rate, " requests a second"),
           status::kTenantLimit),
      wait);
}

absl::Status AdmissionQueue::Enter(Entry* entry) {
  absl::Status admitted;
  if (entry->call == nullptr) {
    admitted = Admit(entry->tenant, 1, entry->bytes, entry->since);
  } else {
    std::optional<absl::Status>& of_all = entry->call->admission;
    const RequestCall& call = *entry->call;
    if (!of_all.has_value()) {
      of_all = Admit(entry->tenant, call.num_requests, call.num_bytes, entry->since);
    }
    admitted = *of_all;
  }
  if (admitted.ok()) Return(entry);
  return admitted;
}

void AdmissionQueue::Return(Entry* entry) {
  Model& model = models_[entry->model];
  const auto [it, is_new] = model.lanes.try_emplace(entry->tenant);
  Lane& lane = it->second;
  if (lane.entries.empty()) lane.served_tokens = std::max(lane.served_tokens, model.level);
  const bool inserted = lane.entries.emplace(KeyOf(*entry), entry).second;
  FERRY_CHECK(inserted) << "arrival=" << entry->arrival;
  entry->standing = Entry::Standing::kNew;
  ++model.num_entries;
  ++num_requests_;
  num_bytes_ += entry->bytes;
  tenants_[entry->tenant].queued += !entry->is_running;
}

AdmissionQueue::Entries::iterator AdmissionQueue::Remove(Model* model, Lane* lane,
                                                         Entries::iterator it) {
  const Entry& entry = *it->second;
  --model->num_entries;
  --num_requests_;
  num_bytes_ -= entry.bytes;
  tenants_[entry.tenant].queued -= !entry.is_running;
  return lane->entries.erase(it);
}

void AdmissionQueue::Take(Model* model, Lane* lane, Entry* entry) {
  model->level = std::max(model->level, lane->served_tokens);
  lane->served_tokens += std::exchange(entry->tokens, 0);
  if (!entry->is_running) ++tenants_[entry->tenant].running;
  entry->is_running = true;
}

std::vector<AdmissionQueue::TenantUse> AdmissionQueue::UseByTenant() const {
  std::vector<TenantUse> uses;
  for (const auto& [name, limits] : limits_.tenants) {
    const auto it = tenants_.find(name);
    uses.push_back(it == tenants_.end() ? TenantUse() : it->second);
    uses.back().name = name;
  }
  TenantUse other = {.name = "other"};
  for (const auto& [name, use] : tenants_) {
    if (limits_.tenants.contains(name)) continue;
    other.running += use.running;
    other.queued += use.queued;
  }
  uses.push_back(other);
  return uses;
}

void AdmissionQueue::Forget(const std::string& tenant) {
  const auto it = tenants_.find(tenant);
  if (it->second.queued == 0 && it->second.running == 0) tenants_.erase(it);
}

bool AdmissionQueue::Leave(Entry* entry) {
  const auto model = models_.find(entry->model);
  if (model == models_.end()) return false;
  const auto lane = model->second.lanes.find(entry->tenant);
  if (lane == model->second.lanes.end()) return false;
  const auto it = lane->second.entries.find(KeyOf(*entry));
  if (it == lane->second.entries.end() || it->second != entry) return false;
  Remove(&model->second, &lane->second, it);
  Forget(entry->tenant);
  if (model->second.num_entries == 0) models_.erase(model);
  return true;
}

bool AdmissionQueue::Ended(Entry* entry) {
  const bool was_in = Leave(entry);
  if (std::exchange(entry->is_running, false)) {
    --tenants_[entry->tenant].running;
    Forget(entry->tenant);
  }
  return was_in;
}

bool AdmissionQueue::MayRun(const Entry& entry) const {
  const int64_t max_running = LimitsOf(entry.tenant).max_running;
  return entry.is_running || max_running == 0 || tenants_.at(entry.tenant).running < max_running;
}

// Goes through a model's entries in their order, from a place in each lane.
class AdmissionQueue::Look {
 public:
  struct Cursor {
    Lane* lane;
    Entries::iterator it;
    int64_t served;  // its tokens, had all that were looked at been taken
  };

  void Add(Lane* lane, Entries::iterator from) {
    Push({.lane = lane, .it = from, .served = lane->served_tokens});
  }
  bool empty() const { return cursors_.empty(); }
  Cursor Next() {
    const Cursor next = cursors_.top();
    cursors_.pop();
    return next;
  }
  void Push(const Cursor& cursor) {
    if (cursor.it != cursor.lane->entries.end()) cursors_.push(cursor);
  }

 private:
  struct IsLater {
    bool operator()(const Cursor& a, const Cursor& b) const {
      return std::tie(a.served, a.it->first) > std::tie(b.served, b.it->first);
    }
  };
  std::priority_queue<Cursor, std::vector<Cursor>, IsLater> cursors_;
};

void AdmissionQueue::ForEach(absl::Time now, const std::function<Visit(Entry*)>& visit) {
  for (auto& named : models_) {
    Model& model = named.second;
    bool room = true;
    model.has_line = false;
    // Where each lane was left.
    std::vector<std::pair<Lane*, Entries::iterator>> stopped;
    const auto look = [&](Look* look) {
      stopped.clear();
      for (int skips = 0; !look->empty();) {
        Look::Cursor at = look->Next();
        if (!room || skips >= kMaxSkips / 2) {
          stopped.emplace_back(at.lane, at.it);
          continue;
        }
        Entry* const entry = at.it->second;
        if (!MayRun(*entry)) continue;  // nor may any behind it
        const int64_t tokens = entry->tokens;
        const bool is_due = entry->not_before <= now;
        const Visit result = is_due ? visit(entry) : Visit::kSkip;
        if (result == Visit::kNoRoom) {
          room = false;
          entry->standing = Entry::Standing::kInLine;
          continue;
        }
        if (result == Visit::kRefused) {
          at.it = Remove(&model, at.lane, at.it);
          Forget(entry->tenant);
          look->Push(at);
          continue;
        }
        at.served += tokens;
        if (result == Visit::kSkip || result == Visit::kAway) {
          if (is_due) {
            ++skips;
            entry->standing =
                result == Visit::kSkip ? Entry::Standing::kInLine : Entry::Standing::kAway;
            model.has_line |= result == Visit::kSkip;
          }
          ++at.it;
        } else {
          at.it = Remove(&model, at.lane, at.it);
          Take(&model, at.lane, entry);
        }
        look->Push(at);
      }
    };
    Look first;
    for (auto& [tenant, lane] : model.lanes) first.Add(&lane, lane.entries.begin());
    look(&first);
    model.is_full = !room;
    model.has_line |= !room;
    if (!room || stopped.empty()) continue;
    Look second;
    for (const auto& [lane, it] : stopped) {
      second.Add(lane, lane->has_resume
                           ? lane->entries.lower_bound(std::max(lane->resume, it->first))
                           : it);
    }
    for (auto& [tenant, lane] : model.lanes) lane.has_resume = false;
    look(&second);
    model.is_full = !room;
    model.has_line |= !room;
    for (const auto& [lane, it] : stopped) {
      lane->has_resume = true;
      lane->resume = it->first;
    }
  }
  absl::erase_if(models_, [](const auto& model) { return model.second.num_entries == 0; });
  for (auto& [name, model] : models_) ForgetLanes(&model);
}

void AdmissionQueue::ForgetLanes(Model* model) {
  std::vector<int64_t> beyond;  // what tenants without entries have been served
  std::erase_if(model->lanes, [&](const auto& lane) {
    if (!lane.second.entries.empty()) return false;
    if (lane.second.served_tokens > model->level) beyond.push_back(lane.second.served_tokens);
    return lane.second.served_tokens <= model->level;
  });
  if (beyond.size() <= kMaxIdleLanes) return;
  // Those that have been served least: another name would stand where they do then.
  const auto middle = beyond.begin() + kMaxIdleLanes / 2;
  std::nth_element(beyond.begin(), middle, beyond.end());
  std::erase_if(model->lanes, [last = *middle](const auto& lane) {
    return lane.second.entries.empty() && lane.second.served_tokens <= last;
  });
}

int64_t AdmissionQueue::TokensBefore(const Entry& entry, bool waits_in_line) const {
  const auto model = models_.find(entry.model);
  if (model == models_.end() || !(model->second.is_full || waits_in_line)) return 0;
  // Of those that the last look did not reach it is known only in a full house that they wait.
  const auto waits = [&](const Entry& other) {
    return other.standing == Entry::Standing::kInLine ||
           (other.standing == Entry::Standing::kNew && model->second.is_full);
  };
  const Key key = KeyOf(entry);
  const auto tokens_of = [&](const Lane& lane, bool own) {
    int64_t tokens = 0;
    for (const auto& [other, waiting] : lane.entries) {
      if (own && other >= key) break;
      if (waits(*waiting)) tokens += waiting->tokens;
    }
    return tokens;
  };
  const auto own = model->second.lanes.find(entry.tenant);
  const int64_t before = own == model->second.lanes.end() ? 0 : tokens_of(own->second, true);
  // While that and the request itself are served, each other tenant is served as much.
  int64_t sum = before;
  for (const auto& [tenant, lane] : model->second.lanes) {
    if (tenant != entry.tenant) {
      sum += std::min(tokens_of(lane, false), before + entry.tokens);
    }
  }
  return sum;
}

}  // namespace router
