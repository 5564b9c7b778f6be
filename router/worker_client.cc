#include "router/worker_client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "service/trace_metadata.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router {
namespace {

using ferry::v1::DecodeWorker;
using ferry::v1::PrefillWorker;
using ferry::v1::Worker;

// How long a worker may take to end a stream on which it has said all.
constexpr absl::Duration kEndTimeout = absl::Seconds(1);
// The router ends a request at its deadline; the RPC's own is for the case that it cannot.
constexpr absl::Duration kStreamMargin = absl::Seconds(5);

const char kNoTrace[] = "";  // of calls that serve no request

absl::Duration StreamTimeout(const ferry::v1::RequestSpec& spec) {
  return absl::Milliseconds(static_cast<int64_t>(spec.deadline_ms())) + kStreamMargin;
}

absl::Status WithAddress(const absl::Status& status, const std::string& address) {
  if (status.ok()) return status;
  const std::string message(status.message());
  absl::Status result = status::WithPublicMessage(
      absl::Status(status.code(), absl::StrCat("worker ", address, ": ", message)), message);
  const std::string reason = status::Reason(status);
  return reason.empty() ? result : status::WithReason(std::move(result), reason);
}

// A server stream being read.  gRPC's callbacks only post to the loop; all else happens there.  It
// owns itself (self_) from Begin until gRPC is done with it, because the call may outlive its
// handle.
template <typename Request, typename Response>
class ReadCall final : public grpc::ClientReadReactor<Response>,
                       public std::enable_shared_from_this<ReadCall<Request, Response>> {
 public:
  ReadCall(std::string address, Request request, StreamSink<Response> sink, EventLoop* loop,
           std::shared_ptr<OutstandingCalls> outstanding)
      : address_(std::move(address)),
        request_(std::move(request)),
        sink_(std::move(sink)),
        loop_(loop),
        outstanding_(std::move(outstanding)) {}

  // `timeout` may be infinite.
  template <typename Async, typename Method>
  void Begin(Async* async, Method method, const std::string& traceparent, absl::Duration timeout) {
    service::AddTraceparent(traceparent, &context_);
    if (timeout != absl::InfiniteDuration()) {
      context_.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
    }
    self_ = this->shared_from_this();
    outstanding_->Add();
    (async->*method)(&context_, &request_, this);
    // Reads are asked for from the loop, not from a reaction: the hold keeps the call from ending
    // while no read is outstanding.
    this->AddHold();
    this->StartRead(&message_);
    this->StartCall();
  }

  void ReadNext() {
    if (reading_ || ended_) return;
    reading_ = true;
    this->StartRead(&message_);
  }

  void Detach() {
    if (detached_) return;
    detached_ = true;
    if (ended_) return;
    context_.TryCancel();
    if (!reading_) End();
  }

  void LetEnd() {
    if (detached_) return;
    detached_ = true;
    ReadNext();
    loop_->After(kEndTimeout, [weak = this->weak_from_this()] {
      if (const auto self = weak.lock()) self->context_.TryCancel();
    });
  }

  void OnReadDone(bool ok) override {
    loop_->Post([self = this->shared_from_this(), ok] { self->HandleRead(ok); });
  }

  void OnDone(const grpc::Status& status) override {
    // The loop may destroy this object before the last line here runs.
    const auto outstanding = outstanding_;
    EventLoop* const loop = loop_;
    loop->Post([self = std::move(self_), status] { self->HandleDone(status); });
    outstanding->Done();
  }

 private:
  void HandleRead(bool ok) {
    reading_ = false;
    if (!ok || detached_) {
      if (ok) context_.TryCancel();  // more than we want to hear
      End();
      return;
    }
    // Taken out: gRPC's threads write message_ from ReadNext on, which the sink may call at once.
    Response message;
    message.Swap(&message_);
    sink_.on_message(message);
  }
  void HandleDone(const grpc::Status& status) {
    if (!detached_) sink_.on_end(WithAddress(status::FromGrpc(status), address_));
    detached_ = true;
  }
  // No further read: the call may end.
  void End() {
    if (ended_) return;
    ended_ = true;
    this->RemoveHold();
  }

  const std::string address_;
  const Request request_;
  const StreamSink<Response> sink_;
  EventLoop* const loop_;
  const std::shared_ptr<OutstandingCalls> outstanding_;
  std::shared_ptr<ReadCall> self_;
  grpc::ClientContext context_;
  Response message_;
  // Loop thread only.
  bool reading_ = true;
  bool ended_ = false;
  bool detached_ = false;
};

template <typename Request, typename Response>
class StreamHandle final : public RpcStream {
 public:
  explicit StreamHandle(std::shared_ptr<ReadCall<Request, Response>> call)
      : call_(std::move(call)) {}
  ~StreamHandle() override { call_->Detach(); }
  void ReadNext() override { call_->ReadNext(); }
  void LetEnd() override { call_->LetEnd(); }

