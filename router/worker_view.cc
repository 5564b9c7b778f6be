#include "router/worker_view.h"

#include <algorithm>

namespace router {

const char* LinkRoleName(LinkRole role) {
  switch (role) {
    case LinkRole::kPrefill:
      return "prefill";
    case LinkRole::kDecode:
      return "decode";
    case LinkRole::kBoth:
      return "both";
    case LinkRole::kUnknown:
      break;
  }
  return "unknown";
}

WorkerView MakeView(WorkerSlot slot, const WorkerFacts& facts, const WorkerLoad& load,
                    const LoadLedger::Load& ours, int32_t requests_in_flight, int32_t cached_blocks,
                    double recent_assignments, double prefill_slowdown) {
  return {.slot = slot,
          .can_decode = facts.role == LinkRole::kDecode || facts.role == LinkRole::kBoth,
          .is_prefill = facts.role == LinkRole::kPrefill,
          .prefills_any_length = facts.role == LinkRole::kBoth,
          .block_size = facts.block_size,
          .block_bytes = facts.block_bytes,
          .num_blocks = facts.num_blocks,
          .used_blocks = std::max(0, load.used_blocks + ours.kv_blocks) + ours.growth_blocks,
          .num_state_slots = facts.num_state_slots,
          .used_state_slots = std::max(0, load.used_state_slots + ours.requests),
          .max_seqs = facts.max_seqs,
          .max_model_len = facts.max_model_len,
          .prefill_tokens_per_s = facts.prefill_tokens_per_s,
          .prefill_s_per_token2 = facts.prefill_s_per_token2,
          .prefill_slowdown = prefill_slowdown,
          .decode_step_ms = facts.decode_step_ms,
          .decode_step_ms_per_seq = facts.decode_step_ms_per_seq,
          .observed_step_ms = load.step_ms,
          .waiting_tokens = std::max<int64_t>(0, load.waiting_tokens + ours.prefill_tokens),
          .requests = std::max(requests_in_flight,
                               load.running_requests + load.waiting_requests + ours.requests),
          .cached_tokens = cached_blocks * facts.block_size,
          .recent_assignments = recent_assignments};
}

absl::Duration StatedPrefillTime(const WorkerFacts& facts, int32_t computed_tokens,
                                 int32_t cached_tokens) {
  const WorkerView view = {.prefill_tokens_per_s = facts.prefill_tokens_per_s,
                           .prefill_s_per_token2 = facts.prefill_s_per_token2,
                           .cached_tokens = cached_tokens};
  return absl::Milliseconds(PrefillMs(view, {.prompt_tokens = computed_tokens + cached_tokens}));
}

}  // namespace router
