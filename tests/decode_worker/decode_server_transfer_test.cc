// A decode worker and a prefill worker over gRPC: handshakes, reservations, transfers, aborts.

#include <future>
#include <string>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kv_transfer/ucx_transport.h"
#include "status/grpc_status.h"
#include "tests/decode_worker/server_fixture.h"

namespace decode_worker {
namespace {

using ::testing::HasSubstr;

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

// A worker that listens on all interfaces does not know which of its addresses its peer can reach.
TEST_F(DecodeServerTest, PeersThatListenEverywhereLinkByTheAddressesOfTheirCall) {
  const auto listening = [](const kv_transfer::Epoch& epoch) {
    return *kv_transfer::CreateUcxTransport(
        {.epoch = epoch, .link_kinds = {"tcp"}, .listen_ip = "0.0.0.0"});
  };
  Start(64, [&](worker::WorkerRuntime& runtime) { runtime.transport = listening(runtime.epoch); });
  const kv_transfer::Epoch peer = kv_transfer::Epoch::Random();
  const auto transport = listening(peer);
  ferry::v1::HandshakeRequest request;
  request.set_epoch(peer.ToBytes());
  request.set_peer_epoch(epoch());
  request.set_address("127.0.0.1:1");
  worker::FillLayoutRecord(server_->runtime(), request.mutable_layout());
  AddLinks(*transport, &request);
  EXPECT_EQ(request.links(0).listener().rfind("0.0.0.0:", 0), 0u) << request.links(0).listener();
  grpc::ClientContext context;
  ferry::v1::HandshakeResponse response;
  // It has connected to us when it answers.
  const grpc::Status status = transfer_->Handshake(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const kv_transfer::LinkAddress address = {.kind = "tcp",
                                            .host_id = response.links(0).host_id(),
                                            .worker_address = response.links(0).worker_address(),
                                            .listener = response.links(0).listener()};
  EXPECT_EQ(address.listener.rfind("127.0.0.1:", 0), 0u) << address.listener;
  EXPECT_TRUE(transport->Connect(server_->runtime().epoch, {address}, kPatience).ok());
}

}  // namespace
}  // namespace decode_worker
