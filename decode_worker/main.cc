// ferry-decode: turns received cache, or a prompt, into a stream of tokens.
//
//   router ──Decode──►  RPC threads ──────────┐           (gRPC callback API: decode_service,
//   P ──Reserve, ...──►   never block         │            transfer_service, worker_service)
//                                             ▼ inbox
//                                     scheduler thread     owns engine, block pool, every request
//                                       ▲     │            (decode_scheduler, batch_runner,
//                                       kv_receiver)
//                    ends of transfers  │     └─► engine's executor thread: one step at a time
//                                       │
//   P ──bytes──►  transport's progress thread              (kv_transfer; with a timer thread for
//                                                           deadlines and fences)
//   connect threads: connecting back to prefill workers may take seconds (peer_links)
//
// They meet at two queues: the scheduler's inbox, and each stream's events on their way out.
//
// Stop order, on SIGTERM or SIGINT: not ready and draining (new requests are refused, the router is
// told); wait until running requests have ended and quarantined blocks are back, at most
// --drain_limit, or until a second signal; end what is left (UNAVAILABLE; what has no token yet,
// the router starts elsewhere); stop the scheduler, then the watch streams and the connect threads;
// shut the gRPC server down; close the transport, after which no byte lands; free the engine and
// the cache.

#include <memory>
#include <string>

#include "CLI/CLI.hpp"
#include "decode_worker/decode_scheduler.h"
#include "decode_worker/decode_server.h"
#include "decode_worker/options.h"
#include "prometheus/registry.h"
#include "service/command_line.h"
#include "service/heap.h"
#include "service/listen_address.h"
#include "service/lock_order.h"
#include "service/port_file.h"
#include "service/process.h"
#include "service/startup.h"
#include "spdlog/spdlog.h"
#include "status/status_macros.h"
#include "steady_time/steady_time.h"
#include "worker/worker_flags.h"
#include "worker/worker_runtime.h"

namespace {

constexpr char kProcess[] = "ferry-decode";

// How often the drain looks whether it is done, and a running worker at its engine.
constexpr absl::Duration kDrainPoll = absl::Milliseconds(50);
constexpr absl::Duration kHealthPoll = absl::Seconds(1);

void Drain(decode_worker::DecodeServer& server, absl::Duration limit) {
  server.StartDrain();
  const absl::Time until = steady_time::Now() + limit;
  while (!server.drained() && steady_time::Now() < until) {
    if (service::WaitForTermination(kDrainPoll) != 0) return;
  }
}

absl::Status Serve(const decode_worker::DecodeOptions& options) {
  RETURN_IF_ERROR(service::InitLogging(kProcess, options.worker.log));
  RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<worker::WorkerRuntime> runtime;
  {
    const service::EndOnSignal starting;
    ASSIGN_OR_RETURN(runtime, worker::StartRuntime(options.worker));
  }
  auto registry = std::make_shared<prometheus::Registry>();
  ASSIGN_OR_RETURN(const std::unique_ptr<service::MetricsServer> metrics,
                   service::MetricsServer::Start(options.worker.metrics_listen, registry));
  ASSIGN_OR_RETURN(
      const std::unique_ptr<decode_worker::DecodeServer> server,
      decode_worker::DecodeServer::Start(options, std::move(runtime), std::move(registry)));
  RETURN_IF_ERROR(
      service::WritePortFile(options.worker.port_file, server->port(), metrics->port()));
  ASSIGN_OR_RETURN(service::HostPort own, service::ParseListenAddress(options.worker.listen));
  own.port = server->port();
  spdlog::info(
      "serving role={} address={} metrics_port={} model={} epoch={} blocks={} "
      "cache_path={}",
      options.role_both ? "both" : "decode", own.ToString(), metrics->port(),
      service::LogValue(server->runtime().model_name), server->runtime().epoch.ToHex(),
      server->runtime().pool->num_blocks() - 1, server->runtime().cache_path);

  absl::Status health;
  int signal_number = 0;
  while (health.ok() && (signal_number = service::WaitForTermination(kHealthPoll)) == 0) {
    health = server->scheduler().health();
  }
  if (health.ok()) {
    spdlog::info("draining signal={} limit_s={}", signal_number,
                 absl::ToDoubleSeconds(options.worker.drain_limit));
    Drain(*server, options.worker.drain_limit);
  }
  server->Stop();
  spdlog::info("stopped");
  return health;
}

}  // namespace

int main(int argc, char** argv) {
  decode_worker::DecodeOptions options;
  std::string role = "decode";
  CLI::App app(
      "Decode worker of Ferry: receives a prompt's cache, or computes it, and streams tokens.",
      kProcess);
  worker::AddWorkerFlags(app, &options.worker);
  app.add_option("--role", role, "both: the router may send prompts of any length here")
      ->check(CLI::IsMember({"decode", "both"}))
      ->capture_default_str();
  app.add_option(
         "--chunk_tokens", options.chunk_tokens,
         "prompt tokens computed in a step beside running decodes; --max_batch_tokens bounds both")
      ->capture_default_str();
  app.add_option("--growth_tokens", options.growth_tokens,
                 "tokens of room kept for each running sequence when another one is admitted")
      ->capture_default_str();
  app.failure_message(service::UsageError);
  CLI11_PARSE(app, argc, argv);
  options.role_both = role == "both";

  service::LimitHeap(argv);
  service::ForgetLockOrder();
  service::BlockTerminationSignals();
  const absl::Status status = Serve(options);
  return status.ok() ? 0 : service::FatalExit(kProcess, status);
}
