// The gRPC services of a prefill worker besides ferry.v1.Worker: PrefillWorker, which the router
// calls, and of KvTransfer the one method that decode workers call, AbortTransfer (the others are
// UNIMPLEMENTED).
//
// One reactor a call; handlers check what they can and hand the rest to the scheduler. Thread-safe.

#ifndef PREFILL_WORKER_PREFILL_SERVICE_H_
#define PREFILL_WORKER_PREFILL_SERVICE_H_

#include <memory>
#include <vector>

#include "prefill_worker/prefill_scheduler.h"
#include "worker/worker_runtime.h"

namespace grpc {
class Service;
}

namespace prefill_worker {

class PrefillServices {
 public:
  virtual ~PrefillServices() = default;
  virtual std::vector<grpc::Service*> grpc_services() = 0;
};

// Both must outlive the services; the services must outlive their server.
std::unique_ptr<PrefillServices> CreatePrefillServices(const worker::WorkerRuntime* runtime,
                                                       PrefillScheduler* scheduler);

}  // namespace prefill_worker

#endif  // PREFILL_WORKER_PREFILL_SERVICE_H_
