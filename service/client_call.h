// StartUnaryCall: a unary RPC to a peer that blocks no thread: `done` gets the response or why
// there is none, on a gRPC thread.  Include this in .cc files only: it drags gRPC in.
//
//   StartUnaryCall(stub->async(), &KvTransfer::StubInterface::async_interface::Reserve, request,
//                  absl::Seconds(2), [](absl::StatusOr<ReserveResponse> response) { ... });

#ifndef SERVICE_CLIENT_CALL_H_
#define SERVICE_CLIENT_CALL_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/status.h"
#include "service/trace_metadata.h"
#include "status/grpc_status.h"

namespace service {

// The stub behind `async` must live until `done` was called.  `timeout`: the call's deadline from
// now.  `traceparent`: of the request that the call serves (service/trace_metadata.h).  The
// returned context can cancel the call (TryCancel) at any time.
template <typename Async, typename Request, typename Response>
std::shared_ptr<grpc::ClientContext> StartUnaryCall(
    Async* async,
    void (Async::*method)(grpc::ClientContext*, const Request*, Response*,
                          std::function<void(grpc::Status)>),
    Request request, absl::Duration timeout, std::function<void(absl::StatusOr<Response>)> done,
    const std::string& traceparent = "") {
  struct Call {  // lives in the completion
    std::shared_ptr<grpc::ClientContext> context = std::make_shared<grpc::ClientContext>();
    Request request;
    Response response;
  };
  auto call = std::make_shared<Call>();
  call->request = std::move(request);
  AddTraceparent(traceparent, call->context.get());
  if (timeout != absl::InfiniteDuration()) {
    // By the clock that gRPC reads.  absl::Now() reads it every other second and reckons between:
    // behind a jump of an hour forward all its deadlines had passed, for that long.
    call->context->set_deadline(std::chrono::system_clock::now() +
                                absl::ToChronoMilliseconds(timeout));
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

// Calls whose completions use their owner: Close cancels those under way and returns when every
// completion has run.  Thread-safe.
class CallTracker final {
 public:
  CallTracker() = default;
  ~CallTracker() { Close(); }

  // As StartUnaryCall.  After Close: `done` gets kCancelled at once.
  template <typename Async, typename Request, typename Response>
  void Start(Async* async,
             void (Async::*method)(grpc::ClientContext*, const Request*, Response*,
                                   std::function<void(grpc::Status)>),
             Request request, absl::Duration timeout,
             std::function<void(absl::StatusOr<Response>)> done,
             const std::string& traceparent = "") {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!closed_) {
        const int64_t id = next_id_++;
        // The completion may run before the context is stored here: it waits for the lock.
        contexts_[id] = StartUnaryCall<Async, Request, Response>(
            async, method, std::move(request), timeout,
            [this, id, done = std::move(done)](absl::StatusOr<Response> response) {
              done(std::move(response));
              const std::lock_guard<std::mutex> lock(mutex_);
              contexts_.erase(id);
              changed_.notify_all();
            },
            traceparent);
        return;
      }
    }
    done(absl::CancelledError("process is shutting down"));
  }

  void Close() {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    for (const auto& [id, context] : contexts_) context->TryCancel();
    changed_.wait(lock, [this] { return contexts_.empty(); });
  }

 private:
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  bool closed_ = false;
  int64_t next_id_ = 0;
  std::map<int64_t, std::shared_ptr<grpc::ClientContext>> contexts_;
};

}  // namespace service

#endif  // SERVICE_CLIENT_CALL_H_
