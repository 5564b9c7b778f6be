// A process of its own: what is tested is what happens when no other channel or server is left.

#include <gtest/gtest.h>

#include <future>

#include "ferry/v1/worker.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "service/client_call.h"
#include "service/grpc_server.h"

namespace service {
namespace {

using ferry::v1::GetInfoRequest;
using ferry::v1::Worker;
using ferry::v1::WorkerInfo;

TEST(LastChannelTest, MayBeReleasedByACallback) {
  for (int i = 0; i < 3; ++i) {
    std::shared_ptr<Worker::Stub> stub = Worker::NewStub(MakeChannel("127.0.0.1:1", {}));
    auto* const async = stub->async();
    std::promise<absl::Status> ended;
    CallTracker calls;
    calls.Start<Worker::Stub::async_interface, GetInfoRequest, WorkerInfo>(
        async, &Worker::Stub::async_interface::GetInfo, {}, absl::Seconds(10),
        [stub = std::move(stub), &ended](absl::StatusOr<WorkerInfo> info) {
          ended.set_value(info.status());
        });
    EXPECT_EQ(ended.get_future().get().code(), absl::StatusCode::kUnavailable);
  }
}

}  // namespace
}  // namespace service
