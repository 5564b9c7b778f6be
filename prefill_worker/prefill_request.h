// A request inside the prefill worker.  Plain data; owned by the scheduler, touched by its thread
// only.

#ifndef PREFILL_WORKER_PREFILL_REQUEST_H_
#define PREFILL_WORKER_PREFILL_REQUEST_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/sequence.h"
#include "prefill_worker/kv_sender.h"
#include "worker/worker_service.h"

namespace prefill_worker {

// What PrefillDone says.
struct PrefillSummary {
  int32_t computed_tokens = 0;
  int32_t cached_tokens = 0;  // this worker had them
  uint64_t kv_bytes = 0;
  int32_t kv_blocks = 0;
  std::vector<model::GroupBytes> kv_groups;  // what kv_bytes are
  std::string transport;
  absl::Duration transfer;
  absl::Duration compute;
  double prefill_ms = 0;
  absl::Duration queue;
};

// Where a request's events go: the stream of its RPC.  Thread-safe; ignores what comes after End.
class PrefillSink {
 public:
  virtual ~PrefillSink() = default;
  virtual void Accepted(int32_t queue_position) = 0;
  virtual void Started(int32_t cached_tokens) = 0;
  virtual void Held(absl::Duration lease, const std::string& cause) = 0;
  virtual void Done(const PrefillSummary& summary) = 0;
  virtual void End(const absl::Status& status) = 0;
};

using PushReply = std::function<void(absl::StatusOr<PrefillSummary>)>;

struct PrefillRequest {
  // As it came.
  worker::RequestId id;
  std::string traceparent;  // as it was received; goes to the decode worker
  Destination destination;
  std::shared_ptr<PrefillSink> sink;
  uint64_t stream_id = 0;  // of the sink's RPC: a duplicate has the same id, but another stream
  engine::Sequence seq;    // tokens, sampling of branch 0, root of the hash chain
  int32_t num_branches = 1;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time arrived;

  // Computing.  seq.num_computed counts launched rows, num_collected those whose step has ended.
  bool admitted = false;  // it has blocks
  bool started = false;   // its first chunk was launched
  int32_t cached_tokens = 0;
  int32_t num_collected = 0;
  int32_t steps_in_flight = 0;
  double prefill_ms = 0;    // its share of the steps' time, by tokens
  int32_t next_branch = 0;  // to be sampled
  std::vector<FirstToken> first_tokens;
  absl::Time start_time;
  absl::Time computed_time = absl::InfiniteFuture();  // .. when all first tokens were known

  // Sending.
  std::shared_ptr<KvSend> send;  // null: none now
  bool send_started = false;     // a first one has been
  worker::RequestId send_id;     // under which the decode worker knows it
  kv_transfer::Epoch receiver;   // of the newest send, or of the first one to come
  bool held = false;             // blocks wait under a lease unless `send` is set
  absl::Time lease_end = absl::InfiniteFuture();
  SendResult last_result;  // of the newest send that has ended
  PushReply push_reply;    // of the PushHeld under way

  std::optional<absl::Status> verdict;  // set once; the request ends when nothing is in flight

  int32_t num_tokens() const { return static_cast<int32_t>(seq.tokens.size()); }
  bool all_sampled() const { return static_cast<int32_t>(first_tokens.size()) == num_branches; }
  // Tokens whose blocks hold their final bytes: the last row may be computed again for branches
  // that did not fit one step.
  int32_t num_ready() const {
    return all_sampled() ? num_tokens() : std::min(num_collected, num_tokens() - 1);
  }
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_PREFILL_REQUEST_H_
