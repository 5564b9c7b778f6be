#include "decode_worker/decode_service.h"

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "decode_worker/decode_scheduler.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "service/trace_metadata.h"
#include "status/grpc_status.h"

namespace decode_worker {
namespace {

using ferry::v1::DecodeEvent;
using ferry::v1::DecodeRequest;

// Tokens that may wait for a reader.  Waiting tokens of a branch go into one message, so this
// bounds the memory of a stream: 16384 tokens with 20 alternatives each are about 5 MB.
constexpr int64_t kMaxUnreadTokens = 16384;

ferry::v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return ferry::v1::FINISH_REASON_STOP;
    case FinishReason::kLength:
      return ferry::v1::FINISH_REASON_LENGTH;
    case FinishReason::kNone:
      break;
  }
  return ferry::v1::FINISH_REASON_UNSPECIFIED;
}

void AddToken(const TokenUpdate& update, ferry::v1::DecodeTokens* tokens) {
  const kernels::SampleResult& sample = update.sample;
  tokens->set_branch(static_cast<uint32_t>(update.branch));
  tokens->add_token_ids(static_cast<uint32_t>(sample.token_id));
  tokens->set_finish_reason(ToProto(update.finish_reason));
  if (update.num_logprobs < 0) return;
  ferry::v1::PositionLogprobs* logprobs = tokens->add_logprobs();
  logprobs->mutable_chosen()->set_token_id(static_cast<uint32_t>(sample.token_id));
  logprobs->mutable_chosen()->set_logprob(sample.logprob);
  for (int32_t i = 0; i < update.num_logprobs; ++i) {
    if (sample.top_ids[i] < 0) break;  // fewer tokens than asked for
    ferry::v1::TokenLogprob* top = logprobs->add_top();
    top->set_token_id(static_cast<uint32_t>(sample.top_ids[i]));
    top->set_logprob(sample.top_logprobs[i]);
  }
}

