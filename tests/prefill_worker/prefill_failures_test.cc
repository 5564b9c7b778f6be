// What a prefill worker does when something goes wrong or somebody changes their mind: bounded,
// named, and with every block given back.

#include <future>

#include "losing_transport.h"
#include "prefill_fixture.h"

namespace prefill_worker {
namespace {

using ferry::v1::PrefillEvent;
using kv_transfer::LoopbackFault;

class PrefillFailuresTest : public PrefillFixture {
 protected:
  void SetUp() override {
    StartWorker(TestOptions());
    decode_ = NewDecode();
  }
  void TearDown() override {
    network_->SetFaults(nullptr);
    network_->ReleaseDelayed();
    decode_->reserve_gate.Open();
    decode_->done_gate.Open();
    PrefillFixture::TearDown();
  }
  // The first block's bytes stay on the wire; the gate says when it was offered.
  void DelayBlocks() {
    network_->SetFaults([this](const kv_transfer::MessageHeader&) {
      offered_.Pass();
      return LoopbackFault::kDelay;
    });
  }
  // Lets delayed bytes land until `done` is ready: a block may be offered after a release.
  template <typename T>
  T ReleaseUntil(std::future<T> done) {
    network_->SetFaults(nullptr);
    do {
      network_->ReleaseDelayed();
    } while (done.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready);
    return done.get();
  }
  std::unique_ptr<FakeDecodeWorker> decode_;
  Gate offered_;
};

TEST_F(PrefillFailuresTest, BlocksAreHeldWhenThereIsNoRoomAndPushedElsewhere) {
  const std::vector<uint32_t> tokens = Tokens(300, 1);
  decode_->refuse = true;
  auto other = NewDecode();
  PrefillCall call(stub_.get(), Request("a", tokens, *decode_));
  const PrefillEvent held = call.Until(PrefillEvent::kHeld);
  EXPECT_EQ(held.held().lease_ms(), 30'000u);
  EXPECT_THAT(held.held().cause(), testing::HasSubstr("no room here"));
  EXPECT_TRUE(RenewLease("a", 1).ok());
  EXPECT_EQ(RenewLease("a", 2).code(), absl::StatusCode::kNotFound);

  // Still no room: held again, under the same lease.
  EXPECT_EQ(PushHeld("a", 1, 2, *decode_).code(), absl::StatusCode::kResourceExhausted);
  const absl::Status stale = PushHeld("a", 1, 2, *other);
  EXPECT_EQ(status::Reason(stale), status::kStaleAttempt) << stale;

  ferry::v1::PrefillDone done;
  const absl::Status pushed = PushHeld("a", 1, 3, *other, &done);
  ASSERT_TRUE(pushed.ok()) << pushed;
  EXPECT_EQ(done.kv_blocks(), 5u);
  EXPECT_EQ(call.Next().event_case(), PrefillEvent::kDone);
  EXPECT_TRUE(call.Finish().ok());
  LocalEngine local(*engine::Engine::Create(TestOptions().worker.engine));
  engine::SamplingOptions greedy;
  greedy.temperature = 0;
  const auto truth = local.Compute(tokens, greedy);
  ExpectSameRows(local.layout(), truth, *other->received("a", 3));
  EXPECT_EQ(other->received("a", 3)->done.first_tokens(0).token_id(),
            static_cast<uint32_t>(truth.sample.token_id));
  EXPECT_EQ(PushHeld("a", 1, 4, *other).code(), absl::StatusCode::kNotFound);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, ADeadPlaceForHeldBlocksLeavesThemHeld) {
  decode_->refuse = true;
  PrefillCall call(stub_.get(), Request("a", Tokens(150, 1), *decode_));
  call.Until(PrefillEvent::kHeld);
  auto dead = NewDecode();
  dead->StopServer();
  EXPECT_EQ(PushHeld("a", 1, 2, *dead).code(), absl::StatusCode::kUnavailable);
  decode_->refuse = false;
  EXPECT_TRUE(PushHeld("a", 1, 3, *decode_).ok());
  EXPECT_TRUE(call.Finish().ok());
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFixture, AnUnrenewedLeaseEnds) {
  PrefillOptions options = TestOptions();
  options.worker.kv_lease = absl::Milliseconds(50);
  StartWorker(options);
  auto decode = NewDecode();
  decode->refuse = true;
  PrefillCall call(stub_.get(), Request("a", Tokens(100, 1), *decode));
  call.Until(PrefillEvent::kHeld);
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("lease"));
  EXPECT_EQ(PushHeld("a", 1, 2, *decode).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(RenewLease("a", 1).code(), absl::StatusCode::kNotFound);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, ACancelledPushLeavesTheBlocksHeld) {
  decode_->refuse = true;
  PrefillCall call(stub_.get(), Request("a", Tokens(150, 1), *decode_));
  call.Until(PrefillEvent::kHeld);
  auto other = NewDecode();
  other->done_gate.Close();
  grpc::ClientContext context;
  auto push = std::async(std::launch::async, [&] {
    ferry::v1::PushHeldRequest request;
    request.set_request_id("a");
    request.set_attempt_held(1);
    request.set_attempt(2);
    request.set_worker_epoch(runtime_->epoch.ToBytes());
    request.mutable_decode()->set_address(other->address());
    request.mutable_decode()->set_epoch(other->epoch.ToBytes());
    ferry::v1::PushHeldResponse response;
    return stub_->PushHeld(&context, request, &response).error_code();
  });
  other->done_gate.WaitForArrivals(1);
  EXPECT_EQ(PushHeld("a", 1, 2, *other).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(PushHeld("a", 1, 3, *other).code(), absl::StatusCode::kAlreadyExists);
  context.TryCancel();
  EXPECT_EQ(push.get(), grpc::StatusCode::CANCELLED);
  decode_->refuse = false;
  // The cancellation and the next push take the same way: the first is done when the second comes.
  absl::Status again;
  for (uint32_t attempt = 3; attempt < 100; ++attempt) {
    again = PushHeld("a", 1, attempt, *decode_);
    if (again.code() != absl::StatusCode::kAlreadyExists) break;
  }
  EXPECT_TRUE(again.ok()) << again;
  EXPECT_TRUE(call.Finish().ok());
  other->done_gate.Open();
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, CancelWhileReservingGivesTheReservationBack) {
  decode_->reserve_gate.Close();
  PrefillCall call(stub_.get(), Request("a", Tokens(300, 1), *decode_));
  decode_->reserve_gate.WaitForArrivals(1);
  EXPECT_TRUE(CancelRpc("a", 1));
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("test"));
  decode_->reserve_gate.Open();
  ExpectEverythingGivenBack();
  EXPECT_FALSE(CancelRpc("a", 1));
  scheduler_->EndAll();
}

TEST_F(PrefillFailuresTest, CancelWhileBytesAreOnTheWireWaitsForThem) {
  DelayBlocks();
  PrefillCall call(stub_.get(), Request("a", Tokens(300, 1), *decode_));
  offered_.WaitForArrivals(1);
  EXPECT_TRUE(CancelRpc("a", 1));
  EXPECT_EQ(ReleaseUntil(std::async(std::launch::async, [&] { return call.Finish(); })).code(),
            absl::StatusCode::kCancelled);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, CancelWhileConfirming) {
  decode_->done_gate.Close();
  PrefillCall call(stub_.get(), Request("a", Tokens(300, 1), *decode_));
  decode_->done_gate.WaitForArrivals(1);
  EXPECT_TRUE(CancelRpc("a", 1));
  EXPECT_EQ(call.Finish().code(), absl::StatusCode::kCancelled);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, CancelWhileHeldAndABrokenStreamWhileHeld) {
  decode_->refuse = true;
  PrefillCall cancelled(stub_.get(), Request("a", Tokens(300, 1), *decode_));
  PrefillCall broken(stub_.get(), Request("b", Tokens(300, 2), *decode_));
  cancelled.Until(PrefillEvent::kHeld);
  broken.Until(PrefillEvent::kHeld);
  EXPECT_TRUE(CancelRpc("a", 1));
  EXPECT_EQ(cancelled.Finish().code(), absl::StatusCode::kCancelled);
  broken.Cancel();
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, CancelWhileWaitingForBlocksAndWhileComputing) {
  // The first takes 30 of 40 blocks and keeps them; the second does not fit beside it.
  decode_->done_gate.Close();
  PrefillCall first(stub_.get(), Request("a", Tokens(1900, 1), *decode_));
  first.Until(PrefillEvent::kStarted);
  PrefillCall second(stub_.get(), Request("b", Tokens(1800, 2), *decode_));
  EXPECT_EQ(second.Next().event_case(), PrefillEvent::kAccepted);
  EXPECT_TRUE(CancelRpc("b", 1));
  EXPECT_EQ(second.Finish().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(CancelRpc("a", 1));
  EXPECT_EQ(first.Finish().code(), absl::StatusCode::kCancelled);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, AFullPoolDelaysAndDoesNotFail) {
  decode_->done_gate.Close();
  PrefillCall first(stub_.get(), Request("a", Tokens(1900, 1), *decode_));
  first.Until(PrefillEvent::kStarted);
  PrefillCall second(stub_.get(), Request("b", Tokens(1800, 2), *decode_));
  EXPECT_EQ(second.Next().event_case(), PrefillEvent::kAccepted);
  decode_->done_gate.WaitForArrivals(1);
  WaitForLoad([](const ferry::v1::LoadReport& load) {
    return load.waiting_requests() == 1 && load.kv_blocks().held() == 30;
  });
  decode_->done_gate.Open();
  EXPECT_TRUE(first.Finish().ok());
  EXPECT_TRUE(second.Finish().ok());
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, ABrokenStreamCancels) {
  decode_->reserve_gate.Close();
  PrefillCall call(stub_.get(), Request("a", Tokens(300, 1), *decode_));
  decode_->reserve_gate.WaitForArrivals(1);
  call.Cancel();
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, ARequestThatRunsOutOfTimeEnds) {
  decode_->done_gate.Close();
  ferry::v1::PrefillRequest request = Request("a", Tokens(100, 1), *decode_);
  request.mutable_spec()->set_deadline_ms(200);
  EXPECT_EQ(PrefillCall(stub_.get(), request).Finish().code(), absl::StatusCode::kDeadlineExceeded);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, DuplicatesAndOldAttemptsAreNamed) {
  decode_->done_gate.Close();
  PrefillCall second(stub_.get(), Request("a", Tokens(100, 1), *decode_, /*attempt=*/2));
  second.Until(PrefillEvent::kStarted);
  EXPECT_EQ(PrefillCall(stub_.get(), Request("a", Tokens(100, 1), *decode_, 2)).Finish().code(),
            absl::StatusCode::kAlreadyExists);
  absl::Status status =
      PrefillCall(stub_.get(), Request("a", Tokens(100, 1), *decode_, 1)).Finish();
  EXPECT_EQ(status::Reason(status), status::kStaleAttempt) << status;

  // A newer attempt takes the older one's place.
  decode_->done_gate.WaitForArrivals(1);
  PrefillCall third(stub_.get(), Request("a", Tokens(100, 1), *decode_, 3));
  status = second.Finish();
  EXPECT_EQ(status::Reason(status), status::kStaleAttempt) << status;
  decode_->done_gate.Open();
  EXPECT_TRUE(third.Finish().ok());
  EXPECT_EQ(PrefillCall(stub_.get(), Request("a", Tokens(100, 1), *decode_, 3)).Finish().code(),
            absl::StatusCode::kAlreadyExists);
  status = PrefillCall(stub_.get(), Request("a", Tokens(100, 1), *decode_, 1)).Finish();
  EXPECT_EQ(status::Reason(status), status::kStaleAttempt) << status;
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, ADecodeWorkerThatIsGoneIsUnavailable) {
  decode_->StopServer();
  PrefillCall call(stub_.get(), Request("a", Tokens(100, 1), *decode_));
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr(decode_->address()));
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, ADecodeWorkerThatDiesInMidTransferAborts) {
  DelayBlocks();
  PrefillCall call(stub_.get(), Request("a", Tokens(300, 1), *decode_));
  offered_.WaitForArrivals(1);
  network_->Kill(decode_->epoch);
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  ExpectEverythingGivenBack();
}

class LosingPeerTest : public PrefillFixture {
 protected:
  std::unique_ptr<kv_transfer::Transport> NewTransport() override {
    auto transport = std::make_unique<LosingTransport>(PrefillFixture::NewTransport());
    losing_ = transport.get();
    return transport;
  }
  LosingTransport* losing_ = nullptr;
};

TEST_F(LosingPeerTest, ALossWhileTheReservationIsTakenDoesNotDeadlock) {
  StartWorker(TestOptions());
  auto decode = NewDecode();
  Prefill(Request("warm", Tokens(10, 7), *decode));  // makes the link, and asks for its name
  decode->reserve_gate.Close();
  PrefillCall call(stub_.get(), Request("a", Tokens(100, 1), *decode));
  decode->reserve_gate.WaitForArrivals(2);
  losing_->Arm();
  decode->reserve_gate.Open();
  const absl::Status status = call.Finish();
  EXPECT_TRUE(losing_->loss_was_taken());
  // The bytes still find their way: only the news was made up.
  EXPECT_TRUE(status.ok()) << status;
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFixture, ASuspendedDecodeWorkerIsFenced) {
  PrefillOptions options = TestOptions();
  options.worker.chunk_stall = absl::Milliseconds(200);
  StartWorker(options);
  auto decode = NewDecode();
  Prefill(Request("warm", Tokens(10, 7), *decode));
  network_->Suspend(decode->epoch);
  PrefillCall call(stub_.get(), Request("a", Tokens(300, 1), *decode));
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("no send has completed"));
  network_->Resume(decode->epoch);
  EXPECT_GE(runtime_->transport->stats().fences, 1u);
  // The link is made anew for the next request.
  Prefill(Request("b", Tokens(200, 2), *decode));
  EXPECT_EQ(decode->handshakes, 2);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFixture, ASlowWorkerKeepsItsReservation) {
  constexpr absl::Duration kPatience = absl::Milliseconds(800);
  PrefillOptions options = TestOptions();
  options.worker.chunk_stall = kPatience;
  StartWorker(options);
  auto decode = NewDecode(/*stall=*/kPatience);
  SendSpec spec;
  spec.id = {.request_id = "slow", .attempt = 1};
  spec.destination = {.address = decode->address(), .epoch = decode->epoch};
  spec.num_tokens = kBlockSize;
  spec.blocks.push_back(runtime_->block(1));
  std::promise<SendResult> promise;
  std::future<SendResult> result = promise.get_future();
  const auto send =
      sender_->Start(spec, [&](SendResult ended) { promise.set_value(std::move(ended)); });
  // Its chunk takes three times what the decode worker waits for a silent one.
  ASSERT_EQ(result.wait_for(absl::ToChronoMilliseconds(3 * kPatience)), std::future_status::timeout)
      << result.get().status;
  send->Complete({FirstToken{}});
  EXPECT_TRUE(result.get().status.ok());
}

TEST_F(PrefillFailuresTest, TheDecodeWorkerMayStopATransfer) {
  DelayBlocks();
  PrefillCall call(stub_.get(), Request("a", Tokens(300, 1), *decode_));
  offered_.WaitForArrivals(1);
  ASSERT_EQ(decode_->peer_address, absl::StrCat("127.0.0.1:", server_->port()));
  const auto abort = [&](const kv_transfer::Epoch& caller, const std::string& transfer_id) {
    grpc::ClientContext context;
    ferry::v1::AbortTransferRequest request;
    request.mutable_key()->set_request_id("a");
    request.mutable_key()->set_attempt(1);
    request.set_caller_epoch(caller.ToBytes());
    request.set_transfer_id(transfer_id);
    request.set_cause("changed my mind");
    ferry::v1::AbortTransferResponse response;
    EXPECT_TRUE(transfer_stub_->AbortTransfer(&context, request, &response).ok());
    return response.writer_state();
  };
  // Nothing goes to a stranger, nor under another transfer: there is nothing to stop.
  EXPECT_EQ(abort(kv_transfer::Epoch::Random(), ""), ferry::v1::WRITER_STATE_NEVER_STARTED);
  EXPECT_EQ(abort(decode_->epoch, std::string(16, 'x')), ferry::v1::WRITER_STATE_NEVER_STARTED);
  auto aborted = std::async(std::launch::async, abort, decode_->epoch, "");
  // It has come, before anything lands.
  WaitForLoad([](const auto& load) { return load.kv_blocks().quarantined() > 0; });
  EXPECT_EQ(ReleaseUntil(std::move(aborted)), ferry::v1::WRITER_STATE_DRAINED);
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("changed my mind"));