 private:
  // Shared with gRPC's callbacks, which may come after the handle is gone.
  const std::shared_ptr<ReadCall<Request, Response>> call_;
};

// A unary call; the same life as ReadCall.
template <typename Request, typename Response>
struct UnaryCall {
  Request request;
  Response response;
  grpc::ClientContext context;
  std::function<void(absl::StatusOr<Response>)> on_result;  // loop thread only
  bool detached = false;                                    // loop thread only
};

template <typename Request, typename Response>
class UnaryHandle final : public RpcCall {
 public:
  explicit UnaryHandle(std::shared_ptr<UnaryCall<Request, Response>> call)
      : call_(std::move(call)) {}
  ~UnaryHandle() override {
    if (call_->detached) return;
    call_->detached = true;
    call_->context.TryCancel();
  }

 private:
  // Shared with gRPC's callback, which may come after the handle is gone.
  const std::shared_ptr<UnaryCall<Request, Response>> call_;
};

class GrpcWorkerClient final : public WorkerClient {
 public:
  GrpcWorkerClient(const std::string& address, const service::TlsOptions& tls,
                   absl::Duration cancel_ack, EventLoop* loop,
                   std::shared_ptr<OutstandingCalls> outstanding)
      : address_(address),
        cancel_ack_(cancel_ack),
        loop_(loop),
        outstanding_(std::move(outstanding)),
        control_(service::MakeChannel(address, tls)),
        tokens_(service::MakeChannel(address, tls)),
        worker_(Worker::NewStub(control_)),
        prefill_(PrefillWorker::NewStub(control_)),
        decode_(DecodeWorker::NewStub(tokens_)) {}

  std::unique_ptr<RpcCall> GetInfo(
      absl::Duration timeout,
      std::function<void(absl::StatusOr<ferry::v1::WorkerInfo>)> on_result) override {
    return Unary(worker_->async(), ferry::v1::GetInfoRequest(), kNoTrace, timeout,
                 std::move(on_result), [](auto* async, auto* call, auto done) {
                   async->GetInfo(&call->context, &call->request, &call->response, std::move(done));
                 });
  }

  std::unique_ptr<RpcStream> WatchLoad(const ferry::v1::WatchLoadRequest& request,
                                       StreamSink<ferry::v1::LoadReport> sink) override {
    return Open(worker_->async(), &Worker::Stub::async::WatchLoad, request, kNoTrace,
                std::move(sink), absl::InfiniteDuration());
  }
  std::unique_ptr<RpcStream> WatchKvEvents(const ferry::v1::WatchKvEventsRequest& request,
                                           StreamSink<ferry::v1::KvEventFrame> sink) override {
    return Open(worker_->async(), &Worker::Stub::async::WatchKvEvents, request, kNoTrace,
                std::move(sink), absl::InfiniteDuration());
  }
  std::unique_ptr<RpcStream> Decode(const ferry::v1::DecodeRequest& request,
                                    const std::string& traceparent,
                                    StreamSink<ferry::v1::DecodeEvent> sink) override {
    return Open(decode_->async(), &DecodeWorker::Stub::async::Decode, request, traceparent,
                std::move(sink), StreamTimeout(request.spec()));
  }
  std::unique_ptr<RpcStream> Prefill(const ferry::v1::PrefillRequest& request,
                                     const std::string& traceparent,
                                     StreamSink<ferry::v1::PrefillEvent> sink) override {
    return Open(prefill_->async(), &PrefillWorker::Stub::async::Prefill, request, traceparent,
                std::move(sink), StreamTimeout(request.spec()));
  }

