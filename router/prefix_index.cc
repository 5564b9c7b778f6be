#include "router/prefix_index.h"

#include <algorithm>

#include "status/check.h"

namespace router {
namespace {

using block_hash::BlockHash;

template <typename Slots>
void SetBit(Slots* slots, WorkerSlot slot) {
  const size_t word = slot / 64;
  if (slots->size() <= word) slots->resize(word + 1, 0);
  (*slots)[word] |= uint64_t{1} << (slot % 64);
}

template <typename Slots>
void ClearBit(Slots* slots, WorkerSlot slot) {
  const size_t word = slot / 64;
  if (word < slots->size()) (*slots)[word] &= ~(uint64_t{1} << (slot % 64));
}

template <typename Slots>
uint64_t Word(const Slots& slots, size_t word) {
  return word < slots.size() ? slots[word] : 0;
}

}  // namespace

bool PrefixIndex::Holders::empty() const {
  const auto zero = [](uint64_t word) { return word == 0; };
  return std::all_of(announced.begin(), announced.end(), zero) &&
         std::all_of(predicted.begin(), predicted.end(), zero);
}

bool PrefixIndex::Trusted(const Worker& worker, absl::Time now) const {
  return worker.present && now - worker.last_frame <= options_.stale_after;
}

void PrefixIndex::StartWorker(WorkerSlot slot, const std::string& epoch, size_t max_blocks,
                              bool keeps_state) {
  FERRY_CHECK(slot >= 0);
  DropWorker(slot);
  if (workers_.size() <= static_cast<size_t>(slot)) workers_.resize(slot + 1);
  Worker& worker = workers_[slot];
  worker.present = true;
  worker.epoch = epoch;
  worker.max_blocks = max_blocks;
  worker.keeps_state = keeps_state;
}

void PrefixIndex::DropWorker(WorkerSlot slot) {
  if (slot >= static_cast<WorkerSlot>(workers_.size())) return;
  Worker& worker = workers_[slot];
  for (const BlockHash& hash : std::vector<BlockHash>(worker.blocks.begin(), worker.blocks.end())) {
    Remove(slot, hash);
  }
  std::vector<Prediction> predictions;
  for (const auto& [prediction, until] : predicted_) {
    if (prediction.first == slot) predictions.push_back(prediction);
  }
  for (const Prediction& prediction : predictions) Forget(prediction);
  worker = Worker();
}

void PrefixIndex::Store(WorkerSlot slot, const BlockHash& hash, bool resumable) {
  Worker& worker = workers_[slot];
  if (resumable) worker.not_resumable.erase(hash);
  // A worker that announces more blocks than it has is wrong; it must not cost us memory.
  if (worker.blocks.size() >= worker.max_blocks && !worker.blocks.contains(hash)) return;
  if (!resumable) worker.not_resumable.insert(hash);
  if (!worker.blocks.insert(hash).second) return;
  SetBit(&holders_[hash].announced, slot);
  ++num_entries_;
}

void PrefixIndex::Remove(WorkerSlot slot, const BlockHash& hash) {
  if (workers_[slot].blocks.erase(hash) == 0) return;
  workers_[slot].not_resumable.erase(hash);
  const auto it = holders_.find(hash);
  ClearBit(&it->second.announced, slot);
  if (it->second.empty()) holders_.erase(it);
  --num_entries_;
}

void PrefixIndex::ApplyEvents(WorkerSlot slot, const std::vector<Event>& events) {
  Worker& worker = workers_[slot];
  for (const Event& event : events) {
    switch (event.kind) {
      case Event::Kind::kStored:
        Store(slot, event.hash, event.resumable);
        break;
      case Event::Kind::kRemoved:
        Remove(slot, event.hash);
        break;
      case Event::Kind::kCleared:
        for (const BlockHash& hash :
             std::vector<BlockHash>(worker.blocks.begin(), worker.blocks.end())) {
          Remove(slot, hash);
        }
        break;
    }
  }
}

PrefixIndex::Applied PrefixIndex::Apply(WorkerSlot slot, const Frame& frame, absl::Time now) {
  FERRY_CHECK(slot < static_cast<WorkerSlot>(workers_.size()) && workers_[slot].present)
      << "slot=" << slot;
  Worker& worker = workers_[slot];
  if (frame.epoch != worker.epoch) return Applied::kOtherEpoch;
  if (frame.heartbeat) {
    if (frame.seq > worker.last_seq) {
      ++num_gaps_;
      return Applied::kGap;
    }
    worker.last_frame = now;
    return Applied::kApplied;
  }
  if (frame.snapshot || worker.in_snapshot) {
    if (!worker.in_snapshot) worker.staged.clear();
    worker.in_snapshot = true;
    for (const Event& event : frame.events) {
      if (event.kind == Event::Kind::kStored && worker.staged.size() < worker.max_blocks) {
        worker.staged[event.hash] = event.resumable;
      }
    }
    if (frame.snapshot_end) {
      worker.in_snapshot = false;
      const auto staged = std::move(worker.staged);
      worker.staged.clear();
      for (const BlockHash& hash :
           std::vector<BlockHash>(worker.blocks.begin(), worker.blocks.end())) {
        if (!staged.contains(hash)) Remove(slot, hash);
      }
      for (const auto& [hash, resumable] : staged) Store(slot, hash, resumable);
      worker.last_seq = frame.seq;
      ++num_snapshots_;
    }
    worker.last_frame = now;
    return Applied::kApplied;
  }
  if (frame.seq > worker.last_seq + 1) {
    ++num_gaps_;
    return Applied::kGap;
  }
  worker.last_frame = now;
  if (frame.seq <= worker.last_seq) return Applied::kApplied;
  ApplyEvents(slot, frame.events);
  worker.last_seq = frame.seq;
  return Applied::kApplied;
}

uint64_t PrefixIndex::next_seq(WorkerSlot slot) const {
  return slot < static_cast<WorkerSlot>(workers_.size()) ? workers_[slot].last_seq + 1 : 1;
}

void PrefixIndex::Forget(const Prediction& prediction) {
  predicted_.erase(prediction);
  const auto it = holders_.find(prediction.second);
  if (it == holders_.end()) return;
  ClearBit(&it->second.predicted, prediction.first);
  if (it->second.empty()) holders_.erase(it);
}

void PrefixIndex::ExpirePredictions(absl::Time now) {
  while (!predicted_order_.empty() && (predicted_order_.front().first <= now ||
                                       predicted_order_.size() > options_.max_predicted)) {
    const auto [until, prediction] = predicted_order_.front();
    predicted_order_.pop_front();
    const auto it = predicted_.find(prediction);
    // Renewed predictions have a later entry in the order.
    if (it != predicted_.end() && it->second.time == until) Forget(prediction);
  }
}

void PrefixIndex::Predict(WorkerSlot slot, absl::Span<const BlockHash> chain, size_t reusable,
                          absl::Time now) {
  if (slot >= static_cast<WorkerSlot>(workers_.size()) || !workers_[slot].present) return;
  const Worker& worker = workers_[slot];
  const absl::Time until = now + options_.predicted_ttl;
  for (size_t i = 0; i < chain.size(); ++i) {
    const bool resumable = !worker.keeps_state || i + 1 == reusable;
    if (worker.blocks.contains(chain[i]) &&
        (!resumable || !worker.not_resumable.contains(chain[i]))) {
      continue;
    }
    const Prediction prediction(slot, chain[i]);
    Until& entry = predicted_.try_emplace(prediction, Until{until, false}).first->second;
    entry = {until, entry.resumable || resumable};  // of another prompt's, still to come
    predicted_order_.emplace_back(until, prediction);
    SetBit(&holders_[chain[i]].predicted, slot);
  }
  ExpirePredictions(now);
}

bool PrefixIndex::Resumable(WorkerSlot slot, const BlockHash& hash) const {
  const Worker& worker = workers_[slot];
  if (worker.blocks.contains(hash) && !worker.not_resumable.contains(hash)) return true;
  const auto predicted = predicted_.find(Prediction(slot, hash));
  return predicted != predicted_.end() && predicted->second.resumable;
}

std::vector<int32_t> PrefixIndex::Lookup(absl::Span<const BlockHash> chain, absl::Time now) {
  ExpirePredictions(now);
  std::vector<int32_t> matched(workers_.size(), 0);
  // Workers that have had every block so far.
  std::vector<uint64_t> alive((workers_.size() + 63) / 64, 0);
  bool any = false;
  for (size_t slot = 0; slot < workers_.size(); ++slot) {
    if (!Trusted(workers_[slot], now)) continue;
    alive[slot / 64] |= uint64_t{1} << (slot % 64);
    any = true;
  }
  for (size_t i = 0; any && i <= chain.size(); ++i) {
    const auto it = i < chain.size() ? holders_.find(chain[i]) : holders_.end();
    any = false;
    for (size_t word = 0; word < alive.size(); ++word) {
      const uint64_t has = it == holders_.end() ? 0
                                                : Word(it->second.announced, word) |
                                                      Word(it->second.predicted, word);
      for (uint64_t lost = alive[word] & ~has; lost != 0; lost &= lost - 1) {
        const auto slot = static_cast<WorkerSlot>(word * 64 + __builtin_ctzll(lost));
        size_t end = i;
        if (workers_[slot].keeps_state) {
          while (end > 0 && !Resumable(slot, chain[end - 1])) --end;
        }
        matched[slot] = static_cast<int32_t>(end);
      }
      alive[word] &= has;
      any = any || alive[word] != 0;
    }
  }
  return matched;
}

size_t PrefixIndex::approximate_bytes() const {
  size_t bytes = holders_.capacity() * (sizeof(BlockHash) + sizeof(Holders) + 1) +
                 predicted_.capacity() * (sizeof(Prediction) + sizeof(Until) + 1) +
                 predicted_order_.size() * sizeof(predicted_order_[0]);
  for (const Worker& worker : workers_) {
    bytes +=
        (worker.blocks.capacity() + worker.not_resumable.capacity() + worker.staged.capacity()) *
        (sizeof(BlockHash) + 1);
  }
  return bytes;
}

int64_t PrefixIndex::num_untrusted(absl::Time now) const {
  return std::count_if(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    return worker.present && !Trusted(worker, now);
  });
}

}  // namespace router
