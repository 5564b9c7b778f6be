#include "tests/fakes/simulated_worker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace router {

WorkerModel PrefillModel() {
  WorkerModel model;
  model.facts.role = LinkRole::kPrefill;
  model.facts.block_size = 64;
  model.facts.block_bytes = 64 * 70'000;
  model.facts.num_blocks = 2000;
  model.facts.prefill_tokens_per_s = 20'000;
  model.facts.prefill_s_per_token2 = 1e-9;
  return model;
}

WorkerModel DecodeModel() {
  WorkerModel model = PrefillModel();
  model.facts.role = LinkRole::kDecode;
  model.facts.decode_step_ms = 20;
  model.facts.decode_step_ms_per_seq = 0.1;
  return model;
}

SimulatedWorker::SimulatedWorker(WorkerSlot slot, const WorkerModel& model)
    : slot_(slot), model_(model) {}

std::string SimulatedWorker::epoch() const { return absl::StrCat("epoch of ", slot_); }

int32_t SimulatedWorker::Cached(const Prompt& prompt) const {
  const int32_t most = (prompt.tokens - 1) / model_.facts.block_size;
  int32_t blocks = 0;
  while (blocks < most && cached_.contains((*prompt.chain)[blocks])) ++blocks;
  return blocks;
}

absl::Duration SimulatedWorker::ComputeTime(const Prompt& prompt) const {
  const double cached = Cached(prompt) * model_.facts.block_size;
  const double computed = prompt.tokens - cached;
  return absl::Seconds(
      slowness * (computed / model_.facts.prefill_tokens_per_s +
                  model_.facts.prefill_s_per_token2 * computed * (prompt.tokens + cached) / 2));
}

absl::Duration SimulatedWorker::StepTime() const {
  return absl::Milliseconds(slowness * (model_.facts.decode_step_ms +
                                        model_.facts.decode_step_ms_per_seq * sequences.size()));
}

WorkerLoad SimulatedWorker::Load() const {
  WorkerLoad load;
  for (const Prompt& prompt : prompts) {
    load.waiting_tokens += prompt.tokens - Cached(prompt) * model_.facts.block_size;
  }
  load.waiting_requests = static_cast<int32_t>(prompts.size());
  load.running_requests = static_cast<int32_t>(sequences.size() + arriving.size());
  for (const Sequence& sequence : sequences) load.used_blocks += sequence.blocks;
  for (const Sequence& sequence : arriving) load.used_blocks += sequence.blocks;
  if (!sequences.empty()) load.step_ms = absl::ToDoubleMilliseconds(StepTime());
  const auto told = [&](auto& value) { value *= model_.admitted_load; };
  told(load.waiting_tokens);
  told(load.waiting_requests);
  told(load.running_requests);
  told(load.used_blocks);
  return load;
}

void SimulatedWorker::Store(const Chain& chain) {
  for (const block_hash::BlockHash& hash : chain) {
    if (const auto it = cached_.find(hash); it != cached_.end()) {
      lru_.splice(lru_.end(), lru_, it->second);
      continue;
    }
    if (static_cast<int32_t>(cached_.size()) == model_.facts.num_blocks) {
      events_.push_back({.kind = PrefixIndex::Event::Kind::kRemoved, .hash = lru_.front()});
      cached_.erase(lru_.front());
      lru_.pop_front();
    }
    cached_[hash] = lru_.insert(lru_.end(), hash);
    events_.push_back({.kind = PrefixIndex::Event::Kind::kStored, .hash = hash});
  }
}

std::vector<PrefixIndex::Event> SimulatedWorker::TakeEvents() { return std::exchange(events_, {}); }

}  // namespace router
