// A prefill worker on a tiny checkpoint, whole but for its transport, which is a loopback.

#ifndef TESTS_PREFILL_WORKER_PREFILL_FIXTURE_H_
#define TESTS_PREFILL_WORKER_PREFILL_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fake_decode_worker.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "local_engine.h"
#include "prefill_call.h"
#include "prefill_worker/kv_sender.h"
#include "prefill_worker/prefill_scheduler.h"
#include "prefill_worker/prefill_service.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "worker/worker_service.h"

namespace prefill_worker {

inline constexpr int32_t kVocab = 320;

inline PrefillOptions TestOptions() {
  PrefillOptions options;
  options.chunk_tokens = 96;
  options.worker.engine.model_dir = std::string(std::getenv("FERRY_GOLDEN_DIR")) + "/models/v3_odd";
  options.worker.engine.num_threads = 1;
  options.worker.engine.limits.max_tokens = 256;
  options.worker.engine.limits.max_seqs = 8;
  options.worker.num_blocks = 40;
  return options;
}

// `length` tokens; equal salts share a prefix.
inline std::vector<uint32_t> Tokens(int32_t length, uint32_t salt) {
  std::vector<uint32_t> tokens;
  for (int32_t i = 0; i < length; ++i) tokens.push_back((i * 37 + salt * 101 + 3) % kVocab);
  return tokens;
}

class PrefillFixture : public testing::Test {
 protected:
  void StartWorker(const PrefillOptions& options) {
    options_ = options;
    runtime_ = std::make_unique<worker::WorkerRuntime>();
    runtime_->options = options.worker;
    runtime_->model_name = "m";
    runtime_->speed = speed_;
    runtime_->epoch = kv_transfer::Epoch::Random();
    runtime_->engine = NewEngine(options.worker.engine);
    const auto size = worker::CacheSize::For(options.worker, runtime_->block_bytes(),
                                             runtime_->state_slot_bytes());
    ASSERT_TRUE(size.ok()) << size.status();
    ASSERT_TRUE(worker::MapCache(*size, *runtime_).ok());
    runtime_->hasher = std::make_unique<block_hash::BlockHasher>(0);
    runtime_->transport = NewTransport();
    ASSERT_TRUE(worker::RegisterCache(*runtime_).ok());
    metrics_ = std::make_unique<worker::WorkerMetrics>(registry_, *runtime_);
    sender_ = CreateKvSender(runtime_.get(), metrics_.get());
    scheduler_ = std::make_unique<PrefillScheduler>(options, runtime_.get(), sender_.get(),
                                                    &events_, metrics_.get(), nullptr);
    worker_service_ =
        worker::CreateWorkerService(scheduler_.get(), &events_, runtime_->epoch.ToBytes());
    services_ = CreatePrefillServices(runtime_.get(), scheduler_.get());
    auto services = services_->grpc_services();
    services.push_back(worker_service_->grpc_service());
    server_ = *service::GrpcServer::Start("127.0.0.1:0", {}, services);
    const std::string address = absl::StrCat("127.0.0.1:", server_->port());
    sender_->SetOwnAddress(address);
    scheduler_->Start();
    channel_ = service::MakeChannel(address, {});
    stub_ = ferry::v1::PrefillWorker::NewStub(channel_);
    worker_stub_ = ferry::v1::Worker::NewStub(channel_);
    transfer_stub_ = ferry::v1::KvTransfer::NewStub(channel_);
  }

  // The worker's own.
  virtual std::unique_ptr<engine::Engine> NewEngine(const engine::EngineOptions& options) {
    return *engine::Engine::Create(options);
  }
  virtual std::unique_ptr<kv_transfer::Transport> NewTransport() {
    return kv_transfer::CreateLoopbackTransport(network_, runtime_->epoch);
  }

  void TearDown() override {
    if (scheduler_ == nullptr) return;
    scheduler_->EndAll();
    worker_service_->Stop();
    server_->Shutdown(absl::Seconds(5));
    scheduler_->Stop();
    sender_->Close();
  }

  std::unique_ptr<FakeDecodeWorker> NewDecode(absl::Duration stall = absl::Seconds(20)) {
    auto decode =
        std::make_unique<FakeDecodeWorker>(network_, kBlockSize, runtime_->block_bytes(), stall);
    decode->state_slot_bytes = runtime_->state_slot_bytes();
    return decode;
  }

  ferry::v1::PrefillRequest Request(const std::string& id, const std::vector<uint32_t>& tokens,
                                    const FakeDecodeWorker& decode, uint32_t attempt = 1) const {
    ferry::v1::PrefillRequest request;
    request.set_worker_epoch(runtime_->epoch.ToBytes());
    request.mutable_decode()->set_address(decode.address());
    request.mutable_decode()->set_epoch(decode.epoch.ToBytes());
    ferry::v1::RequestSpec* spec = request.mutable_spec();
    spec->mutable_key()->set_request_id(id);
    spec->mutable_key()->set_attempt(attempt);
    spec->set_model("m");
    spec->mutable_token_ids()->Assign(tokens.begin(), tokens.end());
    spec->set_num_prompt_tokens(static_cast<uint32_t>(tokens.size()));
    spec->set_cache_namespace("n");
    auto* sampling = spec->mutable_sampling();
    sampling->set_top_p(1);
    sampling->set_repetition_penalty(1);
    sampling->set_max_tokens(16);
    sampling->set_n(1);
    sampling->set_num_logprobs(-1);
    return request;
  }

