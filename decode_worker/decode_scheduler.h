// DecodeScheduler: every request of a decode worker from its acceptance to its end, and the thread
// that owns the engine and the block pool.
//
// A request is accepted, then waits for its blocks: either P reserves and pushes them
// (transfer_calls.h), or the prompt is prefilled here.  Then its branches run in the batch
// (batch_runner.h).  It ends in exactly one way: EndRequest.
//
// Everything that asks for blocks (local prompts, reservations, preempted branches) waits in one
// queue, oldest request first, whatever its priority: so nobody starves, and who has been preempted
// comes back before anybody new is let in.
//
// The public calls are thread-safe and do not block: they leave work in the inbox.

#ifndef DECODE_WORKER_DECODE_SCHEDULER_H_
#define DECODE_WORKER_DECODE_SCHEDULER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "decode_worker/admission.h"
#include "decode_worker/batch_runner.h"
#include "decode_worker/inbox.h"
#include "decode_worker/kv_receiver.h"
#include "decode_worker/options.h"
#include "decode_worker/request.h"
#include "decode_worker/transfer_calls.h"
#include "kv_transfer/incoming_transfers.h"
#include "worker/ended_requests.h"
#include "worker/kv_event_log.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"
#include "worker/worker_service.h"

namespace decode_worker {

class DecodeScheduler final : public worker::WorkerControl, private BatchRunner::Listener {
 public:
  // `notify_sender` tells a prefill worker that its transfer is not wanted any more; it must not
  // block. Everything must outlive the scheduler; `incoming` is destroyed after Stop.
  DecodeScheduler(const DecodeOptions& options, worker::WorkerRuntime* runtime,
                  kv_transfer::IncomingTransfers* incoming, worker::KvEventLog* events,
                  worker::WorkerMetrics* metrics, std::function<void(AbortNotice)> notify_sender);
  ~DecodeScheduler() override;

  void Start();
  // Ends every request with `status` and refuses new ones.  Returns at once.
  void EndAll(absl::Status status);
  // Ends every request as UNAVAILABLE, then the thread.  Answers what is still in the inbox.
  void Stop();

  // Takes a checked request.  What follows goes to `sink`; the result names the submission.
  // Errors (`sink` is not called): kUnavailable when draining, kResourceExhausted when the inbox is
  // full.
  absl::StatusOr<uint64_t> Submit(RequestSpec spec, std::shared_ptr<TokenSink> sink);
  // Ends one submission, and no other request of the same name.
  void CancelSubmission(uint64_t submission, absl::Status cause);

  // Calls of prefill workers.  `done` is called once, on the scheduler thread or at once.
  void Reserve(ReserveCall call, std::function<void(absl::StatusOr<ReserveGrant>)> done);
  void ConfirmTransfer(ConfirmCall call, std::function<void(absl::Status)> done);
  void ReleaseTransfer(TransferRef ref, std::function<void(absl::Status)> done);
  // `done` learns whether any byte had landed; nothing lands any more.
  void AbortTransfer(TransferRef ref, std::string cause, std::function<void(bool landed)> done);

  // worker::WorkerControl.
  void FillInfo(ferry::v1::WorkerInfo* info) const override;
  void FillLoad(ferry::v1::LoadReport* report) const override;
  bool Cancel(const worker::RequestId& id, const std::string& reason) override;
  void StartDrain() override;
  Remaining remaining() const override;

  // What the scheduler publishes after every turn of its loop.
  struct Snapshot {
    int32_t waiting_requests = 0;
    int64_t waiting_tokens = 0;  // prompt tokens still to compute here
    int32_t running_requests = 0;
    worker::BlockCounts blocks;
    worker::BlockCounts state_slots;  // `cached`: snapshots
    BatchRunner::Stats batch;
  };
  Snapshot snapshot() const;
  // Waits until a published snapshot is as `wanted`; false if `timeout` passed first.
  bool WaitForSnapshot(const std::function<bool(const Snapshot&)>& wanted,
                       absl::Duration timeout) const;
  // Not OK once the engine is broken: the process should end.
  absl::Status health() const;

