#include "tests/decode_worker/server_fixture.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "prometheus/registry.h"

namespace decode_worker {

void DecodeServerTest::Start(int32_t num_blocks,
                             const std::function<void(worker::WorkerRuntime&)>& prepare) {
  network_ = kv_transfer::CreateLoopbackNetwork();
  FakeEngineOptions fake;
  fake.limits.max_tokens = 1024;
  auto engine = CreateFakeEngine(fake);
  engine_ = engine.get();
  num_blocks_ = num_blocks;
  std::unique_ptr<worker::WorkerRuntime> runtime =
      MakeRuntime(std::move(engine), Room{num_blocks}, network_);
  if (prepare) prepare(*runtime);
  absl::StatusOr<std::unique_ptr<DecodeServer>> started =
      DecodeServer::Start(options_, std::move(runtime), std::make_shared<prometheus::Registry>());
  ASSERT_TRUE(started.ok()) << started.status();
  server_ = std::move(*started);
  const auto channel =
      service::MakeChannel(absl::StrCat("127.0.0.1:", server_->port()), service::TlsOptions());
  decode_ = ferry::v1::DecodeWorker::NewStub(channel);
  transfer_ = ferry::v1::KvTransfer::NewStub(channel);
  worker_ = ferry::v1::Worker::NewStub(channel);
}

void DecodeServerTest::StartPrefill() {
  FakeEngineOptions fake;
  fake.limits.max_tokens = 1024;
  prefill_ = std::make_unique<FakePrefill>(CreateFakeEngine(fake), Room{64}, network_);
  recorder_server_ = *service::GrpcServer::Start("127.0.0.1:0", {}, {&recorder_});
  const grpc::Status status = Handshake(HandshakeRequest());
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_TRUE(
      prefill_->runtime()
          .transport
          ->Connect(server_->runtime().epoch, server_->runtime().transport->addresses(), kPatience)
          .ok());
}

ferry::v1::HandshakeRequest DecodeServerTest::HandshakeRequest(FakePrefill& prefill) {
  ferry::v1::HandshakeRequest request;
  request.set_epoch(prefill.epoch().ToBytes());
  request.set_address(absl::StrCat(prefill_host_, ":", recorder_server_->port()));
  worker::FillLayoutRecord(prefill.runtime(), request.mutable_layout());
  AddLinks(*prefill.runtime().transport, &request);
  request.set_peer_epoch(epoch());
  return request;
}

void DecodeServerTest::AddLinks(const kv_transfer::Transport& transport,
                                ferry::v1::HandshakeRequest* request) {
  for (const kv_transfer::LinkAddress& own : transport.addresses()) {
    ferry::v1::LinkAddress* link = request->add_links();
    link->set_kind(own.kind);
    link->set_host_id(own.host_id);
    link->set_worker_address(own.worker_address);
    link->set_listener(own.listener);
  }
}

grpc::Status DecodeServerTest::Handshake(const ferry::v1::HandshakeRequest& request) {
  grpc::ClientContext context;
  ferry::v1::HandshakeResponse response;
  const grpc::Status status = transfer_->Handshake(&context, request, &response);
  if (status.ok()) {
    EXPECT_EQ(response.epoch(), epoch());
    EXPECT_EQ(response.links(0).kind(), "loopback");
  }
  return status;
}

DecodeRequest DecodeServerTest::Request(const std::string& id, int32_t length, int32_t max_tokens) {
  DecodeRequest request;
  ferry::v1::RequestSpec* spec = request.mutable_spec();
  spec->mutable_key()->set_request_id(id);
  spec->mutable_key()->set_attempt(1);
  for (const int32_t token : RandomTokens(length, static_cast<uint64_t>(length))) {
    spec->add_token_ids(static_cast<uint32_t>(token));
  }
  spec->set_num_prompt_tokens(static_cast<uint32_t>(length));
  spec->set_cache_namespace("test");
  spec->set_model("test-model");
  spec->set_deadline_ms(60000);
  ferry::v1::ResolvedSampling* sampling = spec->mutable_sampling();
  sampling->set_top_p(1);
  sampling->set_repetition_penalty(1);
  sampling->set_max_tokens(static_cast<uint32_t>(max_tokens));
  sampling->set_n(1);
  sampling->set_num_logprobs(-1);
  request.set_worker_epoch(epoch());
  request.set_local_prefill(true);
  return request;
}

DecodeRequest DecodeServerTest::RemoteRequest(const std::string& id, int32_t length,
                                              int32_t max_tokens) {
  DecodeRequest request = Request(id, length, max_tokens);
  request.set_local_prefill(false);
  request.mutable_prefill()->set_epoch(prefill_->epoch().ToBytes());
  request.mutable_prefill()->set_address("unused");
  return request;
}

Answer DecodeServerTest::Read(grpc::ClientContext& context, const DecodeRequest& request,
                              const std::function<void()>& on_accepted) {
  Answer answer;
  const auto reader = decode_->Decode(&context, request);
  DecodeEvent event;
  bool first = true;
  while (reader->Read(&event)) {
    if (first) answer.accepted_first = event.has_accepted();
    if (first && on_accepted) on_accepted();
    first = false;
    EXPECT_FALSE(answer.done.has_value()) << "done is the last event";
    if (event.has_done()) answer.done = event.done();
    if (!event.has_tokens()) continue;
    const ferry::v1::DecodeTokens& tokens = event.tokens();
    for (const uint32_t id : tokens.token_ids()) {
      answer.tokens[tokens.branch()].push_back(static_cast<int32_t>(id));
    }
    answer.logprobs.insert(answer.logprobs.end(), tokens.logprobs().begin(),
                           tokens.logprobs().end());
    if (tokens.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED) {
      answer.finish[tokens.branch()] = tokens.finish_reason();
    }
  }
  answer.status = reader->Finish();
  return answer;
}

std::vector<int32_t> DecodeServerTest::Reference(const DecodeRequest& request, int32_t branch) {
  return ReferenceTokens({request.spec().token_ids().begin(), request.spec().token_ids().end()},
                         Sampling(request), branch);
}

grpc::Status DecodeServerTest::Reserve(const DecodeRequest& request,
                                       ferry::v1::ReserveResponse* response) {
  grpc::ClientContext context;
  ferry::v1::ReserveRequest reserve;
  *reserve.mutable_key() = request.spec().key();
  reserve.set_sender_epoch(prefill_->epoch().ToBytes());
  reserve.set_receiver_epoch(request.worker_epoch());
  reserve.set_num_tokens(static_cast<uint32_t>(request.spec().token_ids_size()));
  reserve.set_wait_ms(10000);
  return transfer_->Reserve(&context, reserve, response);
}

grpc::Status DecodeServerTest::Push(const DecodeRequest& request) {
  RequestSpec spec;
  spec.tokens.assign(request.spec().token_ids().begin(), request.spec().token_ids().end());
  spec.num_prompt_tokens = static_cast<int32_t>(request.spec().num_prompt_tokens());
  spec.sampling = Sampling(request);
  spec.num_branches = static_cast<int32_t>(request.spec().sampling().n());
  const std::vector<FirstToken> first = prefill_->Compute(spec);
  ferry::v1::ReserveResponse grant;
  if (const grpc::Status status = Reserve(request, &grant); !status.ok()) return status;
  kv_transfer::TransferId id;
  std::copy(grant.transfer_id().begin(), grant.transfer_id().end(), id.begin());
  prefill_->SendAll(server_->runtime().epoch, id, request.spec().key().attempt(),
                    static_cast<int32_t>(grant.cached_tokens()) / kBlockSize);
  grpc::ClientContext context;
  ferry::v1::TransferDoneRequest done;
  *done.mutable_key() = request.spec().key();
  done.set_transfer_id(grant.transfer_id());
  done.set_sender_epoch(prefill_->epoch().ToBytes());
  done.set_receiver_epoch(request.worker_epoch());
  done.set_num_blocks(grant.num_blocks());
  done.set_num_bytes(grant.num_blocks() * static_cast<uint64_t>(prefill_->runtime().block_bytes()));
  for (const FirstToken& token : first) {
    ferry::v1::FirstToken* wire = done.add_first_tokens();
    wire->set_branch(static_cast<uint32_t>(token.branch));
    wire->set_token_id(static_cast<uint32_t>(token.sample.token_id));
    wire->mutable_logprobs()->mutable_chosen()->set_logprob(token.sample.logprob);
  }
  ferry::v1::TransferDoneResponse response;
  return transfer_->TransferDone(&context, done, &response);
}

bool DecodeServerTest::WaitIdle() {
  return server_->scheduler().WaitForSnapshot(
      [this](const DecodeScheduler::Snapshot& now) {
        return now.running_requests + now.waiting_requests + now.blocks.active +
                       now.blocks.reserved + now.blocks.quarantined ==
                   0 &&
               now.blocks.free + now.blocks.cached == num_blocks_;
      },
      kPatience);
}

}  // namespace decode_worker
