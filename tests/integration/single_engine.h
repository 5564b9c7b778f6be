// SingleEngine: the oracle of the integration tests: one engine in this process, one request at a
// time, no transfer, no batch.
//
// Thread-compatible.

#ifndef TESTS_INTEGRATION_SINGLE_ENGINE_H_
#define TESTS_INTEGRATION_SINGLE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/cache_memory.h"
#include "engine/engine.h"
#include "engine/plan_builder.h"

namespace integration {

class SingleEngine final {
 public:
  explicit SingleEngine(const std::string& model_dir);

  // The sampled tokens, at most sampling.max_tokens; ends after a stop id.
  std::vector<int32_t> Generate(const std::vector<int32_t>& prompt,
                                const engine::SamplingOptions& sampling);
  const engine::Engine& engine() const { return *engine_; }

 private:
  std::unique_ptr<engine::CacheMemory> memory_;
  std::unique_ptr<engine::CacheMemory> state_slots_;  // null: the model keeps no state
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<engine::BlockPool> pool_;
  std::unique_ptr<model::StepPlan> plan_;
  int64_t step_ = 0;
};

}  // namespace integration

#endif  // TESTS_INTEGRATION_SINGLE_ENGINE_H_
