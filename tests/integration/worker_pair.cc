#include "tests/integration/worker_pair.h"

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "decode_worker/decode_scheduler.h"
#include "decode_worker/options.h"
#include "grpcpp/grpcpp.h"
#include "status/check.h"
#include "status/grpc_status.h"
#include "tests/fakes/device_engine.h"
#include "worker/worker_metrics.h"
#include "worker/worker_runtime.h"

namespace integration {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);  // a failure, not a wait
constexpr char kModel[] = "rolling";

worker::WorkerOptions OptionsOf(const PairOptions& options) {
  worker::WorkerOptions worker;
  worker.listen = worker.metrics_listen = "127.0.0.1:0";
  worker.model_name = kModel;
  worker.data_ip = "127.0.0.1";
  worker.links = options.links;
  worker.num_blocks = options.num_blocks;
  worker.num_state_slots = options.num_state_slots;
  worker.snapshot_blocks = options.snapshot_blocks;
  worker.reserve_wait = kPatience;
  return worker;
}

std::unique_ptr<worker::WorkerRuntime> StartRuntime(const PairOptions& options) {
  auto runtime = worker::StartRuntime(OptionsOf(options), [&options] {
    std::unique_ptr<engine::Engine> engine = fakes::CreateRollingEngine(options.network);
    return options.device_memory ? fakes::WithDeviceMemory(std::move(engine)) : std::move(engine);
  });
  FERRY_CHECK(runtime.ok()) << runtime.status();
  return *std::move(runtime);
}

void FillSpec(const PairRequest& request, ferry::v1::RequestSpec* spec) {
  spec->mutable_key()->set_request_id(request.id);
  spec->mutable_key()->set_attempt(1);
  spec->set_model(kModel);
  spec->mutable_token_ids()->Assign(request.tokens.begin(), request.tokens.end());
  spec->set_num_prompt_tokens(static_cast<uint32_t>(request.tokens.size()));
  spec->set_cache_namespace("n");
  ferry::v1::ResolvedSampling* sampling = spec->mutable_sampling();
  sampling->set_temperature(request.sampling.temperature);
  sampling->set_seed(request.sampling.seed);
  sampling->set_top_p(1);
  sampling->set_repetition_penalty(1);
  sampling->set_max_tokens(request.sampling.max_tokens);
  for (const int32_t id : request.sampling.stop_token_ids) sampling->add_stop_token_ids(id);
  sampling->set_n(request.num_branches);
  sampling->set_num_logprobs(-1);
}

}  // namespace

PrefillWorkerUnderTest::PrefillWorkerUnderTest(const PairOptions& options)
    : runtime_(StartRuntime(options)) {
  prefill_worker::PrefillOptions prefill;
  prefill.worker = OptionsOf(options);
  prefill.chunk_tokens = options.chunk_tokens;
  metrics_ = std::make_unique<worker::WorkerMetrics>(registry_, *runtime_);
  sender_ = prefill_worker::CreateKvSender(runtime_.get(), metrics_.get());
  scheduler_ = std::make_unique<prefill_worker::PrefillScheduler>(
      prefill, runtime_.get(), sender_.get(), &events_, metrics_.get(), nullptr);
  worker_service_ =
      worker::CreateWorkerService(scheduler_.get(), &events_, runtime_->epoch.ToBytes());
  services_ = prefill_worker::CreatePrefillServices(runtime_.get(), scheduler_.get());
  std::vector<grpc::Service*> services = services_->grpc_services();
  services.push_back(worker_service_->grpc_service());
  server_ = *service::GrpcServer::Start("127.0.0.1:0", {}, services);
  sender_->SetOwnAddress(address());
  scheduler_->Start();
}

PrefillWorkerUnderTest::~PrefillWorkerUnderTest() {
  scheduler_->EndAll();
  worker_service_->Stop();
  server_->Shutdown(kPatience);
  scheduler_->Stop();
  sender_->Close();
}

ferry::v1::LoadReport PrefillWorkerUnderTest::Load() const {
  ferry::v1::LoadReport report;
  scheduler_->FillLoad(&report);
  return report;
}

