// WorkerClient: the RPCs of one worker, as calls whose results arrive on the loop's thread.  The
// only file of the router, beside the public service, that knows gRPC.
//
// Tokens travel on a connection of their own, so that a slow reader's flow control does not stop
// control calls.  Owned by the loop's thread; RPCs still running when the client is destroyed go
// on.

#ifndef ROUTER_WORKER_CLIENT_H_
#define ROUTER_WORKER_CLIENT_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/event_loop.h"
#include "service/grpc_server.h"

namespace ferry::v1 {
class DecodeEvent;
class DecodeRequest;
class KvEventFrame;
class LoadReport;
class PrefillEvent;
class PrefillRequest;
class PushHeldRequest;
class PushHeldResponse;
class RenewLeaseRequest;
class RenewLeaseResponse;
class RequestKey;
class WatchKvEventsRequest;
class WatchLoadRequest;
class WorkerInfo;
}  // namespace ferry::v1

namespace router {

// Counts RPCs in flight, so that the loop is stopped only after the last callback.  Thread-safe.
class OutstandingCalls final {
 public:
  void Add();
  void Done();
  // False if some are still running after `timeout`.
  bool WaitForNone(absl::Duration timeout);

 private:
  std::mutex mutex_;  // guards count_
  std::condition_variable none_;
  int64_t count_ = 0;
};

// A running RPC.  Destroying the handle cancels it and silences its callbacks.
class RpcCall {
 public:
  virtual ~RpcCall() = default;
};

// A server stream.  The first message is asked for at opening, every further one by ReadNext, after
// the one before has been delivered: whoever does not ask holds the sender back.
class RpcStream : public RpcCall {
 public:
  virtual void ReadNext() = 0;
  // Silences the callbacks, but gives the RPC a moment to end by itself: nothing more than its end
  // is expected.
  virtual void LetEnd() = 0;
};

template <typename Message>
struct StreamSink {
  // The message stays as it is until this returns, also behind a ReadNext.
  std::function<void(const Message&)> on_message;
  std::function<void(absl::Status)> on_end;  // once, after the last message; unless cancelled by us
};

class WorkerClient {
 public:
  // A Cancel that the worker has not confirmed for `cancel_ack` is given up.
  static std::shared_ptr<WorkerClient> Create(const std::string& address,
                                              const service::TlsOptions& tls,
                                              absl::Duration cancel_ack, EventLoop* loop,
                                              std::shared_ptr<OutstandingCalls> outstanding);
  virtual ~WorkerClient() = default;

  virtual std::unique_ptr<RpcCall> GetInfo(
      absl::Duration timeout,
      std::function<void(absl::StatusOr<ferry::v1::WorkerInfo>)> on_result) = 0;
  virtual std::unique_ptr<RpcStream> WatchLoad(const ferry::v1::WatchLoadRequest& request,
                                               StreamSink<ferry::v1::LoadReport> sink) = 0;
  virtual std::unique_ptr<RpcStream> WatchKvEvents(const ferry::v1::WatchKvEventsRequest& request,
                                                   StreamSink<ferry::v1::KvEventFrame> sink) = 0;
  // The calls of a request carry its `traceparent`.  Both streams carry their own deadline, a
  // little later than the request's (spec.deadline_ms).
  virtual std::unique_ptr<RpcStream> Decode(const ferry::v1::DecodeRequest& request,
                                            const std::string& traceparent,
                                            StreamSink<ferry::v1::DecodeEvent> sink) = 0;
  virtual std::unique_ptr<RpcStream> Prefill(const ferry::v1::PrefillRequest& request,
                                             const std::string& traceparent,
                                             StreamSink<ferry::v1::PrefillEvent> sink) = 0;
  virtual std::unique_ptr<RpcCall> PushHeld(
      const ferry::v1::PushHeldRequest& request, const std::string& traceparent,
      absl::Duration timeout,
      std::function<void(absl::StatusOr<ferry::v1::PushHeldResponse>)> on_result) = 0;
  virtual std::unique_ptr<RpcCall> RenewLease(
      const ferry::v1::RenewLeaseRequest& request, const std::string& traceparent,
      absl::Duration timeout,
      std::function<void(absl::StatusOr<ferry::v1::RenewLeaseResponse>)> on_result) = 0;
  // Tells the worker to end the request; nobody waits for the answer.
  virtual void Cancel(const ferry::v1::RequestKey& key, const std::string& traceparent,
                      const std::string& reason) = 0;
};

}  // namespace router

#endif  // ROUTER_WORKER_CLIENT_H_