  grpc::ClientContext context;
  ferry::v1::AbortTransferRequest unknown;
  unknown.mutable_key()->set_request_id("nobody");
  ferry::v1::AbortTransferResponse response;
  ASSERT_TRUE(transfer_stub_->AbortTransfer(&context, unknown, &response).ok());
  EXPECT_EQ(response.writer_state(), ferry::v1::WRITER_STATE_NEVER_STARTED);
  grpc::ClientContext other_context;
  ferry::v1::ReserveResponse reserved;
  EXPECT_EQ(transfer_stub_->Reserve(&other_context, {}, &reserved).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, DroppedBytesAreNeverConfirmed) {
  auto strict = NewDecode(/*stall=*/absl::Milliseconds(200));
  network_->SetFaults([](const kv_transfer::MessageHeader& header) {
    return header.index == 1 ? LoopbackFault::kDrop : LoopbackFault::kNone;
  });
  EXPECT_EQ(PrefillCall(stub_.get(), Request("a", Tokens(300, 1), *strict)).Finish().code(),
            absl::StatusCode::kAborted);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, RefusalsOfTheDecodeWorkerKeepTheirReason) {
  decode_->reserve_status = status::WithReason(absl::FailedPreconditionError("attempt 2 is known"),
                                               status::kStaleAttempt);
  absl::Status status = PrefillCall(stub_.get(), Request("a", Tokens(9, 1), *decode_)).Finish();
  EXPECT_EQ(status::Reason(status), status::kStaleAttempt) << status;
  decode_->reserve_status = absl::NotFoundError("no decode is open");
  status = PrefillCall(stub_.get(), Request("b", Tokens(9, 1), *decode_)).Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  decode_->reserve_status = absl::OkStatus();
  decode_->wrong_blocks = 1;
  status = PrefillCall(stub_.get(), Request("c", Tokens(9, 1), *decode_)).Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("reservation of 2 blocks"));

