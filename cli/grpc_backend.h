// GrpcBackend: asks a router over ferry.v1.Inference.

#ifndef CLI_GRPC_BACKEND_H_
#define CLI_GRPC_BACKEND_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/load_backend.h"
#include "client/ferry_client.h"

namespace cli {

struct GrpcBackendOptions {
  ferry::ClientOptions client = {};
  std::string model = {};  // empty: the one that the router serves
  double temperature = 0;
  bool ignore_eos = true;
  absl::Duration request_timeout = kRequestTimeout;
  absl::Duration ready_timeout = absl::Seconds(10);
};

class GrpcBackend : public LoadBackend {
 public:
  // Waits until the model can be served.
  // Errors: kDeadlineExceeded and those of ferry::Client; kInvalidArgument: several models, none
  // chosen.
  static absl::StatusOr<std::unique_ptr<GrpcBackend>> Connect(const GrpcBackendOptions& options);
  virtual const ferry::v1::ModelCard& model() const = 0;
};

}  // namespace cli

#endif  // CLI_GRPC_BACKEND_H_
