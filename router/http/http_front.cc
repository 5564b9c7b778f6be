#include "router/http/http_front.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "router/http/api_call.h"
#include "router/http/api_error.h"
#include "router/http/api_keys.h"
#include "router/http/json_body.h"
#include "service/process.h"
#include "status/status_macros.h"

namespace router::http {
namespace {

constexpr char kTenantHeader[] = "x-ferry-tenant";
constexpr char kModels[] = "/v1/models";
constexpr char kModelPrefix[] = "/v1/models/";

struct Route {
  const char* path;
  const char* method;
  bool needs_key;
};
constexpr std::array<Route, 8> kRoutes = {{{"/v1/completions", "POST", true},
                                           {"/v1/chat/completions", "POST", true},
                                           {kModels, "GET", true},
                                           {kModelPrefix, "GET", true},
                                           {"/health", "GET", false},
                                           {"/ready", "GET", false},
                                           {"/version", "GET", false},
                                           {"/metrics", "GET", true}}};

// nullptr: there is nothing at that path.
const Route* RouteOf(const std::string& path) {
  for (const Route& route : kRoutes) {
    const bool is_prefix = route.path == kModelPrefix;
    if (is_prefix ? path.starts_with(kModelPrefix) && path.size() > sizeof(kModelPrefix) - 1
                  : path == route.path) {
      return &route;
    }
  }
  return nullptr;
}

Response Error(int status, const std::string& message) {
  return {.status = status, .body = ErrorBody(status, message)};
}

// Of percent signs in a path.
std::string Unescaped(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto digit = [&](size_t at) {
      const char c = at < text.size() ? text[at] : ' ';
      return c >= '0' && c <= '9'                 ? c - '0'
             : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                  : -1;
    };
    if (text[i] == '%' && digit(i + 1) >= 0 && digit(i + 2) >= 0) {
      out.push_back(static_cast<char>(digit(i + 1) * 16 + digit(i + 2)));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

prometheus::Family<prometheus::Counter>& Counters(
    const std::shared_ptr<prometheus::Registry>& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(*registry);
}
prometheus::Family<prometheus::Gauge>& Gauges(const std::shared_ptr<prometheus::Registry>& registry,
                                              const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry);
}

class OpenAiFront final : public HttpFront {
 public:
  OpenAiFront(FrontDoor* door, std::shared_ptr<prometheus::Registry> metrics, ApiKeys keys,
              bool trust_tenant_header)
      : door_(door),
        registry_(std::move(metrics)),
        keys_(std::move(keys)),
        trust_tenant_header_(trust_tenant_header),
        responses_(Counters(registry_, "ferry_router_http_responses_total",
                            "HTTP responses by path and status")),
        connections_(
            Gauges(registry_, "ferry_router_http_connections", "Open HTTP connections").Add({})) {}
  ~OpenAiFront() override { Shutdown(absl::ZeroDuration()); }

  absl::Status Listen(ServerOptions options) {
    options.refuse = [this](const Request& header) { return Refusal(header); };
    options.error_body = [](int status, const std::string& message) {
      return ErrorBody(status, message);
    };
    options.returns_id = [](std::string_view id) { return CheckRequestId(std::string(id)).ok(); };
    options.on_response = [this](const std::string& path, int status) { Count(path, status); };
    options.on_connection = [this](int change) { connections_.Increment(change); };
    ASSIGN_OR_RETURN(server_, HttpServer::Start(options, [this](std::shared_ptr<Exchange> e) {
                       Handle(std::move(e));
                     }));
    return absl::OkStatus();
  }

  int32_t port() const override { return server_->port(); }
  void Retire() override { server_->Retire(); }
  void Shutdown(absl::Duration grace) override {
    if (server_ != nullptr) server_->Shutdown(grace);
  }

 private:
  void Count(const std::string& path, int status) {
    const Route* const route = RouteOf(path);
    responses_
        .Add({{"path", route == nullptr ? "other" : route->path},
              {"status", std::to_string(status)}})
        .Increment();
  }

  // What is wrong with a request, its body aside.
  std::optional<Response> Refusal(const Request& request) const {
    const Route* const route = RouteOf(request.path);
    if (route == nullptr) {
      return Error(404, absl::StrCat("there is nothing at ", request.path.substr(0, 100)));
    }
    if (route->needs_key) {
      const absl::StatusOr<std::string> tenant = TenantOf(request);
      if (!tenant.ok()) return ErrorResponse(tenant.status());
    }
    const bool allowed = request.method == route->method ||
                         (request.method == "HEAD" && std::string_view(route->method) == "GET");
    if (!allowed) {
      Response response = Error(405, absl::StrCat(request.path, " takes ", route->method, ", not ",
                                                  request.method.substr(0, 20)));
      response.headers.emplace_back("allow", route->method);
      return response;
    }
    return std::nullopt;
  }

  absl::StatusOr<std::string> TenantOf(const Request& request) const {
    ASSIGN_OR_RETURN(std::string of_key, keys_.TenantOf(request.Header("authorization")));
    std::string said(request.Header(kTenantHeader));
    if (!of_key.empty() || said.empty()) return of_key;
    RETURN_IF_ERROR(CheckName(kTenantHeader, said));
    if (trust_tenant_header_) return said;
    return absl::PermissionDeniedError(absl::StrCat(
        kTenantHeader, " is \"", said, "\": this router does not believe that header"));
  }

  void Handle(std::shared_ptr<Exchange> exchange) {
    const Request& request = exchange->request();
    if (const auto refusal = Refusal(request)) {
      exchange->Respond(*refusal);
    } else if (request.path == "/v1/completions") {
      StartApiCall(Api::kCompletions, door_, *TenantOf(request), std::move(exchange));
    } else if (request.path == "/v1/chat/completions") {
      StartApiCall(Api::kChat, door_, *TenantOf(request), std::move(exchange));
    } else if (request.path == kModels) {
      exchange->Respond(Models());
    } else if (request.path.starts_with(kModelPrefix)) {
      exchange->Respond(OneModel(Unescaped(request.path.substr(sizeof(kModelPrefix) - 1))));
    } else if (request.path == "/version") {
      exchange->Respond({.body = Json({{"version", service::kVersion}}).dump()});
    } else if (request.path == "/metrics") {
      exchange->Respond(Metrics());
    } else {
      AskLoop(std::move(exchange));
    }
  }

  Json Card(const ModelAssets& model) const {
    return {{"id", model.name},
            {"object", "model"},
            {"created", started_},
            {"owned_by", "ferry"},
            {"max_model_len", model.context_tokens()},
            {"vocab_size", model.vocab_size}};
  }

  Response Models() const {
    Json cards = Json::array();
    for (const auto& model : door_->router()->models().all()) cards.push_back(Card(*model));
    return {.body = Json({{"object", "list"}, {"data", std::move(cards)}}).dump()};
  }

  Response OneModel(const std::string& name) const {
    const auto model = door_->router()->models().Find(name);
    if (!model.ok()) return ErrorResponse(model.status());
    return {.body = Card(**model).dump()};
  }

  Response Metrics() const {
    return {.content_type = "text/plain; version=0.0.4; charset=utf-8",
            .body = prometheus::TextSerializer().Serialize(registry_->Collect())};
  }

  // The workers are named to those who may see them in /metrics.
  absl::Status MayKnow(const Request& request, const absl::Status& status) const {
    const bool may = keys_.TenantOf(request.Header("authorization")).ok();
    return may ? absl::Status(status.code(), status.message()) : status;
  }

  // /health and /ready: whoever answers them shows that the loop runs.
  void AskLoop(std::shared_ptr<Exchange> exchange) {
    door_->router()->loop()->Post([this, exchange = std::move(exchange)] {
      Response response = {.body = R"({"status":"ok"})"};
      if (exchange->request().path == "/ready") {
        const absl::Status ready = door_->router()->CheckReady();
        if (!ready.ok()) response = ErrorResponse(MayKnow(exchange->request(), ready));
      }
      exchange->Post([exchange, response = std::move(response)] { exchange->Respond(response); });
    });
  }

  FrontDoor* const door_;
  const std::shared_ptr<prometheus::Registry> registry_;
  const ApiKeys keys_;
  const bool trust_tenant_header_;
  prometheus::Family<prometheus::Counter>& responses_;
  prometheus::Gauge& connections_;
  const int64_t started_ = absl::ToUnixSeconds(absl::Now());
  std::unique_ptr<HttpServer> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpFront>> HttpFront::Start(
    const Options& options, FrontDoor* door, std::shared_ptr<prometheus::Registry> metrics) {
  ASSIGN_OR_RETURN(ApiKeys keys, ApiKeys::Load(options.api_keys_file));
  auto front = std::make_unique<OpenAiFront>(door, std::move(metrics), std::move(keys),
                                             options.trust_tenant_header);
  RETURN_IF_ERROR(front->Listen(options.server));
  return front;
}

}  // namespace router::http
