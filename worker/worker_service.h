// WorkerService: the gRPC service ferry.v1.Worker, which both workers answer alike.  What differs
// is behind WorkerControl.

#ifndef WORKER_WORKER_SERVICE_H_
#define WORKER_WORKER_SERVICE_H_

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "worker/kv_event_log.h"

namespace grpc {
class Service;
}
namespace ferry::v1 {
class LoadReport;
class WorkerInfo;
}  // namespace ferry::v1

namespace worker {

// Identity of a request's try, as RequestKey.
struct RequestId {
  std::string request_id;
  uint32_t attempt = 0;
  friend bool operator==(const RequestId&, const RequestId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const RequestId& id) {
    return H::combine(std::move(h), id.request_id, id.attempt);
  }
};

// Implemented by each worker's scheduler.  Thread-safe; no call blocks, except Drain's result.
class WorkerControl {
 public:
  virtual ~WorkerControl() = default;
  virtual void FillInfo(ferry::v1::WorkerInfo* info) const = 0;
  virtual void FillLoad(ferry::v1::LoadReport* report) const = 0;
  // Ends the request; false if it is unknown.
  virtual bool Cancel(const RequestId& id, const std::string& reason) = 0;
  // Refuses new work from now on.
  virtual void StartDrain() = 0;
  // Running requests, and blocks still held for others; {0, 0} means drained.
  struct Remaining {
    int32_t requests = 0;
    int32_t held_blocks = 0;
  };
  virtual Remaining remaining() const = 0;
};

// `control` and `events` must outlive the service; the service must outlive its server.
class WorkerService {
 public:
  virtual ~WorkerService() = default;
  virtual grpc::Service* grpc_service() = 0;
  // Tells WatchLoad streams at once (state changed).  Call it without any lock that FillLoad or
  // remaining() take.
  virtual void NotifyLoadChanged() = 0;
  // Ends every open stream, so that the server can shut down.
  virtual void Stop() = 0;
};
std::unique_ptr<WorkerService> CreateWorkerService(WorkerControl* control, const KvEventLog* events,
                                                   const std::string& epoch);

}  // namespace worker

#endif  // WORKER_WORKER_SERVICE_H_
