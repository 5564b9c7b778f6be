// ferry-prefill: turns prompts into cache blocks and first tokens, and pushes them to decode
// workers.
//
//   gRPC threads ------ commands ------> scheduler thread ---- plans ----> engine's executor thread
//     (handlers never     (inbox)          owns engine, pool   <-results-    (and its CPU threads)
//      block)                              and requests
//        ^                                     | blocks ready, first tokens
//        | events of the streams               v
//        +------------------------------- KvSend, one a transfer (own lock)
//                                           ^          |
//          answers of decode workers (gRPC  |          | blocks
//          threads), drained sends ---------+          v
//          link threads: Connect, Fence           transport's progress thread
//
// Stop order: not ready -> refuse new work -> wait for running work and held leases (drain_limit,
// or a second signal) -> end what is left -> stop the streams and the server -> stop the scheduler
// -> close sender and transport -> destroy engine and memory.

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "prefill_worker/kv_sender.h"
#include "prefill_worker/options.h"
#include "prefill_worker/prefill_scheduler.h"
#include "prefill_worker/prefill_service.h"
#include "prometheus/registry.h"
#include "service/command_line.h"
#include "service/grpc_server.h"
#include "service/heap.h"
#include "service/listen_address.h"
#include "service/lock_order.h"
#include "service/port_file.h"
#include "service/process.h"
#include "service/startup.h"
#include "spdlog/spdlog.h"
#include "status/status_macros.h"
#include "steady_time/steady_time.h"
#include "worker/kv_event_log.h"
#include "worker/worker_flags.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"
#include "worker/worker_service.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace {

constexpr char kProcess[] = "ferry-prefill";
constexpr absl::Duration kDrainPoll = absl::Milliseconds(50);
constexpr absl::Duration kServerGrace = absl::Seconds(2);

absl::Status Serve(const prefill_worker::PrefillOptions& options) {
  RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<worker::WorkerRuntime> runtime;
  {
    const service::EndOnSignal starting;
    ASSIGN_OR_RETURN(runtime, worker::StartRuntime(options.worker));
  }
  auto registry = std::make_shared<prometheus::Registry>();
  worker::WorkerMetrics metrics(registry, *runtime);
  worker::KvEventLog events;
  const auto sender = prefill_worker::CreateKvSender(runtime.get(), &metrics);
  std::atomic<bool> engine_failed{false};
  prefill_worker::PrefillScheduler scheduler(options, runtime.get(), sender.get(), &events,
                                             &metrics, [&engine_failed] {
                                               engine_failed = true;
                                               kill(getpid(), SIGTERM);
                                             });
  const auto worker_service =
      worker::CreateWorkerService(&scheduler, &events, runtime->epoch.ToBytes());
  const auto prefill_services = prefill_worker::CreatePrefillServices(runtime.get(), &scheduler);
  std::vector<grpc::Service*> services = prefill_services->grpc_services();
  services.push_back(worker_service->grpc_service());

  ASSIGN_OR_RETURN(const auto metrics_server,
                   service::MetricsServer::Start(options.worker.metrics_listen, registry));
  ASSIGN_OR_RETURN(const auto server,
                   service::GrpcServer::Start(options.worker.listen, options.worker.tls, services));
  ASSIGN_OR_RETURN(service::HostPort own, service::ParseListenAddress(options.worker.listen));
  own.port = server->port();
  sender->SetOwnAddress(options.worker.advertise.empty() ? own.ToString()
                                                         : options.worker.advertise);
  scheduler.Start();
  server->SetReady(true);
  RETURN_IF_ERROR(
      service::WritePortFile(options.worker.port_file, server->port(), metrics_server->port()));
  spdlog::info(
      "serving role=prefill address={} metrics_port={} model={} epoch={} blocks={} "
      "cache_path={}",
      own.ToString(), metrics_server->port(), service::LogValue(runtime->model_name),
      runtime->epoch.ToHex(), runtime->pool->num_blocks() - 1, runtime->cache_path);

  const int signal_number = service::WaitForTermination();
  spdlog::info("draining signal={} limit_s={}", signal_number,
               absl::ToDoubleSeconds(options.worker.drain_limit));
  server->SetReady(false);
  scheduler.StartDrain();
  worker_service->NotifyLoadChanged();
  const absl::Time limit = steady_time::Now() + options.worker.drain_limit;
  for (auto left = scheduler.remaining(); left.requests > 0 || left.held_blocks > 0;
       left = scheduler.remaining()) {
    if (steady_time::Now() > limit || service::WaitForTermination(kDrainPoll) != 0) break;
  }
  scheduler.EndAll();
  worker_service->Stop();
  server->Shutdown(kServerGrace);
  scheduler.Stop();
  sender->Close();
  spdlog::info("stopped");
  return engine_failed ? absl::InternalError("the engine failed") : absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  prefill_worker::PrefillOptions options;
  CLI::App app("Ferry's prefill worker: computes prompts and pushes their cache to decode workers.",
               kProcess);
  worker::AddWorkerFlags(app, &options.worker);
  app.add_option("--chunk_tokens", options.chunk_tokens,
                 "prompt tokens a step, over all prompts; --max_batch_tokens bounds it")
      ->capture_default_str();
  app.failure_message(service::UsageError);
  CLI11_PARSE(app, argc, argv);
  service::LimitHeap(argv);
  service::ForgetLockOrder();
  service::BlockTerminationSignals();
  absl::Status status = service::InitLogging(kProcess, options.worker.log);
  if (status.ok()) status = Serve(options);
  return status.ok() ? 0 : service::FatalExit(kProcess, status);
}
