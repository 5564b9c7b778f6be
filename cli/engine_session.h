// EngineSession: an engine with a cache and a block pool of its own, stepped one sequence at a time
// and waited for.  For commands that look at a model rather than serve it.
//
// The cache starts full of NaN bytes: reading what nobody wrote shows.
// Thread-compatible.

#ifndef CLI_ENGINE_SESSION_H_
#define CLI_ENGINE_SESSION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/block_pool.h"
#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "engine/plan_builder.h"
#include "engine/prefix_reuse.h"

namespace cli {

class EngineSession final {
 public:
  // `num_blocks`: usable ones.
  static absl::StatusOr<std::unique_ptr<EngineSession>> Create(const engine::EngineOptions& options,
                                                               int32_t num_blocks);

  struct StepRequest {
    int32_t num_tokens = 0;  // the next ones of the sequence
    bool absorbed = false;
    bool sample = false;                      // the token after them, greedily
    std::optional<int32_t> logits_from = {};  // positions from here on give their logits
    bool snapshot = false;                    // of the state behind them, if the model keeps one
  };
  struct StepReply {
    int32_t token = -1;                         // sampled; not yet part of the sequence
    std::vector<float> logits;                  // [positions asked for, vocab]
    engine::SlotId snapshot = engine::kNoSlot;  // held; the caller's
  };
  // Runs one step.  The caller gives the sequence its next token with Accept.  A sequence that has
  // no state slot gets one if the model keeps a state.
  absl::StatusOr<StepReply> Step(engine::Sequence& seq, const StepRequest& request);
  void Accept(engine::Sequence& seq, int32_t token);

  engine::Sequence NewSequence(absl::Span<const int32_t> tokens) const;
  // Of the engine's cache; a device's may be the device's alone.
  absl::Span<std::byte> Block(engine::BlockId block) const;
  absl::Span<std::byte> StateSlot(engine::SlotId slot) const;  // empty for kNoSlot

  engine::Engine& engine() { return *engine_; }
  engine::BlockPool& pool() { return *pool_; }
  int32_t block_size() const { return engine_->cache_layout().spec().block_size; }
  int64_t state_slot_bytes() const { return engine_->cache_layout().spec().state_slot_bytes; }

 private:
  EngineSession() = default;

  // The engine uses the memory until it is gone: it comes after it.
  std::unique_ptr<engine::CacheMemory> memory_;
  std::unique_ptr<engine::CacheMemory> slot_memory_;  // null: the model keeps no state
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<engine::BlockPool> pool_;
  std::unique_ptr<model::StepPlan> plan_;
  int64_t step_id_ = 0;
};

}  // namespace cli

#endif  // CLI_ENGINE_SESSION_H_
