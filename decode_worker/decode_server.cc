#include "decode_worker/decode_server.h"

#include <utility>

#include "decode_worker/decode_scheduler.h"
#include "decode_worker/decode_service.h"
#include "decode_worker/peer_links.h"
#include "decode_worker/transfer_service.h"
#include "kv_transfer/incoming_transfers.h"
#include "service/grpc_server.h"
#include "status/status_macros.h"
#include "worker/kv_event_log.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"
#include "worker/worker_service.h"

namespace decode_worker {
namespace {

// Streams that have been ended need so long to say so; then they are cut.
constexpr absl::Duration kShutdownGrace = absl::Seconds(2);

}  // namespace

// Destroyed in reverse order, after Stop.
struct DecodeServer::Parts {
  std::unique_ptr<worker::WorkerRuntime> runtime;
  std::unique_ptr<worker::WorkerMetrics> metrics;
  worker::KvEventLog events;
  std::unique_ptr<PeerLinks> links;
  std::unique_ptr<DecodeScheduler> scheduler;
  std::unique_ptr<kv_transfer::IncomingTransfers> incoming;
  std::unique_ptr<worker::WorkerService> worker_service;
  std::unique_ptr<DecodeService> decode_service;
  std::unique_ptr<TransferService> transfer_service;
  std::unique_ptr<service::GrpcServer> server;
  bool stopped = false;
};

DecodeServer::DecodeServer() : parts_(std::make_unique<Parts>()) {}

DecodeServer::~DecodeServer() { Stop(); }

absl::StatusOr<std::unique_ptr<DecodeServer>> DecodeServer::Start(
    const DecodeOptions& options, std::unique_ptr<worker::WorkerRuntime> runtime,
    std::shared_ptr<prometheus::Registry> registry) {
  std::unique_ptr<DecodeServer> server(new DecodeServer());
  Parts& parts = *server->parts_;
  parts.runtime = std::move(runtime);
  parts.metrics = std::make_unique<worker::WorkerMetrics>(std::move(registry), *parts.runtime);
  parts.incoming =
      kv_transfer::CreateIncomingTransfers(parts.runtime->epoch, parts.runtime->transport.get());
  parts.links = std::make_unique<PeerLinks>(parts.runtime->transport.get(), parts.runtime->epoch,
                                            options.worker.tls, options.worker.handshake_timeout);
  parts.scheduler = std::make_unique<DecodeScheduler>(
      options, parts.runtime.get(), parts.incoming.get(), &parts.events, parts.metrics.get(),
      [links = parts.links.get()](const AbortNotice& notice) { links->NotifyAborted(notice); });
  parts.worker_service = worker::CreateWorkerService(parts.scheduler.get(), &parts.events,
                                                     parts.runtime->epoch.ToBytes());
  parts.decode_service = CreateDecodeService(parts.scheduler.get(), LimitsOf(*parts.runtime));
  parts.transfer_service =
      CreateTransferService(parts.scheduler.get(), parts.links.get(), parts.runtime.get(),
                            [metrics = parts.metrics.get()](const absl::Status& status) {
                              metrics->CountHandshake(status);
                            });
  parts.scheduler->Start();
  ASSIGN_OR_RETURN(parts.server,
                   service::GrpcServer::Start(
                       options.worker.listen, options.worker.tls,
                       {parts.worker_service->grpc_service(), parts.decode_service->grpc_service(),
                        parts.transfer_service->grpc_service()}));
  parts.server->SetReady(true);
  return server;
}

int32_t DecodeServer::port() const { return parts_->server->port(); }
const worker::WorkerRuntime& DecodeServer::runtime() const { return *parts_->runtime; }
DecodeScheduler& DecodeServer::scheduler() { return *parts_->scheduler; }

void DecodeServer::StartDrain() {
  parts_->server->SetReady(false);
  parts_->scheduler->StartDrain();
  parts_->worker_service->NotifyLoadChanged();
}

bool DecodeServer::drained() const {
  const worker::WorkerControl::Remaining left = parts_->scheduler->remaining();
  return left.requests == 0 && left.held_blocks == 0;
}

void DecodeServer::Stop() {
  Parts& parts = *parts_;
  if (std::exchange(parts.stopped, true) || parts.scheduler == nullptr) return;
  if (parts.server != nullptr) StartDrain();
  // Every call still open is answered by one of these three, so the server has nothing to wait for.
  parts.scheduler->Stop();
  parts.worker_service->Stop();
  parts.links->Stop();
  if (parts.server != nullptr) parts.server->Shutdown(kShutdownGrace);
  // From here on nothing lands; the last ends of transfers find a closed inbox.
  parts.runtime->transport->Close();
  parts.incoming.reset();
}

}  // namespace decode_worker
