#include "router/generate_service.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_writer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "router/wire_parse.h"
#include "service/trace_metadata.h"
#include "status/grpc_status.h"
#include "status/status_macros.h"

namespace router {
namespace {

using ferry::v1::GenerateRequest;
using ferry::v1::GenerateResponse;
using ferry::v1::Inference;

// A client that does not take even the error is cut off after this.
constexpr absl::Duration kStuckClient = absl::Seconds(5);

absl::StatusOr<std::string> BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Valid() || !buffer.Dump(&slices).ok()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the message could not be received: the limit is ", service::kMaxMessageBytes, " bytes"));
  }
  std::string bytes;
  bytes.reserve(buffer.Length());
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message) {
  grpc::ByteBuffer buffer;
  bool own = false;
  // Fails only for messages beyond 2 GiB.
  (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, google::protobuf::Message>(message, &buffer,
                                                                                   &own);
  return buffer;
}

// One Generate call: gRPC's side of it and the ClientStream of its Generation.  It owns itself from
// Begin until gRPC is done with it.  Except for Begin, gone and the reactions all is on the loop's
// thread.
class GenerateCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                           public ClientStream,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  GenerateCall(FrontDoor* door, grpc::CallbackServerContext* context)
      : door_(door), router_(door->router()), context_(context), number_(router_->NextNumber()) {}

  void Begin(const grpc::ByteBuffer& buffer) {
    self_ = shared_from_this();
    router_->client_calls()->Add();
    FrontDoor::Arrival arrival = {.number = number_, .time = EventLoop::Now()};
    arrival.deadline = arrival.time + router_->default_deadline();
    if (context_->deadline() != std::chrono::system_clock::time_point::max()) {
      arrival.deadline =
          arrival.time + absl::FromChrono(context_->deadline() - std::chrono::system_clock::now());
    }
    trace_ = tracing::BeginSpan(service::ReceivedTraceparent(*context_), router_->trace_ratio());
    arrival.trace = trace_;
    auto request = std::make_shared<GenerateRequest>();
    const absl::Status status = Parse(buffer, request.get());
    if (status.ok()) {
      door_->Enter({{arrival, std::move(request), self_}});
    } else {
      door_->Refuse(arrival, request->request_id(), status, self_);
    }
  }

  // ClientStream
  void Write(const GenerateResponse& message) override {
    if (gone_) return;
    waiting_.push_back(Serialize(message));
    pending_bytes_ += waiting_.back().Length();
    WriteNext();
  }
  void Finish(const absl::Status& status) override {
    finishing_ = true;
    final_status_ = status;
    if (!status.ok() && writing_) {
      router_->loop()->After(kStuckClient, [self = shared_from_this()] {
        if (self->writing_) self->context_->TryCancel();
      });
    }
    WriteNext();
  }
  size_t pending_bytes() const override { return pending_bytes_; }
  bool gone() const override { return gone_; }

  // Reactions
  void OnWriteDone(bool ok) override {
    router_->loop()->Post([self = shared_from_this(), ok] { self->HandleWritten(ok); });
  }
  void OnCancel() override {
    gone_ = true;  // at once: its text may be waiting to be tokenised
    router_->loop()->Post(
        [self = shared_from_this()] { self->router_->OnClientGone(self->number_); });
  }
  void OnDone() override {
    // The loop may destroy this object before the last line here runs.
    const auto calls = router_->client_calls();
    router_->loop()->Post([self = std::move(self_)] {});
    calls->Done();
  }

 private:
  static absl::Status Parse(const grpc::ByteBuffer& buffer, GenerateRequest* request) {
    ASSIGN_OR_RETURN(const std::string bytes, BytesOf(buffer));
    return ParseRequest(bytes, request);
  }

  void WriteNext() {
    if (writing_ || finished_) return;
    if (!waiting_.empty() && !gone_) {
      writing_ = true;
      if (!answered_) {
        context_->AddInitialMetadata(tracing::kTraceparent, tracing::Traceparent(trace_));
      }
      answered_ = true;
      StartWrite(&waiting_.front());
      return;
    }
    if (finishing_) {
      finished_ = true;
      // Behind initial metadata a client's gRPC would not try again.
      if (!answered_) {
        context_->AddTrailingMetadata(tracing::kTraceparent, tracing::Traceparent(trace_));
      }
      if (const absl::Duration delay = status::RetryAfter(final_status_);
          delay > absl::ZeroDuration()) {
        context_->AddTrailingMetadata("retry-after-ms",
                                      absl::StrCat(absl::ToInt64Milliseconds(delay)));
      }
      grpc::ServerWriteReactor<grpc::ByteBuffer>::Finish(status::ToGrpc(final_status_));
    }
  }

  void HandleWritten(bool ok) {
    writing_ = false;
    pending_bytes_ -= waiting_.front().Length();
    waiting_.pop_front();
    if (!ok) gone_ = true;  // OnCancel follows
    WriteNext();
    router_->OnClientDrained(number_);
  }

  FrontDoor* const door_;
  Router* const router_;
  grpc::CallbackServerContext* const context_;
  const int64_t number_;
  tracing::TraceContext trace_;
  std::shared_ptr<GenerateCall> self_;
  std::atomic<bool> gone_{false};  // the client; written by the loop and by OnCancel
  // The loop's thread only.
  std::deque<grpc::ByteBuffer> waiting_;  // the first is being written while writing_
  size_t pending_bytes_ = 0;
  bool writing_ = false;
  bool finishing_ = false;
  bool answered_ = false;  // something has been sent
  bool finished_ = false;
  absl::Status final_status_;
};

