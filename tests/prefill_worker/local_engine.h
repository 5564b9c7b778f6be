// LocalEngine: the truth of a prefill worker's tests: one engine, no scheduler.

#ifndef TESTS_PREFILL_WORKER_LOCAL_ENGINE_H_
#define TESTS_PREFILL_WORKER_LOCAL_ENGINE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"
#include "received.h"

namespace prefill_worker {

inline constexpr int32_t kBlockSize = 64;

class LocalEngine {
 public:
  explicit LocalEngine(std::unique_ptr<engine::Engine> engine)
      : engine_(std::move(engine)),
        memory_(*engine::CacheMemory::Map(kBlocks * engine_->cache_layout().block_bytes())),
        slots_(*engine::CacheMemory::Map(std::max<int64_t>(1, kSlots * slot_bytes()))),
        plan_(engine_->limits()) {
    engine_->SetCache(memory_.span(), slots_.span().first(kSlots * slot_bytes()));
  }

  struct Result {
    std::vector<std::byte> blocks;  // [num_blocks, block_bytes]
    std::vector<std::byte> state;   // [state_slot_bytes]
    kernels::SampleResult sample;
  };
  Result Compute(const std::vector<uint32_t>& tokens, engine::SamplingOptions sampling) {
    engine::BlockPool pool(kBlocks, slot_bytes() == 0 ? 0 : kSlots);
    engine::Sequence seq;
    seq.tokens.assign(tokens.begin(), tokens.end());
    seq.num_prompt_tokens = static_cast<int32_t>(tokens.size());
    seq.sampling = sampling;
    if (sampling.HasPenalties()) {
      seq.penalty_slot = 0;
      seq.penalty_reset_needed = true;
    }
    const int32_t n = seq.num_prompt_tokens;
    EXPECT_TRUE(
        engine::TakePrefix(seq, {}, 0, engine::Continuation::kComputed, kBlockSize, pool).ok());
    EXPECT_TRUE(engine::GrowBlocks(seq, n, kBlockSize, pool).ok());
    engine::PlanBuilder builder(kBlockSize, plan_);
    Result result;
    while (seq.num_computed < n) {
      const int32_t rows = std::min(n - seq.num_computed, engine_->limits().max_tokens);
      const bool last = seq.num_computed + rows == n;
      builder.Begin(++step_);
      builder.Add(seq, rows, /*absorbed=*/false, /*sample=*/last);
      const auto collected = engine_->Collect(*engine_->Launch(plan_));
      EXPECT_TRUE(collected.ok()) << collected.status();
      if (last) result.sample = collected->samples[0];
    }
    const int64_t block_bytes = engine_->cache_layout().block_bytes();
    for (const engine::BlockId block : seq.blocks) {
      const std::byte* begin = memory_.data() + block * block_bytes;
      result.blocks.insert(result.blocks.end(), begin, begin + block_bytes);
    }
    const std::byte* state = slots_.data() + seq.state_slot * slot_bytes();
    if (slot_bytes() > 0) result.state.assign(state, state + slot_bytes());
    return result;
  }
  const model::CacheLayout& layout() const { return engine_->cache_layout(); }

 private:
  static constexpr int32_t kBlocks = 41;
  static constexpr int32_t kSlots = 2;
  int64_t slot_bytes() const { return engine_->cache_layout().spec().state_slot_bytes; }

  std::unique_ptr<engine::Engine> engine_;
  engine::CacheMemory memory_;
  engine::CacheMemory slots_;
  model::StepPlan plan_;
  int64_t step_ = 0;
};

// The finished entries of `received` are those of `truth`, bit for bit, and so is the state.
inline void ExpectSameRows(const model::CacheLayout& layout, const LocalEngine::Result& truth,
                           const Received& received) {
  const model::CacheSpec& spec = layout.spec();
  const int64_t cached_bytes = received.cached_tokens / kBlockSize * layout.block_bytes();
  int64_t different = 0;
  for (int32_t group = 0; group < static_cast<int32_t>(spec.groups.size()); ++group) {
    const model::CacheGroup& g = spec.groups[group];
    const int32_t per_block = kBlockSize / g.tokens_per_entry;
    for (int32_t layer = 0; layer < g.layers; ++layer) {
      for (uint32_t entry = received.cached_tokens / g.tokens_per_entry;
           entry < received.num_tokens / g.tokens_per_entry; ++entry) {
        const int64_t offset = entry / per_block * layout.block_bytes() +
                               layout.offset(group, layer) + entry % per_block * g.entry_bytes;
        different +=
            std::memcmp(truth.blocks.data() + offset,
                        received.memory.data() + offset - cached_bytes, g.entry_bytes) != 0;
      }
    }
  }
  EXPECT_EQ(different, 0) << "entries differ";
  EXPECT_EQ(truth.state, received.state);
}

}  // namespace prefill_worker

#endif  // TESTS_PREFILL_WORKER_LOCAL_ENGINE_H_
