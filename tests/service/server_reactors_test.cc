#include "service/server_reactors.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <latch>

#include "ferry/v1/inference.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "service/client_call.h"
#include "service/grpc_server.h"

namespace service {
namespace {

using ferry::v1::DetokenizeRequest;
using ferry::v1::DetokenizeResponse;
using ferry::v1::GenerateRequest;
using ferry::v1::GenerateResponse;
using ferry::v1::Inference;
using Stream = OutboundStream<GenerateResponse>;

// Hands every call's reactor to the test.
class Service final : public Inference::CallbackService {
 public:
  grpc::ServerWriteReactor<GenerateResponse>* Generate(grpc::CallbackServerContext*,
                                                       const GenerateRequest*) override {
    auto stream = Stream::Create([this] { broken.count_down(); });
    const std::lock_guard<std::mutex> lock(mutex_);
    stream_ = stream;
    changed_.notify_all();
    return stream.get();
  }
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext*, const DetokenizeRequest*,
                                       DetokenizeResponse* response) override {
    auto reply = DeferredReply::Create([this] { broken.count_down(); });
    const std::lock_guard<std::mutex> lock(mutex_);
    reply_ = reply;
    response_ = response;
    changed_.notify_all();
    return reply.get();
  }
  std::shared_ptr<Stream> stream() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return stream_ != nullptr; });
    return stream_;
  }
  std::shared_ptr<DeferredReply> reply() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reply_ != nullptr; });
    return reply_;
  }
  DetokenizeResponse* response() { return response_; }

  std::latch broken{1};

 private:
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<DeferredReply> reply_;
  DetokenizeResponse* response_ = nullptr;
};

class ServerReactorsTest : public testing::Test {
 protected:
  void SetUp() override {
    auto server = GrpcServer::Start("127.0.0.1:0", {}, {&service_});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
    stub_ = Inference::NewStub(
        MakeChannel("127.0.0.1:" + std::to_string(server_->port()), TlsOptions{}));
  }
  Service service_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<Inference::Stub> stub_;
};

TEST_F(ServerReactorsTest, MessagesArriveInOrderThenTheStatus) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, GenerateRequest());
  auto stream = service_.stream();
  for (int i = 0; i < 100; ++i) {
    GenerateResponse message;
    message.set_index(i);
    EXPECT_TRUE(stream->Push(message));
  }
  stream->End(grpc::Status(grpc::StatusCode::ABORTED, "over"));
  stream->End(grpc::Status::OK);
  EXPECT_FALSE(stream->Push({}));
  GenerateResponse message;
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(reader->Read(&message));
    EXPECT_EQ(message.index(), static_cast<uint32_t>(i));
  }
  EXPECT_FALSE(reader->Read(&message));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_FALSE(service_.broken.try_wait());
}

TEST_F(ServerReactorsTest, ACancelledStreamTellsItsOwnerOnce) {
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, GenerateRequest());
  auto stream = service_.stream();
  context.TryCancel();
  service_.broken.wait();
  EXPECT_TRUE(stream->broken());
  EXPECT_FALSE(stream->Push({}));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  stream->End(grpc::Status::CANCELLED);
}

TEST_F(ServerReactorsTest, AReplyMayComeFromAnotherThreadLater) {
  std::latch done(1);
  absl::StatusOr<DetokenizeResponse> got;
  StartUnaryCall<Inference::StubInterface::async_interface, DetokenizeRequest, DetokenizeResponse>(
      static_cast<Inference::StubInterface*>(stub_.get())->async(),
      &Inference::StubInterface::async_interface::Detokenize, DetokenizeRequest(),
      absl::Seconds(20), [&](absl::StatusOr<DetokenizeResponse> response) {
        got = std::move(response);
        done.count_down();
      });
  auto reply = service_.reply();
  EXPECT_FALSE(done.try_wait());
  reply->Reply(grpc::Status::OK, [&] { service_.response()->set_text("late"); });
  reply->Reply(grpc::Status::CANCELLED, [] { FAIL() << "the call has ended"; });
  done.wait();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->text(), "late");
}

TEST_F(ServerReactorsTest, ACancelledCallTellsItsOwner) {
  std::latch done(1);
  auto context = StartUnaryCall<Inference::StubInterface::async_interface, DetokenizeRequest,
                                DetokenizeResponse>(
      static_cast<Inference::StubInterface*>(stub_.get())->async(),
      &Inference::StubInterface::async_interface::Detokenize, DetokenizeRequest(),
      absl::InfiniteDuration(), [&](absl::StatusOr<DetokenizeResponse> response) {
        EXPECT_EQ(response.status().code(), absl::StatusCode::kCancelled);
        done.count_down();
      });
  auto reply = service_.reply();
  context->TryCancel();
  done.wait();
  service_.broken.wait();
  reply->Reply(grpc::Status::CANCELLED);
}

}  // namespace
}  // namespace service
