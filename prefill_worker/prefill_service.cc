#include "prefill_worker/prefill_service.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "service/server_reactors.h"
#include "service/trace_metadata.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"
#include "steady_time/steady_time.h"
#include "worker/request_spec.h"

namespace prefill_worker {
namespace {

using ferry::v1::PrefillEvent;
using service::DeferredReply;
using EventStream = service::OutboundStream<PrefillEvent>;

void FillDone(const PrefillSummary& summary, ferry::v1::PrefillDone* done) {
  done->set_computed_tokens(summary.computed_tokens);
  done->set_cached_tokens(summary.cached_tokens);
  done->set_kv_bytes(summary.kv_bytes);
  done->set_kv_blocks(summary.kv_blocks);
  for (const model::GroupBytes& group : summary.kv_groups) {
    worker::FillGroupBytes(group, done->add_groups());
  }
  done->set_transport(summary.transport);
  done->set_transfer_ms(absl::ToDoubleMilliseconds(summary.transfer));
  done->set_compute_ms(absl::ToDoubleMilliseconds(summary.compute));
  done->set_queue_ms(absl::ToDoubleMilliseconds(summary.queue));
  done->set_prefill_ms(summary.prefill_ms);
}

class StreamSink final : public PrefillSink {
 public:
  explicit StreamSink(std::shared_ptr<EventStream> stream) : stream_(std::move(stream)) {}

  void Accepted(int32_t queue_position) override {
    PrefillEvent event;
    event.mutable_accepted()->set_queue_position(queue_position);
    stream_->Push(std::move(event));
  }
  void Started(int32_t cached_tokens) override {
    PrefillEvent event;
    event.mutable_started()->set_cached_tokens(cached_tokens);
    stream_->Push(std::move(event));
  }
  void Held(absl::Duration lease, const std::string& cause) override {
    PrefillEvent event;
    event.mutable_held()->set_lease_ms(absl::ToInt64Milliseconds(lease));
    event.mutable_held()->set_cause(cause);
    stream_->Push(std::move(event));
  }
  void Done(const PrefillSummary& summary) override {
    PrefillEvent event;
    FillDone(summary, event.mutable_done());
    stream_->Push(std::move(event));
  }
  void End(const absl::Status& status) override { stream_->End(status::ToGrpc(status)); }

 private:
  const std::shared_ptr<EventStream> stream_;
};

absl::StatusOr<Destination> ParseDestination(const ferry::v1::WorkerRef& ref) {
  Destination destination;
  destination.address = ref.address();
  if (ref.address().empty()) return absl::InvalidArgumentError("decode.address is empty");
  const auto epoch = kv_transfer::Epoch::FromBytes(ref.epoch());
  if (!epoch.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("decode.epoch: ", std::string(epoch.status().message())));
  }
  destination.epoch = *epoch;
  return destination;
}

class PrefillService final : public ferry::v1::PrefillWorker::CallbackService {
 public:
  PrefillService(const worker::WorkerRuntime* runtime, PrefillScheduler* scheduler)
      : runtime_(runtime), scheduler_(scheduler) {
    limits_.model = runtime->model_name;
    limits_.vocab_size = runtime->engine->network().config().vocab_size;
    limits_.max_model_len = runtime->engine->network().max_model_len();
    limits_.block_size = runtime->block_size();
    limits_.usable_blocks = runtime->pool->num_blocks() - 1;
  }

  grpc::ServerWriteReactor<PrefillEvent>* Prefill(
      grpc::CallbackServerContext* context, const ferry::v1::PrefillRequest* message) override {
    const uint64_t stream_id = ++last_stream_id_;
    auto stream = EventStream::Create([this, stream_id] { scheduler_->Break(stream_id); });
    absl::StatusOr<std::unique_ptr<PrefillRequest>> request = Parse(*message);
    if (!request.ok()) {
      stream->End(status::ToGrpc(request.status()));
      return stream.get();
    }
    (*request)->traceparent = service::ReceivedTraceparent(*context);
    (*request)->sink = std::make_shared<StreamSink>(stream);
    (*request)->stream_id = stream_id;
    EventStream* const reactor = stream.get();  // gRPC's own reference keeps it
    scheduler_->Prefill(*std::move(request));
    return reactor;
  }

  grpc::ServerUnaryReactor* PushHeld(grpc::CallbackServerContext*,
                                     const ferry::v1::PushHeldRequest* message,
                                     ferry::v1::PushHeldResponse* response) override {
    const worker::RequestId held{message->request_id(), message->attempt_held()};
    const uint32_t attempt = message->attempt();
    auto reply =
        DeferredReply::Create([this, held, attempt] { scheduler_->CancelPush(held, attempt); });
    absl::Status status = CheckEpoch(message->worker_epoch());
    absl::StatusOr<Destination> destination = ParseDestination(message->decode());
    if (status.ok()) status = destination.status();
    if (!status.ok()) {
      reply->Reply(status::ToGrpc(status));
      return reply.get();
    }
    scheduler_->PushHeld(held, attempt, *destination,
                         [reply, response](absl::StatusOr<PrefillSummary> summary) {
                           reply->Reply(status::ToGrpc(summary.status()), [&] {
                             if (summary.ok()) FillDone(*summary, response->mutable_done());
                           });
                         });
    return reply.get();
  }

  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext*,
                                       const ferry::v1::RenewLeaseRequest* message,
                                       ferry::v1::RenewLeaseResponse* response) override {
    auto reply = DeferredReply::Create(nullptr);
    if (const absl::Status status = CheckEpoch(message->worker_epoch()); !status.ok()) {
      reply->Reply(status::ToGrpc(status));
      return reply.get();
    }
    scheduler_->RenewLease({message->key().request_id(), message->key().attempt()},
                           [reply, response](absl::StatusOr<absl::Duration> left) {
                             reply->Reply(status::ToGrpc(left.status()), [&] {
                               if (left.ok()) {
                                 response->set_lease_ms(absl::ToInt64Milliseconds(*left));
                               }
                             });
                           });
    return reply.get();
  }