using TypedMethods = Inference::WithCallbackMethod_Detokenize<
    Inference::WithCallbackMethod_ListModels<Inference::Service>>;
using Methods = Inference::WithRawCallbackMethod_Generate<
    Inference::WithRawCallbackMethod_Tokenize<TypedMethods>>;

class GrpcGenerateService final : public GenerateService, private Methods {
 public:
  explicit GrpcGenerateService(FrontDoor* door) : door_(door), router_(door->router()) {}

  grpc::Service* grpc_service() override { return this; }

 private:
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request) override {
    auto call = std::make_shared<GenerateCall>(door_, context);
    call->Begin(*request);
    return call.get();  // it owns itself
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    const absl::Status status = door_->Run(request->Length(), [this, reactor, request, response] {
      reactor->Finish(status::ToGrpc(DoTokenize(*request, response)));
    });
    if (!status.ok()) reactor->Finish(status::ToGrpc(status));
    return reactor;
  }

  absl::Status DoTokenize(const grpc::ByteBuffer& buffer, grpc::ByteBuffer* response) const {
    ASSIGN_OR_RETURN(const std::string bytes, BytesOf(buffer));
    ferry::v1::TokenizeRequest request;
    RETURN_IF_ERROR(ParseRequest(bytes, &request));
    ASSIGN_OR_RETURN(const tokenizer::Tokenizer* tokenizer, TokenizerOf(request.model()));
    ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                     tokenizer->Encode(request.text(), request.add_special_tokens()));
    ferry::v1::TokenizeResponse answer;
    for (const int32_t id : ids) answer.add_ids(id);
    *response = Serialize(answer);
    return absl::OkStatus();
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const ferry::v1::DetokenizeRequest* request,
                                       ferry::v1::DetokenizeResponse* response) override {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    reactor->Finish(status::ToGrpc(DoDetokenize(*request, response)));
    return reactor;
  }

  absl::Status DoDetokenize(const ferry::v1::DetokenizeRequest& request,
                            ferry::v1::DetokenizeResponse* response) const {
    ASSIGN_OR_RETURN(const tokenizer::Tokenizer* tokenizer, TokenizerOf(request.model()));
    for (int i = 0; i < request.ids_size(); ++i) {
      if (request.ids(i) >= static_cast<uint32_t>(tokenizer->vocab_size())) {
        return absl::InvalidArgumentError(absl::StrCat("ids[", i, "] is ", request.ids(i),
                                                       ": must be below the tokenizer's size, ",
                                                       tokenizer->vocab_size()));
      }
    }
    const std::vector<int32_t> ids(request.ids().begin(), request.ids().end());
    ASSIGN_OR_RETURN(*response->mutable_text(),
                     tokenizer->Decode(ids, /*skip_special_tokens=*/false));
    return absl::OkStatus();
  }

  absl::StatusOr<const tokenizer::Tokenizer*> TokenizerOf(const std::string& name) const {
    ASSIGN_OR_RETURN(const ModelAssets* model, router_->models().Find(name));
    if (model->tokenizer == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("model ", model->name, " has no tokenizer"));
    }
    return model->tokenizer.get();
  }

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const ferry::v1::ListModelsRequest*,
                                       ferry::v1::ListModelsResponse* response) override {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    router_->loop()->Post([this, reactor, response] {
      for (const auto& model : router_->models().all()) {
        const WorkerRegistry::Ready ready = router_->registry().ReadyWorkers(*model);
        ferry::v1::ModelCard* card = response->add_models();
        card->set_name(model->name);
        card->set_max_model_len(model->context_tokens());
        card->set_vocab_size(model->vocab_size);
        card->set_ready_prefill_workers(ready.prefill);
        card->set_ready_decode_workers(ready.decode);
        card->set_ready(model->is_served() && !router_->draining());
      }
      const WorkerRegistry& registry = router_->registry();
      for (const std::string& one : registry.UnusedWorkers()) response->add_misfits(one);
      for (const auto& model : router_->models().all()) {
        for (const std::string& one : registry.Misfits(*model)) response->add_misfits(one);
      }
      if (router_->draining()) response->add_unreachable("the router is draining");
      for (const std::string& one : registry.Away()) response->add_unreachable(one);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  FrontDoor* const door_;
  Router* const router_;
};

}  // namespace

std::unique_ptr<GenerateService> GenerateService::Create(FrontDoor* door) {
  return std::make_unique<GrpcGenerateService>(door);
}

}  // namespace router
