// KvSender: moves the blocks of computed prompts to decode workers: the sending side of
// DESIGN.md 5.
//
// Each transfer is a KvSend: link to the decode worker (Handshake and Connect at first contact),
// Reserve, blocks as they become ready, the state slot behind the last one, then TransferDone.  It
// ends exactly once, and only when none of its sends is in flight: from then on its source blocks
// and slot may be reused (rules M2, M5 of serving.md 4).
//
// A thread of its own looks at the transfers, whatever the scheduler is doing: it fails stalled
// ones, fences peers whose sends do not drain, and while the next blocks are still being computed
// sends heartbeats, so that a decode worker tells a slow worker from a stopped one.
//
// Thread-safe.  Nothing here blocks a caller; `on_end` runs on any thread and must not block.

#ifndef PREFILL_WORKER_KV_SENDER_H_
#define PREFILL_WORKER_KV_SENDER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/head_and_sample.h"
#include "kv_transfer/transport.h"
#include "model/cache_spec.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"
#include "worker/worker_service.h"

namespace prefill_worker {

// Where blocks go.
struct Destination {
  std::string address;  // of the decode worker's gRPC server
  kv_transfer::Epoch epoch;
};

// What TransferDone says of a sampled token.
struct FirstToken {
  uint32_t branch = 0;
  int32_t num_logprobs = -1;  // -1: none
  kernels::SampleResult sample;
};

struct SendSpec {
  worker::RequestId id;          // as the decode worker knows it
  std::string traceparent = {};  // of the request
  Destination destination;
  int32_t num_tokens = 0;  // of the prompt
  std::vector<absl::Span<const std::byte>>
      blocks;                              // of the whole prompt, the partial last included
  absl::Span<const std::byte> state_slot;  // behind the whole prompt; empty: the model keeps none
};

struct SendResult {
  absl::Status status;        // OK: the decode worker has confirmed every byte
  bool no_room = false;       // it had no room in time; no byte was sent
  int32_t cached_tokens = 0;  // it had already
  int32_t num_blocks = 0;     // sent
  uint64_t num_bytes = 0;
  std::vector<model::GroupBytes> groups;  // what num_bytes are
  std::string link;                       // "tcp/lo"
  absl::Duration duration;                // first block sent .. confirmation
};

// One transfer.
class KvSend {
 public:
  virtual ~KvSend() = default;
  // The first `num_blocks` blocks hold their final bytes.
  virtual void SetReady(int32_t num_blocks) = 0;
  // All of them do, and these are the prompt's first tokens.
  virtual void Complete(std::vector<FirstToken> first_tokens) = 0;
  // Gives up.  The decode worker is told; on_end follows with `cause`.  Ignored after the end.
  virtual void Stop(absl::Status cause) = 0;
  // The decode worker asks to stop: as Stop with kAborted, and `drained` is called when no byte is
  // under way any more; false: none had been sent at all.
  virtual void StopForPeer(const std::string& cause,
                           std::function<void(bool any_sent)> drained) = 0;
  // Empty until reserved.
  virtual std::string transfer_id() const = 0;
  // It has given up, and a send is still in flight.
  virtual bool draining() const = 0;
};

class KvSender {
 public:
  virtual ~KvSender() = default;
  // host:port of our gRPC server, where decode workers reach AbortTransfer.  REQUIRES: called
  // before the first Start, which it happens before.
  virtual void SetOwnAddress(std::string address) = 0;
  virtual std::shared_ptr<KvSend> Start(SendSpec spec, std::function<void(SendResult)> on_end) = 0;
  // Ends what is left; no `on_end` runs after it.  Closes the transport.
  virtual void Close() = 0;
};

// Becomes the transport's sink.  `runtime` and `metrics` must outlive it.
std::unique_ptr<KvSender> CreateKvSender(worker::WorkerRuntime* runtime,
                                         worker::WorkerMetrics* metrics);

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_KV_SENDER_H_
