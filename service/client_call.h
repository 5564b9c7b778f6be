// StartUnaryCall: a unary RPC to a peer that blocks no thread: `done` gets the response or why
// there is none, on a gRPC thread.  Include this in .cc files only: it drags gRPC in.
//
//   StartUnaryCall(stub->async(), &KvTransfer::StubInterface::async_interface::Reserve, request,
//                  absl::Seconds(2), [](absl::StatusOr<ReserveResponse> response) { ... });

#ifndef SERVICE_CLIENT_CALL_H_
#define SERVICE_CLIENT_CALL_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/status.h"
#include "status/grpc_status.h"

namespace service {

// The stub behind `async` must live until `done` was called.  `timeout`: the call's deadline from
// now. The returned context can cancel the call (TryCancel) at any time.
template <typename Async, typename Request, typename Response>
std::shared_ptr<grpc::ClientContext> StartUnaryCall(
    Async* async,
    void (Async::*method)(grpc::ClientContext*, const Request*, Response*,
                          std::function<void(grpc::Status)>),
    Request request, absl::Duration timeout, std::function<void(absl::StatusOr<Response>)> done) {
  struct Call {  // lives in the completion
    std::shared_ptr<grpc::ClientContext> context = std::make_shared<grpc::ClientContext>();
    Request request;
    Response response;
  };
  auto call = std::make_shared<Call>();
  call->request = std::move(request);
  if (timeout != absl::InfiniteDuration()) {
    call->context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  }
  (async->*method)(call->context.get(), &call->request, &call->response,
                   [call, done = std::move(done)](grpc::Status status) {
                     if (status.ok()) {
                       done(std::move(call->response));
                     } else {
                       done(status::FromGrpc(status));
                     }
                   });
  return call->context;
}

}  // namespace service

#endif  // SERVICE_CLIENT_CALL_H_
