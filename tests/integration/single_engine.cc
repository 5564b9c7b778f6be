#include "tests/integration/single_engine.h"

#include <algorithm>

#include "engine/prefix_reuse.h"
#include "status/check.h"

namespace integration {

SingleEngine::SingleEngine(const std::string& model_dir) {
  engine::EngineOptions options;
  options.model_dir = model_dir;
  options.num_threads = 1;
  options.num_penalty_slots = 1;
  options.limits.max_tokens = 512;
  options.limits.max_seqs = 1;
  options.limits.max_samples = 1;
  auto created = engine::Engine::Create(options);
  FERRY_CHECK(created.ok()) << created.status();
  engine_ = *std::move(created);
  const int32_t num_blocks = engine_->limits().max_blocks_per_seq + 2;
  memory_ = std::make_unique<engine::CacheMemory>(
      *engine::CacheMemory::Map(num_blocks * engine_->cache_layout().block_bytes()));
  int32_t num_slots = 0;
  if (const int64_t slot_bytes = engine_->cache_layout().spec().state_slot_bytes; slot_bytes > 0) {
    num_slots = 2;  // the zero slot and the sequence's
    state_slots_ =
        std::make_unique<engine::CacheMemory>(*engine::CacheMemory::Map(num_slots * slot_bytes));
  }
  engine_->SetCache(memory_->span(),
                    state_slots_ == nullptr ? absl::Span<std::byte>() : state_slots_->span());
  pool_ = std::make_unique<engine::BlockPool>(num_blocks, num_slots);
  plan_ = std::make_unique<model::StepPlan>(engine_->limits());
}

std::vector<int32_t> SingleEngine::Generate(const std::vector<int32_t>& prompt,
                                            const engine::SamplingOptions& sampling) {
  const int32_t block_size = engine_->cache_layout().spec().block_size;
  engine::PlanBuilder builder(block_size, *plan_);
  engine::Sequence seq;
  seq.tokens = prompt;
  seq.num_prompt_tokens = static_cast<int32_t>(prompt.size());
  seq.sampling = sampling;
  FERRY_CHECK(
      engine::TakePrefix(seq, {}, 0, engine::Continuation::kComputed, block_size, *pool_).ok())
      << "no sequence runs beside it";
  if (sampling.HasPenalties()) {
    seq.penalty_slot = 0;
    seq.penalty_reset_needed = true;
  }
  while (seq.num_output_tokens() < sampling.max_tokens) {
    const int32_t missing = static_cast<int32_t>(seq.tokens.size()) - seq.num_computed;
    const bool decode = seq.num_output_tokens() > 0;
    const int32_t rows = std::min(missing, engine_->limits().max_tokens);
    FERRY_CHECK(engine::GrowBlocks(seq, seq.num_computed + rows, block_size, *pool_).ok()) << rows;
    const int64_t step = step_++;
    builder.Begin(step);
    builder.Add(seq, rows, /*absorbed=*/decode, /*sample=*/rows == missing);
    const auto result = engine_->Collect(engine_->Launch(*plan_).value());
    FERRY_CHECK(result.ok()) << result.status();
    if (state_slots_ != nullptr) pool_->state_slots()->Release(builder.state_sources());
    if (rows != missing) continue;
    const int32_t token = result->samples[0].token_id;
    engine::AcceptToken(seq, step, token);
    if (std::count(sampling.stop_token_ids.begin(), sampling.stop_token_ids.end(), token) > 0)
      break;
  }
  engine::ReleaseBlocks(seq, *pool_);
  return {seq.tokens.begin() + seq.num_prompt_tokens, seq.tokens.end()};
}

}  // namespace integration
