// A whole decode worker in this process, spoken to over gRPC; its prefill worker is a client with
// an engine, a loopback link and a KvTransfer service that records.

#include "decode_worker/decode_server.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "ferry/v1/kv_transfer.grpc.pb.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "prometheus/registry.h"
#include "service/grpc_server.h"
#include "status/grpc_status.h"
#include "tests/decode_worker/fake_engine.h"
#include "tests/decode_worker/harness.h"
#include "worker/request_spec.h"

namespace decode_worker {
namespace {

using ferry::v1::DecodeEvent;
using ferry::v1::DecodeRequest;
using ::testing::HasSubstr;

constexpr int32_t kBlockSize = 64;

// P's side of AbortTransfer.
class AbortRecorder final : public ferry::v1::KvTransfer::Service {
 public:
  grpc::Status AbortTransfer(grpc::ServerContext*, const ferry::v1::AbortTransferRequest* request,
                             ferry::v1::AbortTransferResponse* response) override {
    {
      std::lock_guard lock(mutex_);
      if (fail_next_-- > 0) return {grpc::StatusCode::UNAVAILABLE, "not now"};
      aborted_.push_back(request->key().request_id());
    }
    changed_.notify_all();
    response->set_writer_state(ferry::v1::WRITER_STATE_DRAINED);
    return grpc::Status::OK;
  }
  bool WaitFor(const std::string& request_id) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoNanoseconds(kPatience), [&] {
      return std::count(aborted_.begin(), aborted_.end(), request_id) > 0;
    });
  }
  void FailNext(int times) {
    std::lock_guard lock(mutex_);
    fail_next_ = times;
  }

 private:
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::vector<std::string> aborted_;
  int fail_next_ = 0;
};

struct Answer {
  grpc::Status status;
  bool accepted_first = false;
  std::map<uint32_t, std::vector<int32_t>> tokens;
  std::map<uint32_t, ferry::v1::FinishReason> finish;
  std::vector<ferry::v1::PositionLogprobs> logprobs;
  std::optional<ferry::v1::DecodeDone> done;
};

class DecodeServerTest : public ::testing::Test {
 protected:
  DecodeServerTest() {
    options_.worker.listen = "127.0.0.1:0";
    options_.worker.handshake_timeout = absl::Seconds(5);
  }
  ~DecodeServerTest() override {
    server_.reset();
    prefill_.reset();
  }

  void Start(int32_t num_blocks = 64) {
    network_ = kv_transfer::CreateLoopbackNetwork();
    FakeEngineOptions fake;
    fake.limits.max_tokens = 1024;
    auto engine = CreateFakeEngine(fake);
    engine_ = engine.get();
    num_blocks_ = num_blocks;
    absl::StatusOr<std::unique_ptr<DecodeServer>> started =
        DecodeServer::Start(options_, MakeRuntime(std::move(engine), Room{num_blocks}, network_),
                            std::make_shared<prometheus::Registry>());
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = std::move(*started);
    const auto channel =
        service::MakeChannel(absl::StrCat("127.0.0.1:", server_->port()), service::TlsOptions());
    decode_ = ferry::v1::DecodeWorker::NewStub(channel);
    transfer_ = ferry::v1::KvTransfer::NewStub(channel);
    worker_ = ferry::v1::Worker::NewStub(channel);
  }
  void StartPrefill() {
    FakeEngineOptions fake;
    fake.limits.max_tokens = 1024;
    prefill_ = std::make_unique<FakePrefill>(CreateFakeEngine(fake), Room{64}, network_);
    recorder_server_ = *service::GrpcServer::Start("127.0.0.1:0", {}, {&recorder_});
    const grpc::Status status = Handshake(HandshakeRequest());
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_TRUE(prefill_->runtime()
                    .transport
                    ->Connect(server_->runtime().epoch, server_->runtime().transport->addresses(),
                              kPatience)
                    .ok());
  }

