// The W3C trace context of a request as gRPC metadata (tracing/trace_context.h).
//
// Thread-safe.

#ifndef SERVICE_TRACE_METADATA_H_
#define SERVICE_TRACE_METADATA_H_

#include <string>

namespace grpc {
class ClientContext;
class ServerContextBase;
}  // namespace grpc

namespace service {

// What the caller has sent; empty: nothing.
std::string ReceivedTraceparent(const grpc::ServerContextBase& context);

// Sends it with the call; an empty one is not sent.
void AddTraceparent(const std::string& traceparent, grpc::ClientContext* context);

}  // namespace service

#endif  // SERVICE_TRACE_METADATA_H_
