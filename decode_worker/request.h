// What a decode worker is asked and what it answers, in plain types: no wire format, no engine.
//
// Plain values; TokenSink is the one way back to whoever asked.

#ifndef DECODE_WORKER_REQUEST_H_
#define DECODE_WORKER_REQUEST_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/sequence.h"
#include "kernels/head_and_sample.h"
#include "kv_transfer/transport.h"
#include "worker/worker_service.h"

namespace decode_worker {

// Deadlines are of this host's steady clock: budgets travel, wall clocks do not.
using Clock = std::chrono::steady_clock;

// A checked request (request_check.h).
struct RequestSpec {
  worker::RequestId id;
  std::string traceparent = {};      // as it was received; goes to the prefill worker
  std::vector<int32_t> tokens;       // the prompt; after a migration also the tokens emitted so far
  int32_t num_prompt_tokens = 0;     // how many of them are the user's prompt
  engine::SamplingOptions sampling;  // of branch 0; max_tokens and min_tokens count from
                                     // num_prompt_tokens on
  int32_t num_branches = 1;
  std::string cache_namespace;
  Clock::time_point deadline = Clock::time_point::max();
  int32_t priority = 0;  // where memory runs out the lowest gives way
  bool local_prefill = false;
  kv_transfer::Epoch prefill_epoch;  // of the worker that will push; unused with local_prefill
};

enum class FinishReason : uint8_t { kNone, kStop, kLength };

// One token of one branch.
struct TokenUpdate {
  int32_t branch = 0;
  kernels::SampleResult sample;
  int32_t num_logprobs = -1;                         // -1: none asked for
  FinishReason finish_reason = FinishReason::kNone;  // of the branch's last token
};

struct RequestUsage {
  int32_t cached_tokens = 0;    // prompt tokens this worker already had
  int32_t computed_tokens = 0;  // prompt tokens it computed itself
  int64_t output_tokens = 0;    // over all branches
  int32_t preemptions = 0;      // of its branches, each computed again later
  uint64_t kv_bytes_received = 0;
  double wait_ms = 0;     // accepted .. blocks confirmed, or local prefill begun
  double prefill_ms = 0;  // of computed_tokens: Branch
};

// Where a request's answer goes.  Called by the scheduler thread; must not block.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void OnAccepted(int32_t queue_position) = 0;
  // False if the reader is too slow for what it has asked: the scheduler then ends the request.
  virtual bool OnToken(const TokenUpdate& update) = 0;
  // Once, the last call.
  virtual void OnEnd(const absl::Status& status, const RequestUsage& usage) = 0;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_REQUEST_H_
