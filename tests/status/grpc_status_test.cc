#include "status/grpc_status.h"

#include "gtest/gtest.h"

namespace status {
namespace {

TEST(GrpcStatusTest, EveryCodeSurvivesBothWays) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status before(static_cast<absl::StatusCode>(code), "need 12 blocks, 3 free");
    const absl::Status after = FromGrpc(ToGrpc(before));
    EXPECT_EQ(after.code(), before.code());
    EXPECT_EQ(after.message(), before.message());
    EXPECT_EQ(Reason(after), "");
  }
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(GrpcStatusTest, TheReasonTravels) {
  const absl::Status before =
      WithReason(absl::FailedPreconditionError("epoch 12 is not mine"), kStaleEpoch);
  EXPECT_EQ(Reason(FromGrpc(ToGrpc(before))), kStaleEpoch);
}

TEST(GrpcStatusTest, UnreadableDetailsAreNoReason) {
  const grpc::Status foreign(grpc::StatusCode::ABORTED, "x", std::string("\xff\xff\xff", 3));
  EXPECT_EQ(Reason(FromGrpc(foreign)), "");
}

}  // namespace
}  // namespace status