// One Decode call.  It lives until gRPC has called OnDone and the scheduler has let go of it,
// whichever comes last.  The scheduler thread fills `waiting_`; one write is on its way at a time.
class DecodeStream final : public grpc::ServerWriteReactor<DecodeEvent>,
                           public TokenSink,
                           public std::enable_shared_from_this<DecodeStream> {
 public:
  DecodeStream(DecodeScheduler* scheduler, grpc::CallbackServerContext* context)
      : scheduler_(scheduler), context_(context) {}

  void Begin(const DecodeRequest& request, const DecodeLimits& limits) {
    self_ = shared_from_this();
    absl::StatusOr<RequestSpec> spec = CheckRequest(request, limits);
    if (!spec.ok()) return OnEnd(spec.status(), {});
    spec->traceparent = service::ReceivedTraceparent(*context_);
    const absl::StatusOr<uint64_t> submitted =
        scheduler_->Submit(std::move(*spec), shared_from_this());
    if (!submitted.ok()) return OnEnd(submitted.status(), {});
    bool cancelled;
    {
      std::lock_guard lock(mutex_);
      submission_ = *submitted;
      cancelled = cancelled_;
    }
    if (cancelled) CancelSubmission(*submitted);
  }

  // TokenSink, on the scheduler thread.
  void OnAccepted(int32_t queue_position) override {
    DecodeEvent event;
    event.mutable_accepted()->set_queue_position(static_cast<uint32_t>(queue_position));
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(event));
    }
    Continue();
  }

  bool OnToken(const TokenUpdate& update) override {
    {
      std::lock_guard lock(mutex_);
      if (unread_tokens_ >= kMaxUnreadTokens) return false;
      ++unread_tokens_;
      ferry::v1::DecodeTokens* tokens = nullptr;
      for (DecodeEvent& event : waiting_) {
        if (event.has_tokens() && event.tokens().branch() == static_cast<uint32_t>(update.branch)) {
          tokens = event.mutable_tokens();
        }
      }
      if (tokens == nullptr) tokens = waiting_.emplace_back().mutable_tokens();
      AddToken(update, tokens);
    }
    Continue();
    return true;
  }

  void OnEnd(const absl::Status& status, const RequestUsage& usage) override {
    bool stuck = false;
    {
      std::lock_guard lock(mutex_);
      if (status.ok()) {
        ferry::v1::DecodeDone* done = waiting_.emplace_back().mutable_done();
        done->set_cached_tokens(static_cast<uint32_t>(usage.cached_tokens));
        done->set_computed_tokens(static_cast<uint32_t>(usage.computed_tokens));
        done->set_kv_bytes_received(usage.kv_bytes_received);
        done->set_wait_ms(usage.wait_ms);
        done->set_prefill_ms(usage.prefill_ms);
      } else {
        stuck = unread_tokens_ >= kMaxUnreadTokens;
        waiting_.clear();
      }
      end_ = status;
    }
    if (stuck) {
      // A reader that has stopped reading would never let the last write finish.
      std::lock_guard lock(context_mutex_);
      if (context_ != nullptr) context_->TryCancel();
    }
    Continue();
  }

  // grpc::ServerWriteReactor.
  void OnWriteDone(bool ok) override {
    {
      std::lock_guard lock(mutex_);
      writing_ = false;
      if (event_.has_tokens()) unread_tokens_ -= event_.tokens().token_ids_size();
      if (!ok) {
        waiting_.clear();
        broken_ = true;
      }
    }
    Continue();
  }

  void OnCancel() override {
    std::optional<uint64_t> submission;
    {
      std::lock_guard lock(mutex_);
      cancelled_ = true;
      submission = submission_;
    }
    if (submission.has_value()) CancelSubmission(*submission);
  }

  void OnDone() override {
    const std::shared_ptr<DecodeStream> self = std::move(self_);
    {
      std::lock_guard lock(context_mutex_);
      context_ = nullptr;
    }
    std::lock_guard lock(mutex_);
    done_ = true;
  }

 private:
  void CancelSubmission(uint64_t submission) {
    scheduler_->CancelSubmission(submission, absl::CancelledError("the caller has gone"));
  }

  // Starts the next write or finishes.  gRPC is called without the lock: it may call back at once.
  void Continue() {
    bool write = false;
    std::optional<absl::Status> finish;
    {
      std::lock_guard lock(mutex_);
      if (writing_ || finished_ || done_) return;
      if (!waiting_.empty() && !broken_) {
        event_ = std::move(waiting_.front());
        waiting_.pop_front();
        writing_ = true;
        write = true;
      } else if (end_.has_value()) {
        finished_ = true;
        finish = end_;
      }
    }
    if (write) StartWrite(&event_);
    if (finish.has_value()) Finish(status::ToGrpc(*finish));
  }

  DecodeScheduler* const scheduler_;
  std::mutex context_mutex_;  // guards context_, which gRPC frees after OnDone
  grpc::CallbackServerContext* context_;
  std::shared_ptr<DecodeStream> self_;  // until OnDone

  std::mutex mutex_;  // guards everything below; event_ belongs to gRPC while writing_
  std::optional<uint64_t> submission_;
  bool cancelled_ = false;
  bool writing_ = false;
  bool broken_ = false;    // a write failed: the caller has gone
  bool finished_ = false;  // Finish was called
  bool done_ = false;
  int64_t unread_tokens_ = 0;  // in waiting_ and event_
  std::deque<DecodeEvent> waiting_;
  DecodeEvent event_;
  std::optional<absl::Status> end_;
};

class DecodeServiceImpl final : public DecodeService,
                                private ferry::v1::DecodeWorker::CallbackService {
 public:
  DecodeServiceImpl(DecodeScheduler* scheduler, const DecodeLimits& limits)
      : scheduler_(scheduler), limits_(limits) {}

  grpc::Service* grpc_service() override { return this; }

 private:
  grpc::ServerWriteReactor<DecodeEvent>* Decode(grpc::CallbackServerContext* context,
                                                const DecodeRequest* request) override {
    auto stream = std::make_shared<DecodeStream>(scheduler_, context);
    stream->Begin(*request, limits_);
    return stream.get();
  }

  DecodeScheduler* const scheduler_;
  const DecodeLimits limits_;
};

}  // namespace

std::unique_ptr<DecodeService> CreateDecodeService(DecodeScheduler* scheduler,
                                                   const DecodeLimits& limits) {
  return std::make_unique<DecodeServiceImpl>(scheduler, limits);
}

}  // namespace decode_worker