  std::string epoch() const { return server_->runtime().epoch.ToBytes(); }
  ferry::v1::HandshakeRequest HandshakeRequest() { return HandshakeRequest(*prefill_); }
  ferry::v1::HandshakeRequest HandshakeRequest(FakePrefill& prefill) {
    ferry::v1::HandshakeRequest request;
    request.set_epoch(prefill.epoch().ToBytes());
    request.set_address(absl::StrCat(prefill_host_, ":", recorder_server_->port()));
    worker::FillLayoutRecord(prefill.runtime(), request.mutable_layout());
    for (const kv_transfer::LinkAddress& own : prefill.runtime().transport->addresses()) {
      ferry::v1::LinkAddress* link = request.add_links();
      link->set_kind(own.kind);
      link->set_host_id(own.host_id);
      link->set_worker_address(own.worker_address);
    }
    request.set_peer_epoch(epoch());
    return request;
  }
  grpc::Status Handshake(const ferry::v1::HandshakeRequest& request) {
    grpc::ClientContext context;
    ferry::v1::HandshakeResponse response;
    const grpc::Status status = transfer_->Handshake(&context, request, &response);
    if (status.ok()) {
      EXPECT_EQ(response.epoch(), epoch());
      EXPECT_EQ(response.links(0).kind(), "loopback");
    }
    return status;
  }