  // Runs a request whole.
  ferry::v1::PrefillDone Prefill(const ferry::v1::PrefillRequest& request) {
    PrefillCall call(stub_.get(), request);
    const ferry::v1::PrefillEvent done = call.Until(ferry::v1::PrefillEvent::kDone);
    EXPECT_TRUE(call.Finish().ok());
    return done.done();
  }

  absl::Status PushHeld(const std::string& id, uint32_t held, uint32_t attempt,
                        const FakeDecodeWorker& decode, ferry::v1::PrefillDone* done = nullptr) {
    grpc::ClientContext context;
    ferry::v1::PushHeldRequest request;
    request.set_request_id(id);
    request.set_attempt_held(held);
    request.set_attempt(attempt);
    request.set_worker_epoch(runtime_->epoch.ToBytes());
    request.mutable_decode()->set_address(decode.address());
    request.mutable_decode()->set_epoch(decode.epoch.ToBytes());
    ferry::v1::PushHeldResponse response;
    const grpc::Status status = stub_->PushHeld(&context, request, &response);
    if (done != nullptr) *done = response.done();
    return status::FromGrpc(status);
  }

  absl::Status RenewLease(const std::string& id, uint32_t attempt) {
    grpc::ClientContext context;
    ferry::v1::RenewLeaseRequest request;
    request.mutable_key()->set_request_id(id);
    request.mutable_key()->set_attempt(attempt);
    request.set_worker_epoch(runtime_->epoch.ToBytes());
    ferry::v1::RenewLeaseResponse response;
    return status::FromGrpc(stub_->RenewLease(&context, request, &response));
  }

  bool CancelRpc(const std::string& id, uint32_t attempt) {
    grpc::ClientContext context;
    ferry::v1::CancelRequest request;
    request.mutable_key()->set_request_id(id);
    request.mutable_key()->set_attempt(attempt);
    request.set_reason("test");
    ferry::v1::CancelResponse response;
    EXPECT_TRUE(worker_stub_->Cancel(&context, request, &response).ok());
    return response.found();
  }

  ferry::v1::LoadReport Load() const {
    ferry::v1::LoadReport report;
    scheduler_->FillLoad(&report);
    return report;
  }

  // Reads load reports until one is as wanted.
  template <typename Wanted>
  void WaitForLoad(Wanted wanted) {
    grpc::ClientContext context;
    ferry::v1::WatchLoadRequest request;
    request.set_interval_ms(10);
    auto reader = worker_stub_->WatchLoad(&context, request);
    ferry::v1::LoadReport report;
    do {
      ASSERT_TRUE(reader->Read(&report));
    } while (!wanted(report));
    context.TryCancel();
  }

  // Waits until the worker is empty (and leaves it draining): every gauge is back where it was.
  void ExpectEverythingGivenBack() {
    grpc::ClientContext context;
    ferry::v1::DrainRequest request;
    request.set_limit_ms(30'000);
    ferry::v1::DrainResponse response;
    ASSERT_TRUE(worker_stub_->Drain(&context, request, &response).ok());
    EXPECT_EQ(response.remaining_requests(), 0u);
    EXPECT_EQ(response.remaining_held_blocks(), 0u);
    const ferry::v1::LoadReport report = Load();
    EXPECT_EQ(report.running_requests(), 0u);
    EXPECT_EQ(report.waiting_requests(), 0u);
    EXPECT_EQ(report.waiting_tokens(), 0u);
    EXPECT_EQ(report.kv_blocks().active(), 0u);
    EXPECT_EQ(report.kv_blocks().held(), 0u);
    EXPECT_EQ(report.kv_blocks().quarantined(), 0u);
    EXPECT_EQ(report.kv_blocks().free() + report.kv_blocks().cached(),
              static_cast<uint32_t>(options_.worker.num_blocks));
    EXPECT_EQ(report.state_slots().free() + report.state_slots().cached(),
              static_cast<uint32_t>(runtime_->num_state_slots()));
    EXPECT_THAT(prometheus::TextSerializer().Serialize(registry_->Collect()),
                testing::HasSubstr("\nferry_transfer_inflight 0\n"));
  }

  std::shared_ptr<kv_transfer::LoopbackNetwork> network_ = kv_transfer::CreateLoopbackNetwork();
  std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  PrefillOptions options_;
  worker::SpeedEstimate speed_;  // unknown unless a test sets it
  worker::KvEventLog events_;
  std::unique_ptr<worker::WorkerRuntime> runtime_;
  std::unique_ptr<worker::WorkerMetrics> metrics_;
  std::unique_ptr<KvSender> sender_;
  std::unique_ptr<PrefillScheduler> scheduler_;
  std::unique_ptr<worker::WorkerService> worker_service_;
  std::unique_ptr<PrefillServices> services_;
  std::unique_ptr<service::GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<ferry::v1::PrefillWorker::Stub> stub_;
  std::unique_ptr<ferry::v1::Worker::Stub> worker_stub_;
  std::unique_ptr<ferry::v1::KvTransfer::Stub> transfer_stub_;
};

}  // namespace prefill_worker

#endif  // TESTS_PREFILL_WORKER_PREFILL_FIXTURE_H_
