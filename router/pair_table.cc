#include "router/pair_table.h"

namespace router {

const std::string& PairTable::why(WorkerSlot prefill, WorkerSlot decode) const {
  static const auto* const fits = new std::string();
  const auto it = why_.find(std::pair(prefill, decode));
  return it == why_.end() ? *fits : it->second;
}

bool PairTable::Update(WorkerSlot slot, const Worker& worker) {
  if (slot >= static_cast<WorkerSlot>(workers_.size())) workers_.resize(slot + 1);
  if (worker.epoch == workers_[slot].epoch) return false;
  workers_[slot] = worker;
  absl::erase_if(why_, [slot](const auto& entry) {
    return entry.first.first == slot || entry.first.second == slot;
  });
  if (worker.epoch.empty()) return true;
  const auto num_workers = static_cast<WorkerSlot>(workers_.size());
  for (WorkerSlot other = 0; other < num_workers; ++other) {
    const Worker& peer = workers_[other];
    if (peer.epoch.empty() || peer.model != worker.model || peer.is_prefill == worker.is_prefill) {
      continue;
    }
    const WorkerSlot prefill = worker.is_prefill ? slot : other;
    const WorkerSlot decode = worker.is_prefill ? other : slot;
    const absl::Status fits =
        pairing::CheckPair(workers_[prefill].profile, workers_[decode].profile);
    if (!fits.ok()) why_[std::pair(prefill, decode)] = std::string(fits.message());
  }
  return true;
}

bool PairTable::Mark(WorkerSlot prefill, const std::string& prefill_epoch, WorkerSlot decode,
                     const std::string& decode_epoch, const std::string& why) {
  if (workers_[prefill].epoch != prefill_epoch || workers_[decode].epoch != decode_epoch) {
    return false;
  }
  why_[std::pair(prefill, decode)] = why.empty() ? "a try has failed" : why;
  return true;
}

}  // namespace router
