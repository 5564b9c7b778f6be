// Which workers a request goes to: pure functions of what is known of the workers at this moment.
//
// The default policy is the cost of serving.md 7.2 in milliseconds: predicted time to the first
// token, plus the slowdown that the request imposes on the sequences already decoding, plus a
// barrier where the decode worker's cache is nearly full.
//
// Thread-safe: no state; the caller owns the random generator and the round-robin counter.

#ifndef ROUTER_ROUTING_POLICY_H_
#define ROUTER_ROUTING_POLICY_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "router/prefix_index.h"

namespace router {

enum class Policy { kCost, kLeastLoad, kRoundRobin };

// A worker as the policy sees it.  Loads are reported plus uncommitted.
struct WorkerView {
  WorkerSlot slot = 0;
  bool can_decode = false;           // decode and both
  bool is_prefill = false;           // a prefill worker
  bool prefills_any_length = false;  // role both
  int32_t block_size = 0;            // tokens
  int64_t block_bytes = 0;
  int32_t num_blocks = 0;        // of the pool
  int32_t used_blocks = 0;       // not free and not merely cached, growth included
  int32_t num_state_slots = 0;   // 0: its model keeps no state per sequence
  int32_t used_state_slots = 0;  // not free and not merely snapshots
  int32_t max_seqs = 0;          // that it runs at a time; 0: not stated
  int32_t max_model_len = 0;     // 0: not stated
  // Speeds that the worker measured at start; 0: unknown.
  double prefill_tokens_per_s = 0;
  double prefill_s_per_token2 = 0;
  double prefill_slowdown = 1;  // PrefillSpeeds
  double decode_step_ms = 0;
  double decode_step_ms_per_seq = 0;
  double observed_step_ms = 0;    // moving average of its recent steps
  int64_t waiting_tokens = 0;     // prompt tokens to compute before ours
  int32_t requests = 0;           // running and waiting
  int32_t cached_tokens = 0;      // of this prompt, reusable: whole blocks, at most prompt - 1
  double recent_assignments = 0;  // LoadLedger
};

struct RequestView {
  int32_t prompt_tokens = 0;
  int32_t max_tokens = 0;
  int32_t total_tokens = 0;  // that the decode worker's max_model_len must allow
  int32_t branches = 1;
};

struct PolicyOptions {
  Policy policy = Policy::kCost;
  int32_t local_prefill_tokens = 256;  // uncached tokens that any decode worker may prefill itself
  // A decode worker whose cache would be fuller than this, prompts and foreseen output counted,
  // takes no further request.
  double kv_watermark = 0.95;
};

enum class RouteReason {
  kRemote,           // prefill worker + decode worker
  kShort,            // little to compute: on the decode worker
  kNoPrefillWorker,  // on a decode worker of role both: no prefill worker is healthy
  kCheaper,          // on a decode worker of role both: sooner there
};
const char* RouteReasonName(RouteReason reason);

struct Choice {
  int32_t prefill = -1;  // index into the views; -1: the decode worker computes the prompt
  int32_t decode = -1;
  RouteReason reason = RouteReason::kRemote;
  double predicted_ttft_ms = 0;
};

enum class Feasibility {
  kNow,    // `choice` is set
  kLater,  // some workers could serve the request, but have no room now
  kNever,  // nobody could, whatever the load
};

struct Decision {
  Feasibility feasibility = Feasibility::kNever;
  bool decode_has_room = false;  // kLater is for the prefill workers' queues only
  Choice choice;
};

struct PolicyState {
  std::minstd_rand random{std::random_device{}()};
  uint64_t turn = 0;  // of round-robin
};

// Which (prefill, decode) pairs, as indices into the views, may not be used.
using PairBlocked = std::function<bool(int32_t prefill, int32_t decode)>;

Decision Choose(const PolicyOptions& options, const RequestView& request,
                absl::Span<const WorkerView> workers, const PairBlocked& blocked,
                PolicyState* state);

// For a prompt that `workers[prefill]` holds already: where it is decoded.
Decision ChooseDecodeForHeld(const PolicyOptions& options, const RequestView& request,
                             absl::Span<const WorkerView> workers, int32_t prefill,
                             const PairBlocked& blocked, PolicyState* state);

// Whether the worker can do its part of a request of such lengths when it is empty.
bool HoldsLength(const WorkerView& worker, const RequestView& request);
// Blocks that `tokens` fill, the partial last one included.
int32_t BlocksFor(int64_t tokens, int32_t block_size);
// Tokens that the request is expected to cost: prompt and foreseen output.
int64_t ExpectedTokens(const RequestView& request);
// Blocks that a decode worker should keep free for the output of the request.
int32_t GrowthBlocks(const RequestView& request, int32_t block_size);

// Terms of the cost, milliseconds.
double PrefillMs(const WorkerView& worker, const RequestView& request);
double PrefillQueueMs(const WorkerView& worker);

}  // namespace router

#endif  // ROUTER_ROUTING_POLICY_H_
