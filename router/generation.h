// Generation: one request from its admission to its end: the state machine of serving.md 3.1.
//
//   queued ── placed ──► dispatched ── D accepted ──► prefilling ── first token ──► decoding ──►
//   finishing
//     ▲  ▲                   │             (local: D computes)│ │                      │ │ │  └── a
//     try failed ───┴───────────────────────────────┘ held: another D         │             │
//     └───────────────────── queued again, blocks held at P ◄──┘                       ▼ ▼
//                                                          every way leads to one End(status):
//                                                          ended
//
// It owns both worker streams.  What the client was given is never changed: before the first token
// a failed try is repeated elsewhere; after it the output goes on elsewhere behind what has been
// sent (n > 1: it is drawn again, compared with what has been sent, and goes on from there), at
// most max_migrations times; then a failure ends the request with its status.
//
// Owned by the loop's thread.

#ifndef ROUTER_GENERATION_H_
#define ROUTER_GENERATION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "router/dispatcher.h"
#include "router/event_loop.h"
#include "router/retry_policy.h"
#include "router/text_stream.h"
#include "router/worker_legs.h"

namespace ferry::v1 {
class GenerateResponse;
}

namespace tracing {
class SpanExporter;
}

namespace router {

// The client's end of the request, as the generation sees it.  Called on the loop's thread only.
class ClientStream {
 public:
  virtual ~ClientStream() = default;
  virtual void Write(const ferry::v1::GenerateResponse& message) = 0;
  // Once, last.
  virtual void Finish(const absl::Status& status) = 0;
  // Bytes written that the client has not taken yet.
  virtual size_t pending_bytes() const = 0;
  // The client has gone before there was a generation to tell.  Any thread.
  virtual bool gone() const = 0;
};

// What all generations of a router share.
struct GenerationContext {
  EventLoop* loop = nullptr;
  WorkerRegistry* registry = nullptr;
  Dispatcher* dispatcher = nullptr;
  LoadLedger* ledger = nullptr;
  CircuitBreakers* breakers = nullptr;
  RouterMetrics* metrics = nullptr;
  tracing::SpanExporter* spans = nullptr;  // null: nobody wants them
  int32_t max_attempts = 10;
  int32_t max_migrations = 1;
  absl::Duration accept_limit = absl::Seconds(10);
  absl::Duration stream_idle = absl::Seconds(30);
};

class Generation final : public Waiting, private DecodeLeg::Owner, private PrefillLeg::Owner {
 public:
  // `on_ended` is called once, last; it must not destroy the generation at once.
  Generation(const GenerationContext& context, PreparedRequest request, int64_t arrival_number,
             std::shared_ptr<ClientStream> client, std::function<void(Generation*)> on_ended);
  ~Generation() override;

  void Start();
  void OnClientGone();
  // The client has taken what was written.
  void OnClientDrained();
  void OnWorkerLost(WorkerSlot slot, const std::string& epoch, const absl::Status& cause);
  // Ends it because the router ends.
  void Abort(const absl::Status& status) { End(status); }

  const std::string& request_id() const { return prepared_.request_id; }
  bool has_ended() const { return phase_ == Phase::kEnded; }
  // Runs at the worker, or is about to.
  bool Needs(WorkerSlot slot) const;

 private:
  enum class Phase { kQueued, kDispatched, kPrefilling, kDecoding, kFinishing, kEnded };
  enum class Leg { kPrefill, kDecode };
  struct Branch {
    TextStream text;
    std::vector<uint32_t> tokens = {};  // what the client has
    size_t position = 0;                // of the worker's next token among all tokens
    bool finished = false;              // for the client
    bool ended_by_worker = false;
    absl::Time last_token = absl::InfinitePast();
  };
  static const char* PhaseName(Phase phase);

  // Waiting
  void OnPlaced(const Placement& placement) override;
  void OnUnplaceable(const absl::Status& status) override;
  // DecodeLeg::Owner
  void OnDecodeAccepted() override;
  void OnDecodeTokens(const ferry::v1::DecodeTokens& tokens) override;
  void OnDecodeDone(const ferry::v1::DecodeDone& done) override;
  void OnDecodeFailed(const absl::Status& status) override;
  // PrefillLeg::Owner
  void OnPrefillAccepted() override;
  void OnPrefillStarted() override;
  void OnPrefillHeld(const std::string& cause) override;
  void OnPrefillDone(const ferry::v1::PrefillDone& done) override;
  void OnPrefillFailed(const absl::Status& status) override;
  void OnPushHeldFailed(const absl::Status& status) override;

