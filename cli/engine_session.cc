#include "cli/engine_session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "status/check.h"
#include "status/status_macros.h"

namespace cli {
namespace {

// The zero slot, and of two sequences each its own and a snapshot.
constexpr int32_t kStateSlots = 5;

}  // namespace

absl::StatusOr<std::unique_ptr<EngineSession>> EngineSession::Create(
    const engine::EngineOptions& options, int32_t num_blocks) {
  std::unique_ptr<EngineSession> session(new EngineSession());
  ASSIGN_OR_RETURN(session->engine_, engine::Engine::Create(options));
  const int64_t all_blocks = int64_t{num_blocks} + 1;  // block 0 is reserved
  ASSIGN_OR_RETURN(
      engine::CacheMemory memory,
      engine::CacheMemory::Map(all_blocks * session->engine_->cache_layout().block_bytes()));
  session->memory_ = std::make_unique<engine::CacheMemory>(std::move(memory));
  std::memset(session->memory_->data(), 0xff, session->memory_->span().size());
  absl::Span<std::byte> slot_bytes;
  if (const int64_t bytes = session->state_slot_bytes(); bytes > 0) {
    ASSIGN_OR_RETURN(engine::CacheMemory slots, engine::CacheMemory::Map(kStateSlots * bytes));
    session->slot_memory_ = std::make_unique<engine::CacheMemory>(std::move(slots));
    slot_bytes = session->slot_memory_->span();
    std::memset(slot_bytes.data() + bytes, 0xff, slot_bytes.size() - bytes);  // slot 0 is zero
  }
  session->engine_->SetCache(session->memory_->span(), slot_bytes);
  session->pool_ =
      std::make_unique<engine::BlockPool>(num_blocks + 1, slot_bytes.empty() ? 0 : kStateSlots);
  session->plan_ = std::make_unique<model::StepPlan>(session->engine_->limits());
  return session;
}

absl::StatusOr<EngineSession::StepReply> EngineSession::Step(engine::Sequence& seq,
                                                             const StepRequest& request) {
  const int32_t start = seq.num_computed;
  const int32_t end = start + request.num_tokens;
  engine::StateSlots* const slots = pool_->state_slots();
  if (slots != nullptr && seq.state_slot == engine::kNoSlot) {
    RETURN_IF_ERROR(engine::TakePrefix(seq, {}, /*num_blocks=*/0, engine::Continuation::kComputed,
                                       block_size(), *pool_));
  }
  RETURN_IF_ERROR(engine::GrowBlocks(seq, end, block_size(), *pool_));
  engine::PlanBuilder builder(block_size(), *plan_);
  builder.Begin(++step_id_);
  builder.Add(seq, request.num_tokens, request.absorbed, request.sample);
  StepReply reply;
  if (slots != nullptr && request.snapshot) {
    ASSIGN_OR_RETURN(reply.snapshot, slots->Allocate());
    builder.AddSnapshot(reply.snapshot);
  }
  int32_t& num_logit_rows = plan_->counts().num_logit_rows;
  for (int32_t position = std::max(start, request.logits_from.value_or(end)); position < end;
       ++position) {
    FERRY_CHECK(num_logit_rows < engine_->limits().max_logit_rows) << "position=" << position;
    plan_->logit_rows[num_logit_rows++] = position - start;
  }
  ASSIGN_OR_RETURN(const engine::StepHandle handle, engine_->Launch(*plan_));
  ASSIGN_OR_RETURN(const engine::StepResult result, engine_->Collect(handle));
  if (slots != nullptr) slots->Release(builder.state_sources());
  if (request.sample) reply.token = result.samples[0].token_id;
  if (request.sample && reply.token == kernels::kNoToken) return engine::NoTokenError(end);
  reply.logits.assign(result.logits.begin(), result.logits.end());
  return reply;
}

void EngineSession::Accept(engine::Sequence& seq, int32_t token) {
  engine::AcceptToken(seq, step_id_, token);
}

engine::Sequence EngineSession::NewSequence(absl::Span<const int32_t> tokens) const {
  engine::Sequence seq;
  seq.tokens.assign(tokens.begin(), tokens.end());
  seq.num_prompt_tokens = static_cast<int32_t>(tokens.size());
  seq.sampling.temperature = 0;
  return seq;
}

absl::Span<std::byte> EngineSession::StateSlot(engine::SlotId slot) const {
  if (slot == engine::kNoSlot) return {};
  return engine_->cache().state_slots.subspan(slot * state_slot_bytes(), state_slot_bytes());
}

absl::Span<std::byte> EngineSession::Block(engine::BlockId block) const {
  const int64_t block_bytes = engine_->cache_layout().block_bytes();
  return engine_->cache().token_blocks.subspan(block * block_bytes, block_bytes);
}

}  // namespace cli