 private:
  enum class Phase : uint8_t {
    kWaitReserve,  // P has not asked for blocks yet
    kReserving,    // P has asked; in the queue
    kReceiving,    // the blocks are with the receiver
    kQueued,       // prefilled here; in the queue
    kRunning,      // every branch is in the batch, in the queue (preempted) or finished
  };
  struct Request {
    RequestSpec spec;
    uint64_t serial = 0;
    std::shared_ptr<TokenSink> sink;
    Phase phase = Phase::kWaitReserve;
    std::vector<std::unique_ptr<Branch>> branches;  // [n]; null once finished
    int32_t num_unfinished = 0;
    Clock::time_point accepted_at;
    Clock::time_point first_token_at{};
    RequestUsage usage;
    // kReserving: who waits for the answer, and until when.
    std::function<void(absl::StatusOr<ReserveGrant>)> reserve_done;
    Clock::time_point reserve_until{};
    // kReceiving (transfer_id stays known afterwards).
    kv_transfer::TransferId transfer_id{};
    kv_transfer::Epoch sender;
    std::function<void(absl::Status)> confirm_done;  // not null once P has announced
    std::vector<FirstToken> first_tokens;
  };

  // BatchRunner::Listener.
  void OnSample(Branch& branch, const kernels::SampleResult& sample) override;
  void OnNoToken(Branch& branch) override;
  void OnPreempted(Branch& branch) override;

  void Run();
  // The process should end; nothing is taken any more.
  void OnEngineFailure(const absl::Status& status);
  void Accept(RequestSpec spec, uint64_t serial, std::shared_ptr<TokenSink> sink);
  absl::Status CheckAccept(const RequestSpec& spec);
  void AdmitQueued();
  void StartLocal(Request& request, Branch& branch, std::vector<engine::BlockId> fresh);
  void Enqueue(Branch& branch) { queue_[{branch.serial, branch.index}] = &branch; }
  void EndOverdue(Clock::time_point now);
  Clock::time_point NextDeadline() const;
  // The one function that ends a request.  `request` is gone afterwards.
  void EndRequest(Request& request, const absl::Status& status);
  void EndRequests(const absl::Status& status);
  void FinishBranch(Request& request, int32_t index);
  void ForgetLive(const worker::RequestId& id);

  // Reports (decode_scheduler_reports.cc).
  void Publish();
  void ReportBatch();

  // Transfers (decode_scheduler_transfers.cc).
  absl::StatusOr<Request*> Find(const worker::RequestId& id);
  void DoReserve(ReserveCall call, std::function<void(absl::StatusOr<ReserveGrant>)> done);
  void GrantReservation(Request& request, Branch& trunk, std::vector<engine::BlockId> fresh);
  void DoConfirm(ConfirmCall call, std::function<void(absl::Status)> done);
  void DoRelease(TransferRef ref, std::function<void(absl::Status)> done);
  void DoAbort(TransferRef ref, std::string cause, std::function<void(bool)> done);
  void OnTransferEnd(KvReceiver::End end);
  void Commit(Request& request, std::vector<engine::BlockId> blocks, engine::SlotId state_slot);
  // kReceiving or kReserving -> kWaitReserve, without the blocks.
  void ReturnToWaitReserve(Request& request);

  const DecodeOptions options_;
  worker::WorkerRuntime* const runtime_;
  worker::KvEventLog* const events_;
  worker::WorkerMetrics* const metrics_;
  const std::function<void(AbortNotice)> notify_sender_;

  Inbox inbox_;
  std::atomic<bool> draining_ = false;
  std::atomic<uint64_t> next_serial_ = 1;

  mutable std::condition_variable published_;
  mutable std::mutex shared_mutex_;                       // guards the next three
  absl::flat_hash_map<worker::RequestId, int32_t> live_;  // submitted and not ended
  Snapshot snapshot_;
  absl::Status health_;

  // The scheduler thread's own.
  absl::flat_hash_map<uint64_t, std::unique_ptr<Request>> requests_;  // by serial
  absl::flat_hash_map<std::string, Request*> by_id_;                  // by request_id
  worker::EndedRequests ended_;
  std::map<std::pair<uint64_t, int32_t>, Branch*> queue_;  // by (serial, branch): want blocks
  Admission admission_;
  BatchRunner runner_;
  KvReceiver receiver_;
  BatchRunner::Stats reported_;  // what metrics_ knows of the batch
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace decode_worker

#endif  // DECODE_WORKER_DECODE_SCHEDULER_H_
