#include "service/trace_metadata.h"

#include "grpcpp/client_context.h"
#include "grpcpp/server_context.h"
#include "tracing/trace_context.h"

namespace service {

std::string ReceivedTraceparent(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(tracing::kTraceparent);
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}

void AddTraceparent(const std::string& traceparent, grpc::ClientContext* context) {
  if (!traceparent.empty()) context->AddMetadata(tracing::kTraceparent, traceparent);
}

}  // namespace service
