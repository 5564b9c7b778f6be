// The public gRPC service ferry.v1.Inference over a Router.
//
// RPC threads parse, check and tokenise (long texts on a small pool); the rest of a request happens
// on the router's loop.  Generate and Tokenize take raw bytes, because gRPC would answer a string
// that is not UTF-8 with an empty UNIMPLEMENTED instead of a sentence.

#ifndef ROUTER_GENERATE_SERVICE_H_
#define ROUTER_GENERATE_SERVICE_H_

#include <memory>

#include "router/router.h"

namespace grpc {
class Service;
}

namespace router {

class GenerateService {
 public:
  // `router` must outlive the service, the service its server.
  static std::unique_ptr<GenerateService> Create(Router* router);
  virtual ~GenerateService() = default;
  virtual grpc::Service* grpc_service() = 0;
};

}  // namespace router

#endif  // ROUTER_GENERATE_SERVICE_H_
