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

TEST(GrpcStatusTest, TheTimeToComeBackTravelsAlsoBesideAReason) {
  const absl::Status full = absl::ResourceExhaustedError("full");
  EXPECT_EQ(RetryAfter(full), absl::ZeroDuration());
  for (const absl::Duration delay :
       {absl::Milliseconds(1), absl::Milliseconds(2500), absl::Seconds(60)}) {
    const absl::Status alone = FromGrpc(ToGrpc(WithRetryAfter(full, delay)));
    EXPECT_EQ(RetryAfter(alone), delay);
    EXPECT_EQ(Reason(alone), "");
    const absl::Status both = FromGrpc(ToGrpc(WithReason(WithRetryAfter(full, delay), kQueueFull)));
    EXPECT_EQ(RetryAfter(both), delay);
    EXPECT_EQ(Reason(both), kQueueFull);
  }
  EXPECT_EQ(RetryAfter(WithRetryAfter(full, absl::Microseconds(1))), absl::Milliseconds(1));
}

TEST(GrpcStatusTest, WithoutATextTheCodeIsNamed) {
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, "")),
            absl::UnimplementedError("unimplemented"));
  EXPECT_EQ(FromGrpc(grpc::Status(static_cast<grpc::StatusCode>(77), "")).message(), "unknown");
}

TEST(GrpcStatusTest, UnreadableDetailsAreNoReason) {
  const grpc::Status foreign(grpc::StatusCode::ABORTED, "x", std::string("\xff\xff\xff", 3));
  EXPECT_EQ(Reason(FromGrpc(foreign)), "");
}

}  // namespace
}  // namespace status