  void FillSpec(ferry::v1::RequestSpec* spec) const;
  void OpenPrefill();
  void PushHeldBlocks();
  void ArmAcceptTimer(Leg leg);
  void WatchIdle();
  // A try, or the hand-over of held blocks, has failed at `leg`.
  void FailTry(Leg leg, const absl::Status& error);
  void Avoid(Leg leg, absl::Duration back_off);
  // Tells the breaker of the leg's worker.
  void Blame(Leg leg);
  bool MayMigrate(const absl::Status& error) const;
  // Prepares everything but the streams for going on elsewhere.
  void Migrate();
  void EndFailed(const absl::Status& error);
  // Takes off what the client has.  False: it has others, and the request has ended.
  bool TakeRepeated(Branch* branch, ferry::v1::DecodeTokens* tokens);
  void Deliver(Branch* branch, const ferry::v1::DecodeTokens& tokens, absl::Time now);
  void CloseDecode(const std::string& reason);
  void ClosePrefill(const std::string& reason);
  void OutputComplete();
  void FinishIfSettled();
  void WriteSummary();
  void End(const absl::Status& status);
  void LogEnd(const absl::Status& status) const;
  // generation_trace.cc
  std::string Traceparent() const;
  void ExportSpans(const absl::Status& status) const;
  // Where the prompt is or was computed remotely; -1: nowhere.
  WorkerSlot PrefillSlot() const { return held_at >= 0 ? held_at : placement_.prefill; }
  absl::Duration Since(absl::Time from) const { return EventLoop::Now() - from; }
  // First token .. last token.  REQUIRES: there is one.
  absl::Duration DecodeTime() const;

  const GenerationContext context_;
  PreparedRequest prepared_;  // after a migration its tokens are prompt and output
  const std::shared_ptr<ClientStream>
      client_;  // shared with gRPC, which may outlive the generation
  const std::function<void(Generation*)> on_ended_;

  Phase phase_ = Phase::kQueued;
  uint32_t attempt_ = 0;
  int32_t migrations_ = 0;
  FailureCounts failures_;
  std::string last_failure_;  // of a try, for the deadline's message; empty: none has failed
  // Of this try: the worker has taken the request.
  bool decode_accepted_ = false;
  bool prefill_accepted_ = false;
  Placement placement_;
  std::string prefill_epoch_;
  std::string decode_epoch_;
  std::string prefill_address_;
  std::string decode_address_;
  std::unique_ptr<PrefillLeg> prefill_leg_;
  std::unique_ptr<DecodeLeg> decode_leg_;
  uint32_t attempt_held_ = 0;

  std::vector<Branch> branches_;
  int32_t open_branches_ = 0;
  int64_t output_tokens_ = 0;
  int64_t further_tokens_ = 0;  // of these: after the first message of their branch
  bool paused_ = false;         // the client is slow: the decode stream is not read on
  std::unique_ptr<ferry::v1::PrefillDone> prefill_done_;
  std::unique_ptr<ferry::v1::DecodeDone> decode_done_;

  // Clock readings; InfinitePast: not yet.
  absl::Time queued_at_;
  absl::Time placed_at_ = absl::InfinitePast();
  absl::Time first_token_at_ = absl::InfinitePast();
  absl::Time prefill_started_at_ = absl::InfinitePast();  // of this try
  absl::Time prefill_done_at_ = absl::InfinitePast();
  absl::Duration queue_time_ = absl::ZeroDuration();
  absl::Time silent_since_;  // of the decode worker; the loop's AwakeNow

  EventLoop::TimerId deadline_timer_ = 0;
  EventLoop::TimerId ttft_timer_ = 0;  // until it goes to a worker
  EventLoop::TimerId accept_timer_ = 0;
  EventLoop::TimerId idle_timer_ = 0;
  EventLoop::TimerId finish_timer_ = 0;
};

}  // namespace router

#endif  // ROUTER_GENERATION_H_
