// HttpServer: an HTTP/1.1 server on a few threads of its own, plain or TLS; no thread belongs to a
// connection.  It knows bytes, limits and times; what is answered is the handler's matter.
//
// A client that is slow with its request gets 408, one that does not take its response is cut off.
// While a response is under way the connection is read on, so that a client that leaves is noticed
// (a client that closes its sending side counts as gone); requests sent ahead wait their turn.
//
// Thread-safe.

#ifndef ROUTER_HTTP_HTTP_SERVER_H_
#define ROUTER_HTTP_HTTP_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/http/exchange.h"
#include "router/http/request_reader.h"
#include "service/grpc_server.h"

namespace router::http {

struct ServerOptions {
  std::string listen;            // host:port; port 0: any
  service::TlsOptions tls = {};  // with a ca_file clients must have its certificates
  int32_t num_threads = 2;
  int32_t max_connections = 20000;  // more get 503 (over TLS: are closed) at once
  RequestReader::Limits limits = {};
  absl::Duration idle = absl::Seconds(75);         // between two requests of a connection
  absl::Duration header_time = absl::Seconds(10);  // first byte (TLS: connect) .. end of the header
  absl::Duration body_time = absl::Seconds(60);    // end of the header .. end of the body
  absl::Duration write_stall = absl::Seconds(60);  // without progress of a response
  // Refuses a request before its body is read.  The handler sees those whose body is short, too.
  std::function<std::optional<Response>(const Request& header)> refuse = {};
  // Makes the body of a response for requests that no handler sees: bad bytes, timeouts.
  std::function<std::string(int status, const std::string& message)> error_body = {};
  // Whether a request's x-request-id comes back with a response that has none of its own.
  std::function<bool(std::string_view id)> returns_id = {};
  // Told of every response, by path ("" if none was read) and status.  Any thread.
  std::function<void(const std::string& path, int status)> on_response = {};
  // Told of every connection: 1 when it opens, -1 when it is closed.  Any thread.
  std::function<void(int change)> on_connection = {};
};

class HttpServer final {
 public:
  // Errors: kUnavailable naming the address, kInvalidArgument naming a TLS file.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const ServerOptions& options,
                                                           Handler handler);
  ~HttpServer();  // Shutdown(0)

  int32_t port() const;
  // Open connections, those that are idle included.
  int64_t num_connections() const;
  // Accepts no more connections and closes those without a request; the others end with the
  // response that is under way.
  void Retire();
  // Retires, gives what is under way `grace` and then closes it.  Returns when no connection is
  // left.
  void Shutdown(absl::Duration grace);

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace router::http

#endif  // ROUTER_HTTP_HTTP_SERVER_H_
