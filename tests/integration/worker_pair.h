// WorkerPair: a prefill and a decode worker in this process, whole but for their main files, over a
// real UCX link and real gRPC, with the rolling network of tests/fakes; and a router's calls to
// them.
//
// Thread-safe calls; one pair a test.

#ifndef TESTS_INTEGRATION_WORKER_PAIR_H_
#define TESTS_INTEGRATION_WORKER_PAIR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "decode_worker/decode_server.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "prefill_worker/kv_sender.h"
#include "prefill_worker/prefill_scheduler.h"
#include "prefill_worker/prefill_service.h"
#include "prometheus/registry.h"
#include "service/grpc_server.h"
#include "tests/fakes/rolling_network.h"
#include "worker/worker_service.h"

namespace integration {

struct PairOptions {
  fakes::RollingOptions network;
  int32_t num_blocks = 48;  // of each worker
  int32_t num_state_slots = 8;
  int32_t snapshot_blocks = 2;
  int32_t chunk_tokens = 100;
  std::string links = "shm,tcp";
  bool device_memory = false;  // tests/fakes/device_engine.h
};

// A request as the router would send it.
struct PairRequest {
  std::string id;
  std::vector<int32_t> tokens;
  engine::SamplingOptions sampling;
  uint32_t num_branches = 1;
  bool local = false;  // prefilled at the decode worker
};

struct PairReply {
  absl::Status status;
  std::vector<std::vector<int32_t>> tokens;  // by branch
  ferry::v1::DecodeDone decoded;
  ferry::v1::PrefillDone prefilled;  // empty if local
};

class PrefillWorkerUnderTest final {
 public:
  explicit PrefillWorkerUnderTest(const PairOptions& options);
  ~PrefillWorkerUnderTest();

  const worker::WorkerRuntime& runtime() const { return *runtime_; }
  std::string address() const { return absl::StrCat("127.0.0.1:", server_->port()); }
  ferry::v1::LoadReport Load() const;
  prometheus::Registry& registry() { return *registry_; }

 private:
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  worker::KvEventLog events_;
  std::unique_ptr<worker::WorkerRuntime> runtime_;
  std::unique_ptr<worker::WorkerMetrics> metrics_;
  std::unique_ptr<prefill_worker::KvSender> sender_;
  std::unique_ptr<prefill_worker::PrefillScheduler> scheduler_;
  std::unique_ptr<worker::WorkerService> worker_service_;
  std::unique_ptr<prefill_worker::PrefillServices> services_;
  std::unique_ptr<service::GrpcServer> server_;
};

class WorkerPair final {
 public:
  explicit WorkerPair(const PairOptions& options);
  ~WorkerPair();

  // Runs a request whole.  May be called from several threads.
  PairReply Generate(const PairRequest& request);
  std::vector<int32_t> Reference(const PairRequest& request, int32_t branch) const;

  PrefillWorkerUnderTest& prefill() { return *prefill_; }
  decode_worker::DecodeServer& decode() { return *decode_; }
  // Waits until nothing is held in either worker: neither a block nor a state slot.
  bool WaitIdle();

 private:
  const PairOptions options_;
  std::unique_ptr<PrefillWorkerUnderTest> prefill_;
  std::unique_ptr<decode_worker::DecodeServer> decode_;
  std::unique_ptr<ferry::v1::PrefillWorker::Stub> prefill_stub_;
  std::unique_ptr<ferry::v1::DecodeWorker::Stub> decode_stub_;
};

}  // namespace integration

#endif  // TESTS_INTEGRATION_WORKER_PAIR_H_