 private:
  absl::Status CheckEpoch(const std::string& epoch) const {
    if (epoch == runtime_->epoch.ToBytes()) return absl::OkStatus();
    return status::WithReason(absl::FailedPreconditionError("this prefill worker has restarted"),
                              status::kStaleEpoch);
  }

  absl::StatusOr<std::unique_ptr<PrefillRequest>> Parse(
      const ferry::v1::PrefillRequest& message) const {
    RETURN_IF_ERROR(CheckEpoch(message.worker_epoch()));
    const ferry::v1::RequestSpec& spec = message.spec();
    RETURN_IF_ERROR(worker::CheckRequestSpec(spec, limits_));
    auto request = std::make_unique<PrefillRequest>();
    ASSIGN_OR_RETURN(request->destination, ParseDestination(message.decode()));
    request->receiver = request->destination.epoch;
    request->id = {spec.key().request_id(), spec.key().attempt()};
    request->num_branches = static_cast<int32_t>(spec.sampling().n());
    request->arrived = steady_time::Now();
    if (spec.deadline_ms() > 0) {
      request->deadline = request->arrived + absl::Milliseconds(spec.deadline_ms());
    }
    engine::Sequence& seq = request->seq;
    seq.tokens.assign(spec.token_ids().begin(), spec.token_ids().end());
    seq.num_prompt_tokens = static_cast<int32_t>(spec.num_prompt_tokens());
    seq.sampling = worker::ToSamplingOptions(spec.sampling(), /*branch=*/0);
    seq.root = runtime_->hasher->Root(spec.cache_namespace());
    RETURN_IF_ERROR(CheckSamples(*request));
    return request;
  }

  // Whether the request's first tokens can ever be sampled.
  absl::Status CheckSamples(const PrefillRequest& request) const {
    const engine::Engine& engine = *runtime_->engine;
    const model::StepLimits& limits = engine.limits();
    const bool penalties = request.seq.sampling.HasPenalties();
    // Those of a model with state are sampled in one step (chunk_step.h).
    const int64_t at_once = runtime_->num_state_slots() > 0 ? request.num_branches : 1;
    const int32_t most =
        penalties ? std::min(limits.max_samples, engine.num_penalty_slots()) : limits.max_samples;
    if (at_once > most) {
      return absl::InvalidArgumentError(absl::StrCat("n is ", at_once,
                                                     penalties ? " with penalties" : "",
                                                     ", this worker samples ", most, " at a time"));
    }
    if (penalties && at_once * request.num_tokens() > limits.max_history_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("penalties over ", at_once * request.num_tokens(),
                       " tokens, this worker counts ", limits.max_history_tokens, " at most"));
    }
    return absl::OkStatus();
  }

  const worker::WorkerRuntime* const runtime_;
  PrefillScheduler* const scheduler_;
  worker::RequestLimits limits_;
  std::atomic<uint64_t> last_stream_id_{0};
};

class AbortService final : public ferry::v1::KvTransfer::CallbackService {
 public:
  explicit AbortService(PrefillScheduler* scheduler) : scheduler_(scheduler) {}

  grpc::ServerUnaryReactor* AbortTransfer(grpc::CallbackServerContext*,
                                          const ferry::v1::AbortTransferRequest* message,
                                          ferry::v1::AbortTransferResponse* response) override {
    auto reply = DeferredReply::Create(nullptr);
    scheduler_->AbortTransfer(
        {.id = {message->key().request_id(), message->key().attempt()},
         .transfer_id = message->transfer_id(),
         .caller_epoch = message->caller_epoch(),
         .cause = message->cause()},
        [reply, response](bool any_sent) {
          reply->Reply(grpc::Status::OK, [&] {
            response->set_writer_state(any_sent ? ferry::v1::WRITER_STATE_DRAINED
                                                : ferry::v1::WRITER_STATE_NEVER_STARTED);
          });
        });
    return reply.get();
  }

 private:
  PrefillScheduler* const scheduler_;
};

class Services final : public PrefillServices {
 public:
  Services(const worker::WorkerRuntime* runtime, PrefillScheduler* scheduler)
      : prefill_(runtime, scheduler), abort_(scheduler) {}
  std::vector<grpc::Service*> grpc_services() override { return {&prefill_, &abort_}; }

 private:
  PrefillService prefill_;
  AbortService abort_;
};

}  // namespace

std::unique_ptr<PrefillServices> CreatePrefillServices(const worker::WorkerRuntime* runtime,
                                                       PrefillScheduler* scheduler) {
  return std::make_unique<Services>(runtime, scheduler);
}

}  // namespace prefill_worker
