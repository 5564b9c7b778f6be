// ferry-router: the front door.
//
// Threads:
//
//   gRPC's own      parse, check and tokenise requests; deliver bytes both ways.  They only post.
//        │ Post
//        ▼
//   the loop        EventLoop: workers, prefix index, ledger, queue, every request.  It needs no
//        │          locks, for it is alone.  It starts RPCs and writes, which never block.
//        ▼
//   gRPC's own      ...
//   HTTP's own      read requests, write responses; tokenise as gRPC's do.
//   work pool       reads and tokenises texts of 64 KiB and more.
//   metrics         serves /metrics.
//   main            waits for SIGTERM or SIGINT.
//
// Stop order: readiness off, new requests refused and clients told to go elsewhere; running ones
// end by themselves, or with UNAVAILABLE at the drain limit or a second signal; then the servers
// (no call of ours is left), the streams to the workers, the loop.

#include <prometheus/registry.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "router/generate_service.h"
#include "router/http/http_front.h"
#include "router/model_assets.h"
#include "router/options.h"
#include "router/router.h"
#include "service/command_line.h"
#include "service/grpc_server.h"
#include "service/heap.h"
#include "service/listen_address.h"
#include "service/lock_order.h"
#include "service/port_file.h"
#include "service/process.h"
#include "service/startup.h"
#include "status/status_macros.h"
#include "steady_time/steady_time.h"

