// DecodeService: the gRPC service ferry.v1.DecodeWorker.  One stream a request: Accepted, Tokens,
// Done.

#ifndef DECODE_WORKER_DECODE_SERVICE_H_
#define DECODE_WORKER_DECODE_SERVICE_H_

#include <memory>

#include "decode_worker/request_check.h"

namespace grpc {
class Service;
}

namespace decode_worker {

class DecodeScheduler;

class DecodeService {
 public:
  virtual ~DecodeService() = default;
  virtual grpc::Service* grpc_service() = 0;
};
// `scheduler` must outlive the service; the server must be shut down before either goes.
std::unique_ptr<DecodeService> CreateDecodeService(DecodeScheduler* scheduler,
                                                   const DecodeLimits& limits);

}  // namespace decode_worker

#endif  // DECODE_WORKER_DECODE_SERVICE_H_