  auto incompatible = NewDecode();
  incompatible->handshake_status = status::WithReason(
      absl::FailedPreconditionError("cache layouts differ: block_size"), status::kIncompatible);
  for (const char* id : {"d", "e"}) {
    status = PrefillCall(stub_.get(), Request(id, Tokens(9, 1), *incompatible)).Finish();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(status::Reason(status), status::kIncompatible);
  }
  EXPECT_EQ(incompatible->handshakes, 1);  // what cannot be mended is not asked again
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, ADrainingWorkerFinishesAndRefuses) {
  decode_->refuse = true;
  PrefillCall held(stub_.get(), Request("a", Tokens(100, 1), *decode_));
  held.Until(PrefillEvent::kHeld);
  scheduler_->StartDrain();
  const absl::Status refused =
      PrefillCall(stub_.get(), Request("b", Tokens(10, 1), *decode_)).Finish();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status::Reason(refused), status::kDraining);
  grpc::ClientContext context;
  ferry::v1::DrainRequest request;
  request.set_limit_ms(50);
  ferry::v1::DrainResponse response;
  ASSERT_TRUE(worker_stub_->Drain(&context, request, &response).ok());
  EXPECT_EQ(response.remaining_requests(), 0u);
  EXPECT_EQ(response.remaining_held_blocks(), 2u);
  decode_->refuse = false;
  EXPECT_TRUE(PushHeld("a", 1, 2, *decode_).ok());
  EXPECT_TRUE(held.Finish().ok());
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFailuresTest, EndAllEndsWhatIsLeft) {
  decode_->refuse = true;
  PrefillCall held(stub_.get(), Request("a", Tokens(100, 1), *decode_));
  held.Until(PrefillEvent::kHeld);
  scheduler_->EndAll();
  const absl::Status status = held.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status::Reason(status), status::kDraining);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillFixture, AFullQueueIsResourceExhausted) {
  PrefillOptions options = TestOptions();
  options.worker.max_waiting = 1;
  StartWorker(options);
  auto decode = NewDecode();
  decode->done_gate.Close();
  PrefillCall first(stub_.get(), Request("a", Tokens(1900, 1), *decode));
  decode->done_gate.WaitForArrivals(1);
  PrefillCall second(stub_.get(), Request("b", Tokens(1900, 2), *decode));
  EXPECT_EQ(second.Next().event_case(), PrefillEvent::kAccepted);
  const absl::Status third = PrefillCall(stub_.get(), Request("c", Tokens(1, 3), *decode)).Finish();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status::Reason(third), status::kQueueFull);
  decode->done_gate.Open();
  EXPECT_TRUE(first.Finish().ok());
  EXPECT_TRUE(second.Finish().ok());
  ExpectEverythingGivenBack();
}

}  // namespace
}  // namespace prefill_worker
