#include "router/pair_table.h"

namespace router {

PairTable::PairTable(int32_t num_workers)
    : workers_(num_workers), why_(static_cast<size_t>(num_workers) * num_workers) {}

bool PairTable::Update(WorkerSlot slot, const Worker& worker) {
  if (worker.epoch == workers_[slot].epoch) return false;
  workers_[slot] = worker;
  const auto num_workers = static_cast<WorkerSlot>(workers_.size());
  for (WorkerSlot other = 0; other < num_workers; ++other) {
    why_[slot * workers_.size() + other].clear();
    why_[other * workers_.size() + slot].clear();
    const Worker& peer = workers_[other];
    if (peer.epoch.empty() || peer.model != worker.model || peer.is_prefill == worker.is_prefill) {
      continue;
    }
    const WorkerSlot prefill = worker.is_prefill ? slot : other;
    const WorkerSlot decode = worker.is_prefill ? other : slot;
    why_[prefill * workers_.size() + decode] = std::string(
        pairing::CheckPair(workers_[prefill].profile, workers_[decode].profile).message());
  }
  return true;
}

bool PairTable::Mark(WorkerSlot prefill, const std::string& prefill_epoch, WorkerSlot decode,
                     const std::string& decode_epoch, const std::string& why) {
  if (workers_[prefill].epoch != prefill_epoch || workers_[decode].epoch != decode_epoch) {
    return false;
  }
  why_[prefill * workers_.size() + decode] = why.empty() ? "a try has failed" : why;
  return true;
}

}  // namespace router
