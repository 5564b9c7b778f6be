// TransferService: the gRPC service ferry.v1.KvTransfer as a decode worker answers it.

#ifndef DECODE_WORKER_TRANSFER_SERVICE_H_
#define DECODE_WORKER_TRANSFER_SERVICE_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"

namespace grpc {
class Service;
}
namespace worker {
struct WorkerRuntime;
}

namespace decode_worker {

class DecodeScheduler;
class PeerLinks;

class TransferService {
 public:
  virtual ~TransferService() = default;
  virtual grpc::Service* grpc_service() = 0;
};
// Everything must outlive the service; the server must be shut down before any of it goes.
// `on_handshake` sees how each handshake ended.
std::unique_ptr<TransferService> CreateTransferService(
    DecodeScheduler* scheduler, PeerLinks* links, const worker::WorkerRuntime* runtime,
    std::function<void(const absl::Status&)> on_handshake);

}  // namespace decode_worker

#endif  // DECODE_WORKER_TRANSFER_SERVICE_H_