  std::unique_ptr<RpcCall> PushHeld(
      const ferry::v1::PushHeldRequest& request, const std::string& traceparent,
      absl::Duration timeout,
      std::function<void(absl::StatusOr<ferry::v1::PushHeldResponse>)> on_result) override {
    return Unary(prefill_->async(), request, traceparent, timeout, std::move(on_result),
                 [](auto* async, auto* call, auto done) {
                   async->PushHeld(&call->context, &call->request, &call->response,
                                   std::move(done));
                 });
  }
  std::unique_ptr<RpcCall> RenewLease(
      const ferry::v1::RenewLeaseRequest& request, const std::string& traceparent,
      absl::Duration timeout,
      std::function<void(absl::StatusOr<ferry::v1::RenewLeaseResponse>)> on_result) override {
    return Unary(prefill_->async(), request, traceparent, timeout, std::move(on_result),
                 [](auto* async, auto* call, auto done) {
                   async->RenewLease(&call->context, &call->request, &call->response,
                                     std::move(done));
                 });
  }
  void Cancel(const ferry::v1::RequestKey& key, const std::string& traceparent,
              const std::string& reason) override {
    ferry::v1::CancelRequest request;
    *request.mutable_key() = key;
    request.set_reason(reason);
    using Call = UnaryCall<ferry::v1::CancelRequest, ferry::v1::CancelResponse>;
    auto call = std::make_shared<Call>();
    call->request = std::move(request);
    service::AddTraceparent(traceparent, &call->context);
    call->context.set_deadline(std::chrono::system_clock::now() +
                               absl::ToChronoMilliseconds(cancel_ack_));
    outstanding_->Add();
    worker_->async()->Cancel(
        &call->context, &call->request, &call->response,
        [call, outstanding = outstanding_](const grpc::Status&) { outstanding->Done(); });
  }

 private:
  template <typename Async, typename Method, typename Request, typename Response>
  std::unique_ptr<RpcStream> Open(Async* async, Method method, const Request& request,
                                  const std::string& traceparent, StreamSink<Response> sink,
                                  absl::Duration timeout) {
    auto call = std::make_shared<ReadCall<Request, Response>>(address_, request, std::move(sink),
                                                              loop_, outstanding_);
    call->Begin(async, method, traceparent, timeout);
    return std::make_unique<StreamHandle<Request, Response>>(std::move(call));
  }

  template <typename Async, typename Request, typename Response, typename Start>
  std::unique_ptr<RpcCall> Unary(Async* async, const Request& request,
                                 const std::string& traceparent, absl::Duration timeout,
                                 std::function<void(absl::StatusOr<Response>)> on_result,
                                 const Start& start) {
    auto call = std::make_shared<UnaryCall<Request, Response>>();
    call->request = request;
    call->on_result = std::move(on_result);
    service::AddTraceparent(traceparent, &call->context);
    call->context.set_deadline(std::chrono::system_clock::now() +
                               absl::ToChronoMilliseconds(timeout));
    outstanding_->Add();
    start(async, call.get(),
          [call, loop = loop_, address = address_,
           outstanding = outstanding_](const grpc::Status& grpc_status) {
            loop->Post([call, address, grpc_status] {
              if (call->detached) return;
              call->detached = true;
              if (grpc_status.ok()) {
                call->on_result(std::move(call->response));
              } else {
                call->on_result(WithAddress(status::FromGrpc(grpc_status), address));
              }
            });
            outstanding->Done();
          });
    return std::make_unique<UnaryHandle<Request, Response>>(std::move(call));
  }

  const std::string address_;
  const absl::Duration cancel_ack_;
  EventLoop* const loop_;
  const std::shared_ptr<OutstandingCalls> outstanding_;
  const std::shared_ptr<grpc::Channel> control_;
  const std::shared_ptr<grpc::Channel> tokens_;
  const std::unique_ptr<Worker::Stub> worker_;
  const std::unique_ptr<PrefillWorker::Stub> prefill_;
  const std::unique_ptr<DecodeWorker::Stub> decode_;
};

}  // namespace

void OutstandingCalls::Add() {
  std::lock_guard lock(mutex_);
  ++count_;
}

void OutstandingCalls::Done() {
  std::lock_guard lock(mutex_);
  if (--count_ == 0) none_.notify_all();
}

bool OutstandingCalls::WaitForNone(absl::Duration timeout) {
  std::unique_lock lock(mutex_);
  return none_.wait_for(lock, absl::ToChronoMilliseconds(timeout), [this] { return count_ == 0; });
}

std::shared_ptr<WorkerClient> WorkerClient::Create(const std::string& address,
                                                   const service::TlsOptions& tls,
                                                   absl::Duration cancel_ack, EventLoop* loop,
                                                   std::shared_ptr<OutstandingCalls> outstanding) {
  return std::make_shared<GrpcWorkerClient>(address, tls, cancel_ack, loop, std::move(outstanding));
}

}  // namespace router
