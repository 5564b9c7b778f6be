// PrefillScheduler: owns the engine, the block pool and every request, on one thread.
//
// Each turn it takes what has been asked of it since the last one, looks at deadlines and leases,
// gives waiting requests blocks and a state slot (reusing cached prefixes), launches a step and
// collects the oldest one: two steps are in flight while there is work.  As chunks are collected
// their blocks become ready for the KvSend of the request.  A request ends in one place, Finish,
// when it has a verdict and neither a step nor a send uses its blocks.
//
// Thread-safe but for Start and Stop; no call blocks.

#ifndef PREFILL_WORKER_PREFILL_SCHEDULER_H_
#define PREFILL_WORKER_PREFILL_SCHEDULER_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "engine/slot_pool.h"
#include "prefill_worker/chunk_step.h"
#include "prefill_worker/kv_sender.h"
#include "prefill_worker/options.h"
#include "prefill_worker/pacing.h"
#include "prefill_worker/prefill_request.h"
#include "worker/ended_requests.h"
#include "worker/kv_event_log.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"
#include "worker/worker_service.h"

namespace prefill_worker {

class PrefillScheduler final : public worker::WorkerControl {
 public:
  // All must outlive it.  `on_engine_failure` is called once, on the scheduler thread, when the
  // engine has broken: the process should end.
  PrefillScheduler(const PrefillOptions& options, worker::WorkerRuntime* runtime, KvSender* sender,
                   worker::KvEventLog* events, worker::WorkerMetrics* metrics,
                   std::function<void()> on_engine_failure);
  ~PrefillScheduler() override;

  void Start();
  // Ends every request with kUnavailable / DRAINING and refuses new ones; returns when their sends
  // have drained, or after quarantine_max.  The thread goes on answering until Stop.
  void EndAll();
  void Stop();

  // Takes a request that CheckRequestSpec has passed: `request` has what "as it came" names.
  // Errors, through the sink: kAlreadyExists, kFailedPrecondition / STALE_ATTEMPT,
  // kResourceExhausted / QUEUE_FULL, kUnavailable / DRAINING; later kAborted, kUnavailable,
  // kDeadlineExceeded, kCancelled.
  void Prefill(std::unique_ptr<PrefillRequest> request);
  // The stream of this number is broken: its request is cancelled.
  void Break(uint64_t stream_id);
  // Errors: kNotFound (nothing is held, or the lease has expired), kAlreadyExists (being pushed),
  // kFailedPrecondition / STALE_ATTEMPT; kResourceExhausted, kAborted, kUnavailable: the push
  // failed and the blocks are held again.
  void PushHeld(const worker::RequestId& held, uint32_t new_attempt, const Destination& destination,
                PushReply reply);
  // The caller of a PushHeld has gone: the blocks are held again.
  void CancelPush(const worker::RequestId& held, uint32_t new_attempt);
  // Returns what is left of the lease from now.  Errors: kNotFound.
  void RenewLease(const worker::RequestId& held,
                  std::function<void(absl::StatusOr<absl::Duration>)> reply);
  // A decode worker stops a transfer to it; what goes to others is none of its business.  `reply`
  // always follows, when no byte of that transfer is under way.
  struct AbortCall {
    worker::RequestId id;
    std::string transfer_id;   // empty: whatever goes there of this attempt
    std::string caller_epoch;  // the decode worker's
    std::string cause;
  };
  void AbortTransfer(AbortCall call, std::function<void(bool any_sent)> reply);

  void FillInfo(ferry::v1::WorkerInfo* info) const override;
  void FillLoad(ferry::v1::LoadReport* report) const override;
  bool Cancel(const worker::RequestId& id, const std::string& reason) override;
  void StartDrain() override;
  Remaining remaining() const override;

 private:
  using Request = PrefillRequest;

  // Queues work for the scheduler thread.
  void Post(std::function<void()> command);

  // Everything below runs on the scheduler thread.
  void Run();
  void RunCommands();
  absl::Time CheckTimes(absl::Time now);
  void AdmitWaiting();
  bool GiveBlocks(Request& request);
  bool LaunchStep();
  void CollectStep();
  void OnCollected(Request& request);
  void OnEngineFailure(const absl::Status& status);

  void Accept(std::unique_ptr<Request> request);
  // Refuses a request that Prefill has counted.
  void Refuse(const Request& request, const absl::Status& status);
  // Starts the request's first transfer when it is time to reserve.
  void MaybeStartSend(Request& request);
  void StartSend(Request& request, const worker::RequestId& id, const Destination& destination);
  void OnSendEnd(const worker::RequestId& id, const SendResult& result);
  void Hold(Request& request, const absl::Status& cause);
  void End(Request& request, absl::Status verdict);
  void MaybeFinish(Request& request);
  void Finish(Request& request);
  PrefillSummary Summary(const Request& request, const SendResult& result) const;

  Request* Find(const worker::RequestId& id);
  // Also by the attempt under which it is being pushed.
  Request* FindByAnyAttempt(const worker::RequestId& id);
  void Forget(const worker::RequestId& id);
  struct CacheCounts {
    worker::BlockCounts blocks;
    worker::BlockCounts state_slots;  // `cached`: snapshots
  };
  CacheCounts CountCache();
  void Publish();

  const PrefillOptions options_;
  worker::WorkerRuntime* const runtime_;
  KvSender* const sender_;
  worker::KvEventLog* const events_;
  worker::WorkerMetrics* const metrics_;
  const std::function<void()> on_engine_failure_;
  std::thread thread_;

  // The scheduler thread's own.
  Pacing pacing_;
  engine::SlotPool penalty_slots_;
  ChunkStep steps_[2];
  std::deque<ChunkStep*> in_flight_;  // at most two, oldest first
  int64_t step_id_ = 0;
  absl::Status engine_failure_;
  absl::flat_hash_map<worker::RequestId, std::unique_ptr<Request>> requests_;
  std::deque<Request*> waiting_;     // first come first served
  std::vector<Request*> computing_;  // admitted, rows or samples left to launch
  worker::EndedRequests ended_;
  std::vector<uint8_t> block_use_;  // scratch of CountCache
  bool ending_all_ = false;

  std::atomic<bool> draining_{false};
  std::atomic<int32_t> num_waiting_{0};

  mutable std::mutex mutex_;         // guards everything below
  std::condition_variable changed_;  // commands_ or stopping_
  std::condition_variable emptied_;  // num_requests_ became 0
  std::vector<std::function<void()>> commands_;
  bool stopping_ = false;
  // What RPC threads ask about.
  absl::flat_hash_set<worker::RequestId> known_;  // ids, and the ids of pushes under way
  int32_t num_requests_ = 0;                      // accepted and not finished
  int32_t num_held_ = 0;                          // of them, waiting under a lease
  CacheCounts cache_;
  int32_t running_ = 0;
  uint64_t waiting_tokens_ = 0;
  double step_ms_ = 0;
};

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_PREFILL_SCHEDULER_H_