WorkerPair::WorkerPair(const PairOptions& options)
    : options_(options), prefill_(std::make_unique<PrefillWorkerUnderTest>(options)) {
  decode_worker::DecodeOptions decode;
  decode.worker = OptionsOf(options);
  decode.chunk_tokens = options.chunk_tokens;
  auto started = decode_worker::DecodeServer::Start(decode, StartRuntime(options),
                                                    std::make_shared<prometheus::Registry>());
  FERRY_CHECK(started.ok()) << started.status();
  decode_ = *std::move(started);
  prefill_stub_ = ferry::v1::PrefillWorker::NewStub(service::MakeChannel(prefill_->address(), {}));
  decode_stub_ = ferry::v1::DecodeWorker::NewStub(
      service::MakeChannel(absl::StrCat("127.0.0.1:", decode_->port()), {}));
}

WorkerPair::~WorkerPair() {
  decode_->Stop();
  prefill_.reset();
}

PairReply WorkerPair::Generate(const PairRequest& request) {
  ferry::v1::DecodeRequest decode;
  FillSpec(request, decode.mutable_spec());
  decode.set_worker_epoch(decode_->runtime().epoch.ToBytes());
  decode.set_local_prefill(request.local);
  decode.mutable_prefill()->set_address(prefill_->address());
  decode.mutable_prefill()->set_epoch(prefill_->runtime().epoch.ToBytes());

  PairReply reply;
  reply.tokens.resize(request.num_branches);
  grpc::ClientContext decode_context;
  const auto stream = decode_stub_->Decode(&decode_context, decode);
  std::thread prefiller;
  absl::Status prefill_status;
  ferry::v1::DecodeEvent event;
  while (stream->Read(&event)) {
    if (event.has_accepted() && !request.local) {
      prefiller = std::thread([&] {
        ferry::v1::PrefillRequest prefill;
        *prefill.mutable_spec() = decode.spec();
        prefill.set_worker_epoch(prefill_->runtime().epoch.ToBytes());
        prefill.mutable_decode()->set_address(absl::StrCat("127.0.0.1:", decode_->port()));
        prefill.mutable_decode()->set_epoch(decode_->runtime().epoch.ToBytes());
        grpc::ClientContext context;
        const auto prefill_stream = prefill_stub_->Prefill(&context, prefill);
        ferry::v1::PrefillEvent prefill_event;
        while (prefill_stream->Read(&prefill_event)) {
          if (prefill_event.has_done()) reply.prefilled = prefill_event.done();
        }
        prefill_status = status::FromGrpc(prefill_stream->Finish());
      });
    } else if (event.has_tokens()) {
      const auto& ids = event.tokens().token_ids();
      std::vector<int32_t>& branch = reply.tokens.at(event.tokens().branch());
      branch.insert(branch.end(), ids.begin(), ids.end());
    } else if (event.has_done()) {
      reply.decoded = event.done();
    }
  }
  reply.status = status::FromGrpc(stream->Finish());
  if (prefiller.joinable()) prefiller.join();
  if (reply.status.ok()) reply.status = prefill_status;
  return reply;
}

std::vector<int32_t> WorkerPair::Reference(const PairRequest& request, int32_t branch) const {
  return fakes::RollingReference(options_.network, request.tokens, request.sampling, branch);
}

bool WorkerPair::WaitIdle() {
  using Snapshot = decode_worker::DecodeScheduler::Snapshot;
  const bool decode_idle = decode_->scheduler().WaitForSnapshot(
      [&](const Snapshot& now) {
        return now.running_requests + now.waiting_requests == 0 &&
               now.blocks.free + now.blocks.cached == options_.num_blocks &&
               now.state_slots.free + now.state_slots.cached == options_.num_state_slots;
      },
      kPatience);
  // The prefill worker's streams have ended, and what they learned last is true.
  const ferry::v1::LoadReport load = prefill_->Load();
  return decode_idle &&
         load.kv_blocks().free() + load.kv_blocks().cached() ==
             static_cast<uint32_t>(options_.num_blocks) &&
         load.state_slots().free() + load.state_slots().cached() ==
             static_cast<uint32_t>(options_.num_state_slots);
}

}  // namespace integration
