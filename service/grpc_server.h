// GrpcServer: a listening gRPC server with health v1, reflection and optional TLS, and the channels
// that Ferry's processes open to each other with the same settings.
//
// Health names: "" and "liveness" serve from the start; "readiness" and every full service name
// follow SetReady.  Message limit 64 MiB: tensors never travel in a message. Thread-safe after
// Start.

#ifndef SERVICE_GRPC_SERVER_H_
#define SERVICE_GRPC_SERVER_H_

#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Channel;
class Server;
class Service;
}  // namespace grpc

namespace service {

inline constexpr int kMaxMessageBytes = 64 << 20;

// PEM files; all empty: plaintext.  With `ca_file` a server demands client certificates signed by
// it.
struct TlsOptions {
  std::string cert_file;
  std::string key_file;
  std::string ca_file;
  bool enabled() const { return !cert_file.empty() || !ca_file.empty(); }
};

// Whether a server can be started with these files: they can be read and used, and the key is
// that of the certificate.
// Errors: kInvalidArgument naming the file.
absl::Status CheckServerTls(const TlsOptions& tls);

class GrpcServer final {
 public:
  // Listens on `address` ("host:port"; port 0: any).  `services` must outlive the server.
  // Errors: kUnavailable naming the address if it cannot be bound; kInvalidArgument for bad TLS
  // files.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const std::string& address, const TlsOptions& tls,
      const std::vector<grpc::Service*>& services);
  ~GrpcServer();

  int32_t port() const { return port_; }
  void SetReady(bool ready);
  // Closes the port and tells connected clients to go elsewhere (GOAWAY): gRPC makes their next
  // calls over another connection.  Running calls go on until Shutdown.
  void Retire();
  // Retires, gives running calls `grace` and then cancels them.  Returns when all have ended.
  void Shutdown(absl::Duration grace);

 private:
  GrpcServer() = default;

  std::unique_ptr<grpc::Server> server_;
  std::future<void> calls_ended_;  // valid from Retire on
  std::vector<std::string> service_names_;
  int32_t port_ = 0;
};

// A channel with keep-alive, the message limit and its own connection.  Never fails; calls on it
// may.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const TlsOptions& tls);

// Calls the health service of a server and waits for its answer.  Errors: kUnavailable or
// kDeadlineExceeded with what gRPC says of the connection.
absl::Status CallHealth(const std::string& address, const TlsOptions& tls, absl::Duration timeout);

}  // namespace service

#endif  // SERVICE_GRPC_SERVER_H_
