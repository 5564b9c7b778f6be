#include "router/prefix_index.h"

#include <algorithm>
#include <utility>

#include "status/check.h"

namespace router {
namespace {

using block_hash::BlockHash;

// Entries and parts that a call takes out of the map for views that are gone.  More than the parts
// of the two views that a frame can put an end to.
constexpr size_t kSweepEntries = 256;

template <typename Bits>
void SetBit(Bits* bits, int32_t number) {
  const size_t word = number / 64;
  if (bits->size() <= word) bits->resize(word + 1, 0);
  (*bits)[word] |= uint64_t{1} << (number % 64);
}

template <typename Bits>
void ClearBit(Bits* bits, int32_t number) {
  const size_t word = number / 64;
  if (word < bits->size()) (*bits)[word] &= ~(uint64_t{1} << (number % 64));
}

template <typename Bits>
uint64_t Word(const Bits& bits, size_t word) {
  return word < bits.size() ? bits[word] : 0;
}

template <typename Bits>
bool HasBit(const Bits& bits, int32_t number) {
  return (Word(bits, number / 64) >> (number % 64) & 1) != 0;
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
  worker.view = NewView(slot);
}

void PrefixIndex::DropWorker(WorkerSlot slot) {
  if (slot >= static_cast<WorkerSlot>(workers_.size())) return;
  Worker& worker = workers_[slot];
  Retire(worker.view);
  Retire(worker.staged);
  for (size_t part = 0; part < kPredictedParts; ++part) {
    for (const auto& [hash, until] : worker.predicted.TakePart(part)) {
      Unmark(hash, &Holders::predicted, slot);
    }
  }
  worker = Worker();
}

void PrefixIndex::Unmark(const BlockHash& hash, Bits Holders::*bits, int32_t number) {
  holders_.EraseIf(hash, [&](Holders& holders) {
    ClearBit(&(holders.*bits), number);
    return holders.empty();
  });
}

PrefixIndex::ViewNumber PrefixIndex::NewView(WorkerSlot owner) {
  if (free_views_.empty()) {
    free_views_.push_back(static_cast<ViewNumber>(views_.size()));
    views_.emplace_back();
  }
  const ViewNumber number = free_views_.back();
  free_views_.pop_back();
  views_[number].owner = owner;
  return number;
}

void PrefixIndex::Retire(ViewNumber number) {
  if (number < 0) return;
  View& view = views_[number];
  view.owner = -1;
  if (view.blocks.size() == 0) {  // nothing of it is in `holders_`
    view.blocks = Blocks();
    free_views_.push_back(number);
    return;
  }
  num_entries_ -= view.blocks.size();
  num_retired_ += view.blocks.size();
  retired_.push_back({.number = number});
}

void PrefixIndex::Sweep(size_t entries) {
  for (size_t swept = 0; swept < entries && !retired_.empty();) {
    Retired& retired = retired_.front();
    if (retired.next_part == kBlockParts) {
      free_views_.push_back(retired.number);
      retired_.pop_front();
      continue;
    }
    const Blocks::Part part = views_[retired.number].blocks.TakePart(retired.next_part++);
    for (const auto& [hash, resumable] : part) {
      Unmark(hash, &Holders::announced, retired.number);
    }
    num_retired_ -= part.size();
    swept += 1 + part.size();
  }
}

void PrefixIndex::Store(ViewNumber number, size_t max_blocks, const Event& event) {
  Blocks& blocks = views_[number].blocks;
  if (bool* const resumable = blocks.Find(event.hash); resumable != nullptr) {
    *resumable = event.resumable;
    return;
  }
  // A worker that announces more blocks than it has is wrong; it must not cost us memory.
  if (blocks.size() >= max_blocks) return;
  blocks[event.hash] = event.resumable;
  SetBit(&holders_[event.hash].announced, number);
  ++num_entries_;
}

void PrefixIndex::Remove(ViewNumber number, const BlockHash& hash) {
  if (!views_[number].blocks.Erase(hash)) return;
  Unmark(hash, &Holders::announced, number);
  --num_entries_;
}

// The view stays as it was until the last frame has come.
void PrefixIndex::ApplySnapshot(WorkerSlot slot, const Frame& frame) {
  Worker& worker = workers_[slot];
  if (worker.staged >= 0 && worker.staged_seq != frame.seq) {  // the other one was broken off
    Retire(std::exchange(worker.staged, -1));
  }
  if (worker.staged < 0) worker.staged = NewView(slot);
  worker.staged_seq = frame.seq;
  for (const Event& event : frame.events) {
    if (event.kind == Event::Kind::kStored) Store(worker.staged, worker.max_blocks, event);
  }
  if (!frame.snapshot_end) return;
  Retire(std::exchange(worker.view, std::exchange(worker.staged, -1)));
  worker.last_seq = frame.seq;
  ++num_snapshots_;
}

void PrefixIndex::ApplyEvents(WorkerSlot slot, const Frame& frame) {
  Worker& worker = workers_[slot];
  // What came before the last of any number of clearings is gone: one view a frame at most.
  auto begin = frame.events.begin();
  for (auto it = begin; it != frame.events.end(); ++it) {
    if (it->kind == Event::Kind::kCleared) begin = it + 1;
  }
  if (begin != frame.events.begin()) Retire(std::exchange(worker.view, NewView(slot)));
  for (auto it = begin; it != frame.events.end(); ++it) {
    if (it->kind == Event::Kind::kStored) {
      Store(worker.view, worker.max_blocks, *it);
    } else {
      Remove(worker.view, it->hash);
    }
  }
  worker.last_seq = frame.seq;
}

PrefixIndex::Applied PrefixIndex::Apply(WorkerSlot slot, const Frame& frame, absl::Time now) {
  FERRY_CHECK(slot < static_cast<WorkerSlot>(workers_.size()) && workers_[slot].present)
      << "slot=" << slot;
  static_assert(kSweepEntries >= 2 * kBlockParts);
  // More than this frame can add: what is retired does not pile up.
  Sweep(kSweepEntries + 2 * frame.events.size());
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
  if (frame.snapshot) {
    ApplySnapshot(slot, frame);
    worker.last_frame = now;
    return Applied::kApplied;
  }
  Retire(std::exchange(worker.staged, -1));  // broken off: the log goes on instead
  if (frame.seq > worker.last_seq + 1) {
    ++num_gaps_;
    return Applied::kGap;
  }
  worker.last_frame = now;
  if (frame.seq > worker.last_seq) ApplyEvents(slot, frame);
  return Applied::kApplied;
}

uint64_t PrefixIndex::next_seq(WorkerSlot slot) const {
  return slot < static_cast<WorkerSlot>(workers_.size()) ? workers_[slot].last_seq + 1 : 1;
}

void PrefixIndex::ExpirePredictions(absl::Time now) {
  while (!predicted_order_.empty() && (predicted_order_.front().until <= now ||
                                       predicted_order_.size() > options_.max_predicted)) {
    const Prediction oldest = predicted_order_.front();
    predicted_order_.pop_front();
    // Renewed predictions have a later entry in the order.
    const auto is_over = [&](const Until& until) { return until.time == oldest.until; };
    if (workers_[oldest.slot].predicted.EraseIf(oldest.hash, is_over)) {
      Unmark(oldest.hash, &Holders::predicted, oldest.slot);
    }
  }
}

void PrefixIndex::Predict(WorkerSlot slot, absl::Span<const BlockHash> chain, size_t reusable,
                          absl::Time now) {
  if (slot >= static_cast<WorkerSlot>(workers_.size()) || !workers_[slot].present) return;
  Worker& worker = workers_[slot];
  const Blocks& blocks = views_[worker.view].blocks;
  const absl::Time until = now + options_.predicted_ttl;
  for (size_t i = 0; i < chain.size(); ++i) {
    const bool resumable = !worker.keeps_state || i + 1 == reusable;
    const bool* const known = blocks.Find(chain[i]);
    if (known != nullptr && (!resumable || *known)) continue;
    Until& entry = worker.predicted[chain[i]];
    entry = {until, entry.resumable || resumable};  // of another prompt's, still to come
    predicted_order_.push_back({until, slot, chain[i]});
    SetBit(&holders_[chain[i]].predicted, slot);
  }
  ExpirePredictions(now);
}

bool PrefixIndex::Resumable(WorkerSlot slot, const BlockHash& hash) const {
  const Worker& worker = workers_[slot];
  const bool* const known = views_[worker.view].blocks.Find(hash);
  if (known != nullptr && *known) return true;
  const Until* const predicted = worker.predicted.Find(hash);
  return predicted != nullptr && predicted->resumable;
}

std::vector<int32_t> PrefixIndex::Lookup(absl::Span<const BlockHash> chain, absl::Time now) {
  Sweep(kSweepEntries);
  ExpirePredictions(now);
  std::vector<int32_t> matched(workers_.size(), 0);
  // Views of workers that have had every block so far.
  std::vector<uint64_t> alive((views_.size() + 63) / 64, 0);
  bool any = false;
  for (const Worker& worker : workers_) {
    if (!Trusted(worker, now)) continue;
    alive[worker.view / 64] |= uint64_t{1} << (worker.view % 64);
    any = true;
  }
  for (size_t i = 0; any && i <= chain.size(); ++i) {
    const Holders* const holders = i < chain.size() ? holders_.Find(chain[i]) : nullptr;
    any = false;
    for (size_t word = 0; word < alive.size(); ++word) {
      const uint64_t has = holders == nullptr ? 0 : Word(holders->announced, word);
      for (uint64_t rest = alive[word] & ~has; rest != 0; rest &= rest - 1) {
        const int bit = __builtin_ctzll(rest);
        const WorkerSlot slot = views_[word * 64 + bit].owner;
        if (holders != nullptr && HasBit(holders->predicted, slot)) continue;
        size_t end = i;
        if (workers_[slot].keeps_state) {
          while (end > 0 && !Resumable(slot, chain[end - 1])) --end;
        }
        matched[slot] = static_cast<int32_t>(end);
        alive[word] &= ~(uint64_t{1} << bit);
      }
      any = any || alive[word] != 0;
    }
  }
  return matched;
}

size_t PrefixIndex::approximate_bytes() const {
  size_t bytes = predicted_order_.size() * sizeof(Prediction) + holders_.approximate_bytes();
  for (const Worker& worker : workers_) bytes += worker.predicted.approximate_bytes();
  for (const View& view : views_) bytes += view.blocks.approximate_bytes();
  return bytes;
}

size_t PrefixIndex::num_predicted() const {
  size_t predicted = 0;
  for (const Worker& worker : workers_) predicted += worker.predicted.size();
  return predicted;
}

int64_t PrefixIndex::num_untrusted(absl::Time now) const {
  return std::count_if(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    return worker.present && !Trusted(worker, now);
  });
}

}  // namespace router
