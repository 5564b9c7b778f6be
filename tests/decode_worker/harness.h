// What tests of the decode worker share: a runtime over any engine and a loopback link, a sink that
// records, and a prefill side that computes a prompt with an engine of its own.

#ifndef TESTS_DECODE_WORKER_HARNESS_H_
#define TESTS_DECODE_WORKER_HARNESS_H_

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "decode_worker/decode_scheduler.h"
#include "decode_worker/options.h"
#include "decode_worker/request.h"
#include "engine/engine.h"
#include "kv_transfer/incoming_transfers.h"
#include "kv_transfer/loopback_transport.h"
#include "kv_transfer/outgoing_transfer.h"
#include "worker/kv_event_log.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"

namespace decode_worker {

inline constexpr absl::Duration kPatience = absl::Seconds(20);  // a failure, not a wait

// Usable blocks and state slots of a runtime under test.
struct Room {
  int32_t num_blocks = 64;
  int32_t num_state_slots = 0;  // of a model with state
  int32_t snapshot_blocks = 2;
};

// Null `network`: a UCX transport.  The memory starts full of bytes that nobody wrote.
std::unique_ptr<worker::WorkerRuntime> MakeRuntime(
    std::unique_ptr<engine::Engine> engine, const Room& room,
    const std::shared_ptr<kv_transfer::LoopbackNetwork>& network);

// `count` tokens below `vocab_size`, the same for the same seed.
std::vector<int32_t> RandomTokens(int32_t count, uint64_t seed, int32_t vocab_size = 50);

class RecordingSink final : public TokenSink {
 public:
  void OnAccepted(int32_t queue_position) override;
  bool OnToken(const TokenUpdate& update) override;
  void OnEnd(const absl::Status& status, const RequestUsage& usage) override;

  // Blocks until the request has ended, or fails the test.
  absl::Status Wait();
  // Blocks until it is accepted, or ended; or until `count` tokens are there.
  void WaitAccepted();
  void WaitTokens(int32_t count);

  std::vector<int32_t> tokens(int32_t branch = 0) const;
  FinishReason finish(int32_t branch = 0) const;
  std::vector<TokenUpdate> updates() const;
  RequestUsage usage() const;
  void RefuseAfter(int32_t tokens) { refuse_after_ = tokens; }

 private:
  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  bool accepted_ = false;
  std::vector<TokenUpdate> updates_;
  std::optional<absl::Status> end_;
  RequestUsage usage_;
  int32_t refuse_after_ = -1;
};

// A scheduler with everything around it but gRPC.
class SchedulerHarness final {
 public:
  SchedulerHarness(DecodeOptions options, std::unique_ptr<engine::Engine> engine, const Room& room,
                   bool ucx = false);
  ~SchedulerHarness();

  DecodeScheduler& scheduler() { return *scheduler_; }
  worker::WorkerRuntime& runtime() { return *runtime_; }
  const std::shared_ptr<kv_transfer::LoopbackNetwork>& network() { return network_; }
  worker::KvEventLog& events() { return events_; }
  std::vector<AbortNotice> notices() const;

  // Submits a local prompt, or one whose blocks `prefill_epoch` will push.
  std::shared_ptr<RecordingSink> Submit(RequestSpec spec);
  uint64_t last_submission() const { return last_submission_; }

  // Nothing runs, every block is free or cached and every state slot free or a snapshot; their sums
  // are the pool.
  bool WaitIdle();

 private:
  std::shared_ptr<kv_transfer::LoopbackNetwork> network_;
  std::unique_ptr<worker::WorkerRuntime> runtime_;
  std::unique_ptr<worker::WorkerMetrics> metrics_;
  worker::KvEventLog events_;
  mutable std::mutex mutex_;  // guards notices_
  std::vector<AbortNotice> notices_;
  std::unique_ptr<DecodeScheduler> scheduler_;
  std::unique_ptr<kv_transfer::IncomingTransfers> incoming_;
  uint64_t last_submission_ = 0;
};

// A prefill worker without a service: engine, blocks, and the sending side of a loopback link.
class FakePrefill final {
 public:
  FakePrefill(std::unique_ptr<engine::Engine> engine, const Room& room,
              const std::shared_ptr<kv_transfer::LoopbackNetwork>& network);
  ~FakePrefill();

  const kv_transfer::Epoch& epoch() const { return runtime_->epoch; }
  worker::WorkerRuntime& runtime() { return *runtime_; }
  void Connect(worker::WorkerRuntime& decode);

  // Computes the prompt in one step; returns the first token of each branch.  Its blocks stay until
  // the next Compute.
  std::vector<FirstToken> Compute(const RequestSpec& spec);
  // Starts sending the prompt's blocks from block `first` on; `count` of them, or all, and then the
  // state slot if there is one.
  std::shared_ptr<kv_transfer::OutgoingTransfer> Send(const kv_transfer::Epoch& receiver,
                                                      const kv_transfer::TransferId& id,
                                                      uint32_t attempt, int32_t first,
                                                      int32_t count = -1);
  // Sends all from `first` on and waits until the source is read no more.
  kv_transfer::OutgoingResult SendAll(const kv_transfer::Epoch& receiver,
                                      const kv_transfer::TransferId& id, uint32_t attempt,
                                      int32_t first);

 private:
  class RefusingSink;

  std::unique_ptr<RefusingSink> sink_;
  std::unique_ptr<worker::WorkerRuntime> runtime_;
  engine::Sequence computed_;  // holds the blocks and the state slot of the last Compute
  int64_t next_step_id_ = 0;
};

// Reserve at the scheduler, and its answer.
absl::StatusOr<ReserveGrant> ReserveAndWait(DecodeScheduler& scheduler, ReserveCall call);
absl::Status ConfirmAndWait(DecodeScheduler& scheduler, ConfirmCall call);

}  // namespace decode_worker

#endif  // TESTS_DECODE_WORKER_HARNESS_H_
