#include "worker/worker_service.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <string>

#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "service/grpc_server.h"

namespace worker {
namespace {

using ferry::v1::KvEventFrame;

class FakeControl final : public WorkerControl {
 public:
  void FillInfo(ferry::v1::WorkerInfo* info) const override { info->set_model("m"); }
  void FillLoad(ferry::v1::LoadReport* report) const override {
    report->set_waiting_requests(waiting);
    report->set_state(draining ? ferry::v1::WORKER_STATE_DRAINING
                               : ferry::v1::WORKER_STATE_SERVING);
  }
  bool Cancel(const RequestId& id, const std::string&) override { return id.attempt == 7; }
  void StartDrain() override { draining = true; }
  Remaining remaining() const override { return {running, held}; }

  std::atomic<uint32_t> waiting{0};
  std::atomic<int32_t> running{0};
  std::atomic<int32_t> held{0};
  std::atomic<bool> draining{false};
};

engine::BlockEvent Stored(uint32_t n) {
  engine::BlockEvent event{.stored = true, .hash = {}, .parent = {}};
  for (int i = 0; i < 4; ++i) event.hash.bytes[i] = static_cast<uint8_t>(n >> (8 * i));
  return event;
}

class WorkerServiceTest : public testing::Test {
 protected:
  void SetUp() override {
    auto server = service::GrpcServer::Start("127.0.0.1:0", {}, {service_->grpc_service()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
    stub_ = ferry::v1::Worker::NewStub(
        service::MakeChannel("127.0.0.1:" + std::to_string(server_->port()), {}));
  }

  std::unique_ptr<grpc::ClientReader<KvEventFrame>> Watch(grpc::ClientContext* context,
                                                          const std::string& epoch, uint64_t seq) {
    ferry::v1::WatchKvEventsRequest request;
    request.set_epoch(epoch);
    request.set_from_seq(seq);
    return stub_->WatchKvEvents(context, request);
  }

  FakeControl control_;
  KvEventLog log_{/*ring_frames=*/4};
  std::unique_ptr<WorkerService> service_ =
      CreateWorkerService(&control_, &log_, "epoch-0123456789");
  std::unique_ptr<service::GrpcServer> server_;
  std::unique_ptr<ferry::v1::Worker::Stub> stub_;
};

TEST_F(WorkerServiceTest, GetInfoAndCancelAskTheControl) {
  grpc::ClientContext info_context, cancel_context;
  ferry::v1::WorkerInfo info;
  ASSERT_TRUE(stub_->GetInfo(&info_context, {}, &info).ok());
  EXPECT_EQ(info.model(), "m");
  ferry::v1::CancelRequest request;
  request.mutable_key()->set_attempt(7);
  ferry::v1::CancelResponse response;
  ASSERT_TRUE(stub_->Cancel(&cancel_context, request, &response).ok());
  EXPECT_TRUE(response.found());
}

TEST_F(WorkerServiceTest, LoadComesAtOnceThenByTheClockAndAtChanges) {
  grpc::ClientContext context;
  ferry::v1::WatchLoadRequest request;
  request.set_interval_ms(3'600'000);
  auto reader = stub_->WatchLoad(&context, request);
  ferry::v1::LoadReport report;
  ASSERT_TRUE(reader->Read(&report));
  EXPECT_EQ(report.seq(), 1u);
  control_.waiting = 5;
  control_.draining = true;
  service_->NotifyLoadChanged();
  ASSERT_TRUE(reader->Read(&report));
  EXPECT_EQ(report.waiting_requests(), 5u);
  EXPECT_EQ(report.state(), ferry::v1::WORKER_STATE_DRAINING);

  grpc::ClientContext fast_context;
  request.set_interval_ms(10);
  auto fast = stub_->WatchLoad(&fast_context, request);
  for (uint64_t seq = 1; seq <= 5; ++seq) {
    ASSERT_TRUE(fast->Read(&report));
    EXPECT_EQ(report.seq(), seq);
  }
  fast_context.TryCancel();
  EXPECT_EQ(fast->Finish().error_code(), grpc::StatusCode::CANCELLED);
  control_.waiting = 6;
  service_->Stop();
  ASSERT_TRUE(reader->Read(&report));
  EXPECT_EQ(report.waiting_requests(), 6u);  // the last word
  EXPECT_FALSE(reader->Read(&report));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(WorkerServiceTest, EventsAreReplayedThenLiveThenHeartbeats) {
  log_.Append({Stored(1)});
  log_.Append({Stored(2)});
  grpc::ClientContext context;
  auto reader = Watch(&context, "epoch-0123456789", 2);
  KvEventFrame frame;
  ASSERT_TRUE(reader->Read(&frame));
  EXPECT_EQ(frame.seq(), 2u);
  EXPECT_EQ(frame.epoch(), "epoch-0123456789");
  EXPECT_FALSE(frame.snapshot());
  log_.Append({Stored(3)});
  ASSERT_TRUE(reader->Read(&frame));
  EXPECT_EQ(frame.seq(), 3u);
  ASSERT_EQ(frame.events_size(), 1);
  EXPECT_EQ(frame.events(0).stored().hash().size(), 16u);
  ASSERT_TRUE(reader->Read(&frame));
  EXPECT_TRUE(frame.heartbeat());
  EXPECT_EQ(frame.seq(), 3u);
}

TEST_F(WorkerServiceTest, AnotherEpochIsToldFromTheStartAndOldNumbersGetASnapshot) {
  for (uint32_t n = 1; n <= 3; ++n) log_.Append({Stored(n)});
  KvEventFrame frame;
  grpc::ClientContext other_context;
  auto other = Watch(&other_context, "an epoch of old ", 3);
  ASSERT_TRUE(other->Read(&frame));
  EXPECT_EQ(frame.seq(), 1u);

  for (uint32_t n = 4; n <= 9; ++n) log_.Append({Stored(n)});
  grpc::ClientContext context;
  auto reader = Watch(&context, "epoch-0123456789", 2);
  ASSERT_TRUE(reader->Read(&frame));
  EXPECT_TRUE(frame.snapshot());
  EXPECT_TRUE(frame.snapshot_end());
  EXPECT_EQ(frame.seq(), 9u);
  EXPECT_EQ(frame.events_size(), 9);
}

TEST_F(WorkerServiceTest, ALargeSnapshotComesInSeveralMessagesOfOneNumber) {
  std::vector<engine::BlockEvent> events;
  for (uint32_t n = 1; n <= 20'000; ++n) events.push_back(Stored(n));
  log_.Append(events);
  for (uint32_t n = 1; n <= 4; ++n) log_.Append({Stored(20'000 + n)});
  grpc::ClientContext context;
  auto reader = Watch(&context, "", 0);
  KvEventFrame frame;
  int total = 0, messages = 0;
  do {
    ASSERT_TRUE(reader->Read(&frame));
    EXPECT_TRUE(frame.snapshot());
    EXPECT_EQ(frame.seq(), 5u);
    total += frame.events_size();
    ++messages;
  } while (!frame.snapshot_end());
  EXPECT_EQ(total, 20'004);
  EXPECT_EQ(messages, 313);
  log_.Append({Stored(1 << 20)});
  ASSERT_TRUE(reader->Read(&frame));
  EXPECT_EQ(frame.seq(), 6u);
  EXPECT_FALSE(frame.snapshot());
}

TEST_F(WorkerServiceTest, DrainAnswersWhenNothingIsLeft) {
  control_.running = 1;
  control_.held = 4;
  auto drained = std::async(std::launch::async, [&] {
    grpc::ClientContext context;
    ferry::v1::DrainResponse response;
    EXPECT_TRUE(stub_->Drain(&context, {}, &response).ok());
    return response;
  });
  // The load stream says when the drain has begun.
  grpc::ClientContext context;
  ferry::v1::WatchLoadRequest request;
  request.set_interval_ms(10);
  auto reader = stub_->WatchLoad(&context, request);
  ferry::v1::LoadReport report;
  while (report.state() != ferry::v1::WORKER_STATE_DRAINING) ASSERT_TRUE(reader->Read(&report));
  EXPECT_EQ(drained.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  control_.running = 0;
  EXPECT_EQ(drained.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  control_.held = 0;
  const ferry::v1::DrainResponse response = drained.get();
  EXPECT_EQ(response.remaining_requests(), 0u);
  EXPECT_EQ(response.remaining_held_blocks(), 0u);
}

TEST_F(WorkerServiceTest, DrainAnswersAtItsLimitWithWhatIsLeft) {
  control_.running = 3;
  control_.held = 8;
  grpc::ClientContext context;
  ferry::v1::DrainRequest request;
  request.set_limit_ms(30);
  ferry::v1::DrainResponse response;
  ASSERT_TRUE(stub_->Drain(&context, request, &response).ok());
  EXPECT_TRUE(control_.draining);
  EXPECT_EQ(response.remaining_requests(), 3u);
  EXPECT_EQ(response.remaining_held_blocks(), 8u);
}

}  // namespace
}  // namespace worker