namespace {

constexpr char kProcessName[] = "ferry-router";
constexpr absl::Duration kShutdownGrace = absl::Seconds(1);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(50);  // for a second signal

void AddFlags(CLI::App& app, router::RouterOptions* options) {
  const auto add = [&app](const char* flag, auto& field, const char* help) {
    return app.add_option(flag, field, help)->capture_default_str();
  };
  add("--listen", options->listen, "host:port of the gRPC server; port 0: any");
  add("--metrics_listen", options->metrics_listen, "host:port of http://.../metrics; port 0: any");
  add("--http_listen", options->http_listen,
      "host:port of OpenAI's API over HTTP; port 0: any; without it there is none");
  add("--api_keys_file", options->api_keys_file,
      "file with the bearer tokens that HTTP clients must show one of, one a line, of 16 "
      "characters or more, with its tenant behind it if it has one");
  app.add_flag("--trust_tenant_header", options->trust_tenant_header,
               "believe the x-ferry-tenant of HTTP requests whose key has no tenant: only behind a "
               "front door that sets it");
  add("--chat_format", options->chat_formats,
      "[NAME=]v2, v3, r1, v3-0324, r1-0528, v3.1, v3.2 or v4, in place of the checkpoint's own; "
      "repeatable")
      ->delimiter(',');
  add("--port_file", options->port_file,
      "file that receives grpc_port=N, metrics_port=N and http_port=N");
  add("--model_assets", options->model_assets,
      "[NAME=]DIR with config.json, tokenizer.json, generation_config.json; repeatable; required")
      ->delimiter(',');
  add("--workers", options->workers,
      "prefill and decode workers, comma-separated, each host:port; dns:///name:port: a worker at "
      "every address of the name; dns:///_service._proto.name: one at every SRV record; required")
      ->delimiter(',');
  add("--policy", options->policy, "cost, least_load or round_robin");
  add("--hash_seed", options->hash_seed, "seed of block hashes; the same in the whole system")
      ->check(service::Unsigned64());
  add("--max_queue", options->max_queue, "requests that may wait for a worker");
  add("--max_queue_bytes", options->max_queue_bytes, "memory of the requests that wait");
  add("--tenant_max_running", options->tenant_max_running,
      "requests of one tenant at workers at a time; the others wait; 0: any number");
  add("--tenant_max_queued", options->tenant_max_queued,
      "requests of one tenant that may wait for a worker; 0: any number");
  add("--tenant_max_rate", options->tenant_max_rate,
      "requests a second of one tenant; more are refused, with a time to come back; 0: any number");
  add("--tenant_limit", options->tenant_limits,
      "NAME=RUNNING:QUEUED[:RATE], these limits of one tenant; repeatable")
      ->delimiter(',');
  add("--kv_watermark", options->kv_watermark,
      "share of a decode worker's cache, foreseen output counted, beyond which it takes no more");
  add("--breaker_failures", options->breaker_failures,
      "failures of a worker in a row that keep requests from it for a while; 0: any number");
  add("--max_attempts", options->max_attempts,
      "tries of a request that may end with their worker or in an error, the first included; a "
      "worker that is full, drains or cannot be reached costs none");
  add("--max_migrations", options->max_migrations,
      "how often an output that has begun goes on at another decode worker when its own fails; 0: "
      "the request ends with an error");
  add("--local_prefill_tokens", options->local_prefill_tokens,
      "uncached prompt tokens that a decode worker may compute itself");
  add("--otlp_endpoint", options->otlp_endpoint,
      "http://host:4318 of an OpenTelemetry collector that gets the spans of requests; empty: "
      "none");
  add("--trace_ratio", options->trace_ratio,
      "part of the requests that come without a traceparent whose spans are recorded, 0 to 1");
  add("--tls_cert", options->tls.cert_file, "PEM certificate");
  add("--tls_key", options->tls.key_file, "PEM key");
  add("--tls_ca", options->tls.ca_file,
      "PEM authority; clients must then have its certificates (not HTTP's with --api_keys_file)");
  add("--log_level", options->log.level, "trace, debug, info, warn or error");
  app.add_flag("--log_json", options->log.json, "one JSON object a log line");
  service::AddSecondsFlag(app, "--default_deadline_s", &options->default_deadline,
                          "deadline of a request that states none");
  service::AddSecondsFlag(app, "--stream_idle_s", &options->stream_idle,
                          "a decode worker that sends no token for so long is given up");
  service::AddSecondsFlag(app, "--heartbeat_s", &options->heartbeat,
                          "period of worker reports; 3 missed: suspect, 5 missed: dead");
  service::AddSecondsFlag(app, "--accept_limit_s", &options->accept_limit,
                          "a worker that has not accepted a request for so long is given up");
  service::AddSecondsFlag(app, "--cancel_ack_s", &options->cancel_ack,
                          "how long a worker may take to confirm that it has cancelled a request");
  service::AddSecondsFlag(app, "--worker_wait_s", &options->worker_wait,
                          "how long a request that no other worker can serve waits for one that is "
                          "away");
  service::AddSecondsFlag(app, "--dns_refresh_s", &options->dns_refresh,
                          "period of look-ups of the names in --workers");
  service::AddSecondsFlag(app, "--breaker_open_s", &options->breaker_open,
                          "for how long; then one request tries the worker");
  service::AddSecondsFlag(app, "--priority_ageing_s", &options->priority_ageing,
                          "waiting for so long is worth one level of priority");
  service::AddSecondsFlag(app, "--max_ttft_s", &options->max_ttft,
                          "a request is refused, with a time to come back, when its first token is "
                          "foreseen later than this, unless it states its own max_ttft_ms; 0: any");
  service::AddSecondsFlag(app, "--drain_limit_s", &options->drain_limit,
                          "how long running requests may go on after SIGTERM");
}

// [NAME=]FORMAT of --chat_format: for the model of that name, or for all.
absl::Status UseChatFormat(const std::string& flag,
                           const std::vector<std::unique_ptr<router::ModelAssets>>& models) {
  const size_t equals = flag.find('=');
  const std::string name = equals == std::string::npos ? "" : flag.substr(0, equals);
  const std::string format = equals == std::string::npos ? flag : flag.substr(equals + 1);
  bool found = false;
  for (const auto& model : models) {
    if (!name.empty() && name != model->name) continue;
    found = true;
    const absl::Status used = model->UseChatFormat(format);
    if (!used.ok()) {
      return absl::Status(used.code(),
                          absl::StrCat("--chat_format ", flag, ": ", std::string(used.message())));
    }
  }
  if (found) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--chat_format ", flag, ": no model of that name is served"));
}

absl::StatusOr<std::vector<std::unique_ptr<router::ModelAssets>>> LoadModels(
    const router::RouterOptions& options) {
  std::vector<std::unique_ptr<router::ModelAssets>> models;
  for (const std::string& spec : options.model_assets) {
    ASSIGN_OR_RETURN(std::unique_ptr<router::ModelAssets> model, router::ModelAssets::Load(spec));
    for (const auto& other : models) {
      if (other->name == model->name) {
        return absl::InvalidArgumentError(
            absl::StrCat("--model_assets: two models are named ", model->name));
      }
    }
    models.push_back(std::move(model));
  }
  for (const std::string& flag : options.chat_formats) {
    RETURN_IF_ERROR(UseChatFormat(flag, models));
  }
  for (const auto& model : models) {
    spdlog::info("model loaded model={} vocab_size={} context_tokens={} tokenizer_hash={} chat={}",
                 service::LogValue(model->name), model->vocab_size, model->max_position_embeddings,
                 model->tokenizer_hash,
                 service::LogValue(model->chat_format.ok()
                                       ? std::string(chat::FormatName(*model->chat_format))
                                       : std::string(model->chat_format.status().message())));
  }
  return models;
}

// nullptr without --http_listen.
absl::StatusOr<std::unique_ptr<router::http::HttpFront>> StartHttp(
    const router::RouterOptions& options, router::FrontDoor* door,
    std::shared_ptr<prometheus::Registry> metrics) {
  if (options.http_listen.empty()) return nullptr;
  router::http::HttpFront::Options http = {
      .server = {.listen = options.http_listen, .tls = options.tls},
      .api_keys_file = options.api_keys_file,
      .trust_tenant_header = options.trust_tenant_header};
  // Keys say who a client is; certificates of the authority are what the system's processes have.
  if (!options.api_keys_file.empty()) http.server.tls.ca_file.clear();
  return router::http::HttpFront::Start(http, door, std::move(metrics));
}

// False: requests still run, at the limit or at a second signal.
bool Drain(router::Router& router, absl::Duration limit) {
  const absl::Time until = steady_time::Now() + limit;
  while (!router.WaitUntilIdle(kDrainPoll)) {
    if (steady_time::Now() >= until || service::WaitForTermination(absl::ZeroDuration()) != 0) {
      return false;
    }
  }
  return true;
}

absl::Status Serve(const router::RouterOptions& options) {
  RETURN_IF_ERROR(options.Validate());
  auto starting = std::make_unique<service::EndOnSignal>();
  RETURN_IF_ERROR(service::CheckStart({.listen = options.listen,
                                       .metrics_listen = options.metrics_listen,
                                       .port_file = options.port_file,
                                       .tls = options.tls}));
  if (!options.http_listen.empty()) {
    RETURN_IF_ERROR(service::CheckCanListen(options.http_listen));
  }
  ASSIGN_OR_RETURN(auto models, LoadModels(options));
  starting.reset();
  const auto registry = std::make_shared<prometheus::Registry>();
  ASSIGN_OR_RETURN(const auto metrics_server,
                   service::MetricsServer::Start(options.metrics_listen, registry));
  router::Router router(options, std::move(models), registry.get());
  router::FrontDoor door(&router);
  const auto generate_service = router::GenerateService::Create(&door);
  ASSIGN_OR_RETURN(
      const auto server,
      service::GrpcServer::Start(options.listen, options.tls, {generate_service->grpc_service()}));
  ASSIGN_OR_RETURN(const auto http, StartHttp(options, &door, registry));
  const absl::Cleanup stop = [&router] {
    router.Stop();
  };  // before the server goes, on every way out
  router.Start([&router, &server](bool ready) { server->SetReady(ready); });
  std::vector<std::pair<std::string, int32_t>> ports = {{"grpc_port", server->port()},
                                                        {"metrics_port", metrics_server->port()}};
  if (http != nullptr) ports.emplace_back("http_port", http->port());
  RETURN_IF_ERROR(service::WritePorts(options.port_file, ports));
  ASSIGN_OR_RETURN(service::HostPort own, service::ParseListenAddress(options.listen));
  own.port = server->port();
  spdlog::info(
      "serving role=router address={} metrics_port={}{} models={} workers={}", own.ToString(),
      metrics_server->port(), http == nullptr ? "" : absl::StrCat(" http_port=", http->port()),
      service::LogValue(absl::StrJoin(router.models().names(), ",")), options.workers.size());

  const int signal_number = service::WaitForTermination();
  router.StartDrain();  // before the line below: whoever reads it may count on it
  spdlog::info("draining signal={} limit_s={}", signal_number,
               absl::ToDoubleSeconds(options.drain_limit));
  server->SetReady(false);
  server->Retire();
  if (http != nullptr) http->Retire();
  if (!Drain(router, options.drain_limit)) {
    router.AbortAll(absl::UnavailableError("the router is shutting down"));
  }
  if (http != nullptr) http->Shutdown(kShutdownGrace);
  server->Shutdown(kShutdownGrace);
  router.Stop();
  spdlog::info("stopped");
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  router::RouterOptions options;
  CLI::App app("Front door of a Ferry system: routes requests to prefill and decode workers.",
               kProcessName);
  app.set_version_flag("--version", std::string(service::kVersion));
  AddFlags(app, &options);
  app.failure_message(service::UsageError);
  CLI11_PARSE(app, argc, argv);
  service::LimitHeap(argv);
  service::ForgetLockOrder();
  service::BlockTerminationSignals();
  absl::Status status = service::InitLogging(kProcessName, options.log);
  if (status.ok()) status = Serve(options);
  return status.ok() ? 0 : service::FatalExit(kProcessName, status);
}