  DecodeRequest Request(const std::string& id, int32_t length, int32_t max_tokens) {
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
  DecodeRequest RemoteRequest(const std::string& id, int32_t length, int32_t max_tokens) {
    DecodeRequest request = Request(id, length, max_tokens);
    request.set_local_prefill(false);
    request.mutable_prefill()->set_epoch(prefill_->epoch().ToBytes());
    request.mutable_prefill()->set_address("unused");
    return request;
  }

  Answer Run(const DecodeRequest& request) {
    grpc::ClientContext context;
    return Read(context, request);
  }
  Answer Read(grpc::ClientContext& context, const DecodeRequest& request,
              const std::function<void()>& on_accepted = nullptr) {
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

  engine::SamplingOptions Sampling(const DecodeRequest& request) {
    return worker::ToSamplingOptions(request.spec().sampling(), 0);
  }
  std::vector<int32_t> Reference(const DecodeRequest& request, int32_t branch = 0) {
    return ReferenceTokens({request.spec().token_ids().begin(), request.spec().token_ids().end()},
                           Sampling(request), branch);
  }

  grpc::Status Reserve(const DecodeRequest& request, ferry::v1::ReserveResponse* response) {
    grpc::ClientContext context;
    ferry::v1::ReserveRequest reserve;
    *reserve.mutable_key() = request.spec().key();
    reserve.set_sender_epoch(prefill_->epoch().ToBytes());
    reserve.set_receiver_epoch(request.worker_epoch());
    reserve.set_num_tokens(static_cast<uint32_t>(request.spec().token_ids_size()));
    reserve.set_wait_ms(10000);
    return transfer_->Reserve(&context, reserve, response);
  }
  // P's part of a request, whole.
  grpc::Status Push(const DecodeRequest& request) {
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
    done.set_num_bytes(grant.num_blocks() *
                       static_cast<uint64_t>(prefill_->runtime().block_bytes()));
    for (const FirstToken& token : first) {
      ferry::v1::FirstToken* wire = done.add_first_tokens();
      wire->set_branch(static_cast<uint32_t>(token.branch));
      wire->set_token_id(static_cast<uint32_t>(token.sample.token_id));
      wire->mutable_logprobs()->mutable_chosen()->set_logprob(token.sample.logprob);
    }
    ferry::v1::TransferDoneResponse response;
    return transfer_->TransferDone(&context, done, &response);
  }
  bool WaitIdle() {
    return server_->scheduler().WaitForSnapshot(
        [this](const DecodeScheduler::Snapshot& now) {
          return now.running_requests + now.waiting_requests + now.blocks.active +
                         now.blocks.reserved + now.blocks.quarantined ==
                     0 &&
                 now.blocks.free + now.blocks.cached == num_blocks_;
        },
        kPatience);
  }

  DecodeOptions options_;
  std::shared_ptr<kv_transfer::LoopbackNetwork> network_;
  FakeEngine* engine_ = nullptr;
  int32_t num_blocks_ = 0;
  AbortRecorder recorder_;
  std::string prefill_host_ = "127.0.0.1";  // as the prefill worker tells it
  std::unique_ptr<service::GrpcServer> recorder_server_;
  std::unique_ptr<FakePrefill> prefill_;
  std::unique_ptr<DecodeServer> server_;
  std::unique_ptr<ferry::v1::DecodeWorker::Stub> decode_;
  std::unique_ptr<ferry::v1::KvTransfer::Stub> transfer_;
  std::unique_ptr<ferry::v1::Worker::Stub> worker_;
};

TEST_F(DecodeServerTest, StreamsAcceptedTokensDone) {
  Start();
  DecodeRequest request = Request("r", 100, 30);
  request.mutable_spec()->mutable_sampling()->set_n(2);
  request.mutable_spec()->mutable_sampling()->set_temperature(1);
  request.mutable_spec()->mutable_sampling()->set_num_logprobs(3);
  const Answer answer = Run(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_TRUE(answer.accepted_first);
  for (uint32_t branch = 0; branch < 2; ++branch) {
    EXPECT_EQ(answer.tokens.at(branch), Reference(request, static_cast<int32_t>(branch)));
    EXPECT_EQ(answer.finish.at(branch), ferry::v1::FINISH_REASON_LENGTH);
  }
  ASSERT_EQ(answer.logprobs.size(), 60u);
  EXPECT_EQ(answer.logprobs[0].top_size(), 3);
  ASSERT_TRUE(answer.done.has_value());
  EXPECT_EQ(answer.done->computed_tokens(), 100u);
  EXPECT_EQ(answer.done->cached_tokens(), 0u);
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, BadRequestsAreRefusedWithTheirValues) {
  Start(/*num_blocks=*/8);
  struct Case {
    std::function<void(DecodeRequest&)> spoil;
    grpc::StatusCode code;
    std::string words;
  };
  const auto sampling = [](DecodeRequest& request) {
    return request.mutable_spec()->mutable_sampling();
  };
  constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const std::vector<Case> cases = {
      {[](auto& r) { r.mutable_spec()->clear_token_ids(); }, kInvalid, "no tokens"},
      {[](auto& r) { r.mutable_spec()->set_token_ids(3, 50); }, kInvalid, "50"},
      {[](auto& r) { r.mutable_spec()->set_num_prompt_tokens(11); }, kInvalid, "11 of 10"},
      {[](auto& r) { r.mutable_spec()->mutable_key()->clear_request_id(); }, kInvalid,
       "request_id"},
      {[](auto& r) { r.mutable_spec()->mutable_key()->set_request_id(std::string(161, 'x')); },
       kInvalid, "161"},
      {[](auto& r) { r.mutable_spec()->set_model("other"); }, grpc::StatusCode::NOT_FOUND, "other"},
      {[](auto& r) { r.set_worker_epoch(std::string(16, 'e')); },
       grpc::StatusCode::FAILED_PRECONDITION, "epoch"},
      {[](auto& r) { r.set_local_prefill(false); }, kInvalid, "prefill.epoch"},
      {[&](auto& r) { sampling(r)->set_n(0); }, kInvalid, "n is 0"},
      {[&](auto& r) { sampling(r)->set_n(17); }, kInvalid, "17"},
      {[&](auto& r) { sampling(r)->set_max_tokens(0); }, kInvalid, "max_tokens is 0"},
      {[&](auto& r) { sampling(r)->set_max_tokens(4087); }, kInvalid, "4096"},
      {[&](auto& r) { sampling(r)->set_max_tokens(600); }, kInvalid, "this worker has 8"},
      {[&](auto& r) { sampling(r)->set_min_tokens(6); }, kInvalid, "min_tokens is 6"},
      {[&](auto& r) { sampling(r)->set_temperature(-1); }, kInvalid, "-1"},
      {[&](auto& r) { sampling(r)->set_temperature(std::nanf("")); }, kInvalid, "nan"},
      {[&](auto& r) { sampling(r)->set_top_k(-1); }, kInvalid, "top_k"},
      {[&](auto& r) { sampling(r)->set_top_p(0); }, kInvalid, "top_p"},
      {[&](auto& r) { sampling(r)->set_top_p(1.5f); }, kInvalid, "1.5"},
      {[&](auto& r) { sampling(r)->set_min_p(-0.5f); }, kInvalid, "min_p"},
      {[&](auto& r) { sampling(r)->set_repetition_penalty(0); }, kInvalid, "repetition_penalty"},
      {[&](auto& r) { sampling(r)->set_num_logprobs(21); }, kInvalid, "21"},
      {[&](auto& r) { sampling(r)->add_stop_token_ids(50); }, kInvalid, "50"},
      {[&](auto& r) {
         for (int i = 0; i < 73; ++i) sampling(r)->add_stop_token_ids(1);
       },
       kInvalid, "73"},
      {[&](auto& r) {
         r.mutable_spec()->set_num_prompt_tokens(5);
         sampling(r)->set_max_tokens(5);
       },
       kInvalid, "5 tokens are emitted already"},
      {[&](auto& r) {
         r.mutable_spec()->set_num_prompt_tokens(5);
         sampling(r)->set_max_tokens(50);
         sampling(r)->set_n(2);
       },
       kInvalid, "only n = 1"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(absl::StrCat("case ", i));
    DecodeRequest request = Request("r", 10, 5);
    cases[i].spoil(request);
    const Answer answer = Run(request);
    EXPECT_EQ(answer.status.error_code(), cases[i].code) << answer.status.error_message();
    EXPECT_THAT(answer.status.error_message(), HasSubstr(cases[i].words));
    EXPECT_FALSE(answer.accepted_first);
  }
  EXPECT_TRUE(Run(Request("r", 10, 5)).status.ok());
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, MigratedRequestContinuesItsText) {
  Start();
  const DecodeRequest whole = Request("whole", 100, 40);
  const std::vector<int32_t> text = Reference(whole);
  DecodeRequest rest = Request("rest", 100, 40);
  for (int i = 0; i < 15; ++i) rest.mutable_spec()->add_token_ids(static_cast<uint32_t>(text[i]));
  const Answer answer = Run(rest);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.tokens.at(0), std::vector<int32_t>(text.begin() + 15, text.end()));
}

TEST_F(DecodeServerTest, TransferOverTheServices) {
  Start();
  StartPrefill();
  DecodeRequest request = RemoteRequest("r", 200, 30);
  request.mutable_spec()->mutable_sampling()->set_num_logprobs(0);
  grpc::ClientContext context;
  std::future<grpc::Status> pushed;
  const Answer answer = Read(context, request, [&] {
    pushed = std::async(std::launch::async, [&] { return Push(request); });
  });
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_TRUE(pushed.get().ok());
  EXPECT_EQ(answer.tokens.at(0), Reference(request));
  EXPECT_EQ(answer.logprobs[0].chosen().logprob(),
            -1.0f - static_cast<float>(answer.tokens.at(0)[0]));
  EXPECT_EQ(answer.done->kv_bytes_received(),
            4 * static_cast<uint64_t>(server_->runtime().block_bytes()));
  EXPECT_EQ(answer.done->computed_tokens(), 0u);
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, HandshakeComparesLayoutsAndLinksInWords) {
  Start();
  StartPrefill();
  ferry::v1::HandshakeRequest wrong = HandshakeRequest();
  wrong.mutable_layout()->mutable_groups(0)->set_entry_bytes(17);
  grpc::Status status = Handshake(wrong);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status::Reason(status::FromGrpc(status)), status::kIncompatible);
  EXPECT_THAT(status.error_message(),
              HasSubstr(absl::StrCat("is 17 at prefill worker ", wrong.address(), " and ")));
  wrong = HandshakeRequest();
  wrong.mutable_links(0)->set_kind("tcp");
  status = Handshake(wrong);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status::Reason(status::FromGrpc(status)), status::kIncompatible);
  EXPECT_THAT(status.error_message(),
              HasSubstr(absl::StrCat("--links is tcp at prefill worker ", wrong.address(),
                                     " and loopback at the decode worker")));
  wrong = HandshakeRequest();
  wrong.set_peer_epoch(std::string(16, 'x'));
  status = Handshake(wrong);
  EXPECT_EQ(status::Reason(status::FromGrpc(status)), status::kStaleEpoch);
  wrong = HandshakeRequest();
  wrong.set_epoch("short");
  EXPECT_EQ(Handshake(wrong).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  wrong = HandshakeRequest();
  wrong.set_epoch(kv_transfer::Epoch::Random().ToBytes());  // nobody there
  EXPECT_EQ(Handshake(wrong).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Handshake(HandshakeRequest()).ok());  // again
}

TEST_F(DecodeServerTest, StaleTransferMessagesAreRefused) {
  Start();
  StartPrefill();
  DecodeRequest request = RemoteRequest("r", 100, 5);
  ferry::v1::ReserveResponse grant;
  EXPECT_EQ(Reserve(request, &grant).error_code(), grpc::StatusCode::NOT_FOUND);
  request.set_worker_epoch(std::string(16, 'x'));
  EXPECT_EQ(status::Reason(status::FromGrpc(Reserve(request, &grant))), status::kStaleEpoch);
  grpc::ClientContext context;
  ferry::v1::TransferDoneRequest done;
  done.set_receiver_epoch(std::string(16, 'x'));
  ferry::v1::TransferDoneResponse response;
  EXPECT_EQ(status::Reason(status::FromGrpc(transfer_->TransferDone(&context, done, &response))),
            status::kStaleEpoch);
  grpc::ClientContext abort_context;
  ferry::v1::AbortTransferRequest abort;
  abort.mutable_key()->set_request_id("unknown");
  abort.set_caller_epoch(prefill_->epoch().ToBytes());
  ferry::v1::AbortTransferResponse aborted;
  ASSERT_TRUE(transfer_->AbortTransfer(&abort_context, abort, &aborted).ok());
  EXPECT_EQ(aborted.writer_state(), ferry::v1::WRITER_STATE_NEVER_STARTED);
}

TEST_F(DecodeServerTest, BreakingTheStreamWhileReceivingTellsTheSenderEvenIfItFailsOnce) {
  Start();
  StartPrefill();
  recorder_.FailNext(1);
  const DecodeRequest request = RemoteRequest("r", 200, 30);
  grpc::ClientContext context;
  const Answer answer = Read(context, request, [&] {
    ferry::v1::ReserveResponse grant;
    EXPECT_TRUE(Reserve(request, &grant).ok());
    context.TryCancel();
  });
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(recorder_.WaitFor("r"));
  EXPECT_TRUE(WaitIdle());
}

// Two prefill workers that listen on all interfaces of their hosts, on the same port, tell the same
// address; they are two all the same, and each is called where its calls come from.
TEST_F(DecodeServerTest, ASenderIsToldAlsoWhereAnotherOneTellsTheSameAddress) {
  prefill_host_ = "[::]";
  Start();
  StartPrefill();
  FakeEngineOptions fake;
  FakePrefill other(CreateFakeEngine(fake), Room{64}, network_);
  ASSERT_TRUE(Handshake(HandshakeRequest(other)).ok());
  const DecodeRequest request = RemoteRequest("r", 200, 30);
  grpc::ClientContext context;
  Read(context, request, [&] {
    ferry::v1::ReserveResponse grant;
    EXPECT_TRUE(Reserve(request, &grant).ok());
    context.TryCancel();
  });
  EXPECT_TRUE(recorder_.WaitFor("r"));
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, BreakingTheStreamAtAnyTimeGivesEverythingBack) {
  Start();
  for (const int32_t events : {0, 1, 2, 10}) {
    grpc::ClientContext context;
    const auto reader = decode_->Decode(&context, Request(absl::StrCat("r", events), 100, 3900));
    DecodeEvent event;
    for (int32_t i = 0; i < events; ++i) ASSERT_TRUE(reader->Read(&event));
    context.TryCancel();
    while (reader->Read(&event)) {
    }
    reader->Finish();
    EXPECT_TRUE(WaitIdle()) << events;
  }
}

TEST_F(DecodeServerTest, StreamThatNobodyReadsIsBounded) {
  Start(/*num_blocks=*/1024);
  DecodeRequest request = Request("r", 10, 4000);
  request.mutable_spec()->mutable_sampling()->set_n(16);
  request.mutable_spec()->mutable_sampling()->set_num_logprobs(20);
  grpc::ClientContext context;
  const auto reader = decode_->Decode(&context, request);
  reader->WaitForInitialMetadata();
  EXPECT_TRUE(server_->scheduler().WaitForSnapshot(
      [](const auto& now) { return now.batch.steps > 0; }, kPatience));
  EXPECT_TRUE(WaitIdle());  // without a single read
  DecodeEvent event;
  while (reader->Read(&event)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(DecodeServerTest, ManyStreamsLocalAndRemote) {
  Start();
  StartPrefill();
  constexpr int32_t kThreads = 12;
  constexpr int32_t kPerThread = 8;
  std::mutex prefill_mutex;  // guards prefill_, one prompt at a time
  std::vector<std::thread> threads;
  std::atomic<int32_t> right = 0;
  for (int32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int32_t i = 0; i < kPerThread; ++i) {
        const std::string id = absl::StrCat("r", t, "-", i);
        const int32_t length = 1 + (37 * t + 91 * i) % 500;
        const bool remote = (t + i) % 2 == 0;
        const DecodeRequest request =
            remote ? RemoteRequest(id, length, 40 + i) : Request(id, length, 40 + i);
        grpc::ClientContext context;
        std::future<grpc::Status> pushed;
        const Answer answer = Read(context, request, [&] {
          if (!remote) return;
          pushed = std::async(std::launch::async, [&] {
            std::lock_guard lock(prefill_mutex);
            return Push(request);
          });
        });
        EXPECT_TRUE(answer.status.ok()) << id << ": " << answer.status.error_message();
        right += answer.status.ok() && answer.tokens.at(0) == Reference(request);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, kThreads * kPerThread);
  EXPECT_TRUE(WaitIdle());
}

TEST_F(DecodeServerTest, InfoSaysRoleAndState) {
  options_.role_both = true;
  Start(/*num_blocks=*/32);
  const auto info = [&] {
    grpc::ClientContext context;
    ferry::v1::WorkerInfo info;
    EXPECT_TRUE(worker_->GetInfo(&context, {}, &info).ok());
    return info;
  };
  EXPECT_EQ(info().role(), ferry::v1::WORKER_ROLE_BOTH);
  EXPECT_EQ(info().state(), ferry::v1::WORKER_STATE_SERVING);
  EXPECT_EQ(info().num_blocks(), 32u);
  EXPECT_EQ(info().max_model_len(), 2048u) << "the pool holds less than the model could";
  EXPECT_TRUE(Run(Request("all", 10, 2038)).status.ok());
  EXPECT_TRUE(info().cancel_during_transfer());
  server_->StartDrain();
  EXPECT_EQ(info().state(), ferry::v1::WORKER_STATE_DRAINING);
  const Answer refused = Run(Request("late", 10, 5));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status::Reason(status::FromGrpc(refused.status)), status::kDraining);
  EXPECT_TRUE(server_->drained());
}

TEST_F(DecodeServerTest, StopEndsOpenStreamsAndTransfers) {
  Start();
  StartPrefill();
  const DecodeRequest remote = RemoteRequest("remote", 200, 30);
  std::promise<void> reserved;
  std::future<Answer> waiting = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    return Read(context, remote, [&] {
      ferry::v1::ReserveResponse grant;
      EXPECT_TRUE(Reserve(remote, &grant).ok());
      reserved.set_value();
    });
  });
  std::promise<void> started;
  std::future<Answer> running = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    return Read(context, Request("running", 100, 3900), [&] { started.set_value(); });
  });
  reserved.get_future().wait();
  started.get_future().wait();
  server_->Stop();
  EXPECT_EQ(waiting.get().status.error_code(), grpc::StatusCode::UNAVAILABLE);
  const grpc::Status status = running.get().status;  // it may have been quick
  EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace decode_worker
