// HttpFront: OpenAI's API over HTTP, and what supervisors ask:
//
//   POST /v1/completions, /v1/chat/completions      GET /v1/models, /v1/models/NAME
//   GET /health (the router is alive), /ready (some model can be served), /version, /metrics
//
// With keys, /v1/ and /metrics want one as a bearer token.  A request's tenant is that of its key;
// without one, and where that header is trusted, it is what x-ferry-tenant says.
//
// Thread-safe.

#ifndef ROUTER_HTTP_HTTP_FRONT_H_
#define ROUTER_HTTP_HTTP_FRONT_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "router/front_door.h"
#include "router/http/http_server.h"

namespace prometheus {
class Registry;
}

namespace router::http {

class HttpFront {
 public:
  struct Options {
    ServerOptions server = {};       // its functions are set by the front
    std::string api_keys_file = {};  // empty: everybody may
    bool trust_tenant_header = false;
  };
  // Listens at once.  `door` must outlive the front; `metrics` is what /metrics shows.
  // Errors: as of HttpServer::Start and ApiKeys::Load.
  static absl::StatusOr<std::unique_ptr<HttpFront>> Start(
      const Options& options, FrontDoor* door, std::shared_ptr<prometheus::Registry> metrics);
  virtual ~HttpFront() = default;  // Shutdown(0)

  virtual int32_t port() const = 0;
  virtual void Retire() = 0;  // as HttpServer::Retire
  // As HttpServer::Shutdown.  The router's loop must still run.
  virtual void Shutdown(absl::Duration grace) = 0;
};

}  // namespace router::http

#endif  // ROUTER_HTTP_HTTP_FRONT_H_
