// The public gRPC service ferry.v1.Inference: RPC threads parse, FrontDoor takes over.  Generate
// and Tokenize take raw bytes, because gRPC would answer a string that is not UTF-8 with an empty
// UNIMPLEMENTED instead of a sentence.

#ifndef ROUTER_GENERATE_SERVICE_H_
#define ROUTER_GENERATE_SERVICE_H_

#include <memory>

#include "router/front_door.h"

namespace grpc {
class Service;
}

namespace router {

class GenerateService {
 public:
  // `door` must outlive the service, the service its server.
  static std::unique_ptr<GenerateService> Create(FrontDoor* door);
  virtual ~GenerateService() = default;
  virtual grpc::Service* grpc_service() = 0;
};

}  // namespace router

#endif  // ROUTER_GENERATE_SERVICE_H_
