// What is known of a worker, and how the policy sees it: facts of GetInfo, the last load report,
// and what this router has sent there since.

#ifndef ROUTER_WORKER_VIEW_H_
#define ROUTER_WORKER_VIEW_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "pairing/pair_check.h"
#include "router/load_ledger.h"
#include "router/prefix_index.h"
#include "router/routing_policy.h"

namespace router {

enum class LinkRole { kUnknown, kPrefill, kDecode, kBoth };
const char* LinkRoleName(LinkRole role);

// What GetInfo said.
struct WorkerFacts {
  std::string epoch;
  LinkRole role = LinkRole::kUnknown;
  std::string model;
  std::string tokenizer_hash;
  pairing::Profile profile;
  int32_t block_size = 0;
  int64_t block_bytes = 0;
  int32_t num_blocks = 0;
  int32_t num_state_slots = 0;  // 0: its model keeps no state per sequence
  int32_t max_seqs = 0;         // 0: not stated
  int32_t max_model_len = 0;
  uint64_t hash_seed = 0;
  double prefill_tokens_per_s = 0;
  double prefill_s_per_token2 = 0;
  double decode_step_ms = 0;
  double decode_step_ms_per_seq = 0;
};

// What its last load report said.
struct WorkerLoad {
  int64_t waiting_tokens = 0;
  int32_t waiting_requests = 0;
  int32_t running_requests = 0;
  int32_t used_blocks = 0;       // active, reserved, held, quarantined
  int32_t used_state_slots = 0;  // the same
  double step_ms = 0;
};

// `ours`: what the reports do not show.  `requests_in_flight`: ours, of which the worker has at
// least as many, so that one that understates its load does not draw everybody's.  `cached_blocks`:
// leading ones of the prompt in question.
WorkerView MakeView(WorkerSlot slot, const WorkerFacts& facts, const WorkerLoad& load,
                    const LoadLedger::Load& ours, int32_t requests_in_flight, int32_t cached_blocks,
                    double recent_assignments, double prefill_slowdown);

// To compute so many tokens behind so many cached ones, by what the worker measured at its start.
absl::Duration StatedPrefillTime(const WorkerFacts& facts, int32_t computed_tokens,
                                 int32_t cached_tokens);

}  // namespace router

#endif  // ROUTER_WORKER_VIEW_H_
