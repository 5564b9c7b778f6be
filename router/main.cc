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
//   work pool       tokenises texts of 64 KiB and more.
//   metrics         serves /metrics.
//   main            waits for SIGTERM or SIGINT.
//
// Stop order: readiness off and new requests refused; running ones end by themselves, or with
// UNAVAILABLE at the drain limit or a second signal; then the server (no call of ours is left), the
// streams to the workers, the loop.

#include <prometheus/registry.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "router/generate_service.h"
#include "router/model_assets.h"
#include "router/options.h"
#include "router/router.h"
#include "service/command_line.h"
#include "service/grpc_server.h"
#include "service/listen_address.h"
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
  add("--port_file", options->port_file, "file that receives grpc_port=N and metrics_port=N");
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
  add("--tls_ca", options->tls.ca_file, "PEM authority; clients must then have its certificates");
  add("--log_level", options->log.level, "trace, debug, info, warn or error");
  app.add_flag("--log_json", options->log.json, "one JSON object a log line");
  service::AddSecondsFlag(app, "--default_deadline_s", &options->default_deadline,
                          "deadline of a request that states none");
  service::AddSecondsFlag(app, "--stream_idle_s", &options->stream_idle,
                          "a decode worker that sends no token for so long is given up");
  service::AddSecondsFlag(app, "--heartbeat_s", &options->heartbeat,
                          "period of worker reports; 3 missed: suspect, 5 missed: dead");
  service::AddSecondsFlag(app, "--worker_wait_s", &options->worker_wait,
                          "how long a request that no other worker can serve waits for one that is "
                          "away");
  service::AddSecondsFlag(app, "--dns_refresh_s", &options->dns_refresh,
                          "period of look-ups of the names in --workers");
  service::AddSecondsFlag(app, "--drain_limit_s", &options->drain_limit,
                          "how long running requests may go on after SIGTERM");
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
  std::vector<std::unique_ptr<router::ModelAssets>> models;
  for (const std::string& spec : options.model_assets) {
    ASSIGN_OR_RETURN(std::unique_ptr<router::ModelAssets> model, router::ModelAssets::Load(spec));
    for (const auto& other : models) {
      if (other->name == model->name) {
        return absl::InvalidArgumentError(
            absl::StrCat("--model_assets: two models are named ", model->name));
      }
    }
    spdlog::info("model loaded model={} vocab_size={} context_tokens={} tokenizer_hash={}",
                 service::LogValue(model->name), model->vocab_size, model->max_position_embeddings,
                 model->tokenizer_hash);
    models.push_back(std::move(model));
  }
  starting.reset();
  const auto registry = std::make_shared<prometheus::Registry>();
  ASSIGN_OR_RETURN(const auto metrics_server,
                   service::MetricsServer::Start(options.metrics_listen, registry));
  router::Router router(options, std::move(models), registry.get());
  const auto generate_service = router::GenerateService::Create(&router);
  ASSIGN_OR_RETURN(
      const auto server,
      service::GrpcServer::Start(options.listen, options.tls, {generate_service->grpc_service()}));
  const absl::Cleanup stop = [&router] {
    router.Stop();
  };  // before the server goes, on every way out
  router.Start([&router, &server](bool ready) { server->SetReady(ready && !router.draining()); });
  RETURN_IF_ERROR(
      service::WritePortFile(options.port_file, server->port(), metrics_server->port()));
  ASSIGN_OR_RETURN(service::HostPort own, service::ParseListenAddress(options.listen));
  own.port = server->port();
  spdlog::info("serving role=router address={} metrics_port={} models={} workers={}",
               own.ToString(), metrics_server->port(),
               service::LogValue(absl::StrJoin(router.models().names(), ",")),
               options.workers.size());

  const int signal_number = service::WaitForTermination();
  router.StartDrain();  // before the line below: whoever reads it may count on it
  spdlog::info("draining signal={} limit_s={}", signal_number,
               absl::ToDoubleSeconds(options.drain_limit));
  server->SetReady(false);
  if (!Drain(router, options.drain_limit)) {
    router.AbortAll(absl::UnavailableError("the router is shutting down"));
  }
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
  service::BlockTerminationSignals();
  absl::Status status = service::InitLogging(kProcessName, options.log);
  if (status.ok()) status = Serve(options);
  return status.ok() ? 0 : service::FatalExit(kProcessName, status);
}
