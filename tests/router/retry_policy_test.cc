#include "router/retry_policy.h"

#include "gtest/gtest.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router {
namespace {

int TriesUntilGivenUp(const absl::Status& error, int max_attempts, bool accepted = true) {
  FailureCounts failures;
  for (int tries = 1; tries < 100; ++tries) {
    if (!DecideRetry(error, accepted, max_attempts, &failures).retry) return tries;
  }
  return 100;
}

TEST(RetryPolicyTest, EveryCodeHasItsRule) {
  EXPECT_EQ(TriesUntilGivenUp(absl::UnavailableError(""), 3), 3);
  EXPECT_EQ(TriesUntilGivenUp(absl::UnavailableError(""), 1), 1);
  EXPECT_EQ(TriesUntilGivenUp(absl::FailedPreconditionError(""), 3), 3);
  EXPECT_EQ(TriesUntilGivenUp(absl::DataLossError(""), 3), 3);
  EXPECT_EQ(TriesUntilGivenUp(absl::InternalError(""), 3), 2) << "once more";
  EXPECT_EQ(TriesUntilGivenUp(absl::AbortedError(""), 3), 6) << "a fence hits innocents";
  EXPECT_EQ(TriesUntilGivenUp(absl::ResourceExhaustedError(""), 3), 100) << "full is not failed";
  EXPECT_EQ(TriesUntilGivenUp(absl::InvalidArgumentError(""), 3), 1);
  EXPECT_EQ(TriesUntilGivenUp(absl::DeadlineExceededError(""), 3), 1);
}

TEST(RetryPolicyTest, AWorkerThatHasNotHadTheRequestOrDrainsCostsNoTry) {
  EXPECT_EQ(TriesUntilGivenUp(absl::UnavailableError(""), 3, /*accepted=*/false), 100);
  EXPECT_EQ(TriesUntilGivenUp(absl::CancelledError(""), 3, /*accepted=*/false), 100);
  EXPECT_EQ(TriesUntilGivenUp(absl::InternalError(""), 3, /*accepted=*/false), 2);
  EXPECT_EQ(TriesUntilGivenUp(absl::InvalidArgumentError(""), 3, /*accepted=*/false), 1);
  for (const bool accepted : {false, true}) {
    EXPECT_EQ(TriesUntilGivenUp(status::WithReason(absl::UnavailableError(""), status::kDraining),
                                3, accepted),
              100);
    EXPECT_EQ(TriesUntilGivenUp(
                  status::WithReason(absl::FailedPreconditionError(""), status::kStaleEpoch), 3,
                  accepted),
              100);
  }
}

TEST(RetryPolicyTest, BackOffGrowsAndIsBounded) {
  FailureCounts failures;
  const auto first = DecideRetry(absl::ResourceExhaustedError(""), true, 3, &failures);
  const auto second = DecideRetry(absl::ResourceExhaustedError(""), true, 3, &failures);
  EXPECT_GT(second.same_worker_back_off, first.same_worker_back_off);
  for (int i = 0; i < 60; ++i) DecideRetry(absl::ResourceExhaustedError(""), true, 3, &failures);
  EXPECT_LE(DecideRetry(absl::ResourceExhaustedError(""), true, 3, &failures).same_worker_back_off,
            absl::Seconds(1));
}

TEST(RetryPolicyTest, TheClientIsToldTheContractsCodes) {
  EXPECT_EQ(FinalStatus(absl::AbortedError("x"), 6).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FinalStatus(absl::CancelledError("x"), 1).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FinalStatus(absl::DataLossError("x"), 3).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(FinalStatus(absl::PermissionDeniedError("x"), 1).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(FinalStatus(absl::UnavailableError("gone"), 3).message(),
            "gave up after 3 attempts: gone");
  EXPECT_EQ(status::Reason(FinalStatus(
                status::WithReason(absl::FailedPreconditionError("x"), status::kIncompatible), 2)),
            status::kIncompatible);
}

TEST(RetryPolicyTest, WhereItWentWrongIsNotForThePublic) {
  using absl::StatusCode;
  for (int code = 1; code <= 16; ++code) {
    const absl::Status error(static_cast<StatusCode>(code), "worker 10.0.0.5:8601: broken");
    const absl::Status told =
        FinalStatus(status::WithPublicMessage(error, "prompt has too many tokens"), 2);
    EXPECT_EQ(told.message(), "gave up after 2 attempts: worker 10.0.0.5:8601: broken");
    const bool of_the_request =
        error.code() == StatusCode::kInvalidArgument || error.code() == StatusCode::kOutOfRange;
    EXPECT_EQ(status::PublicMessage(told) == "gave up after 2 attempts: prompt has too many tokens",
              of_the_request)
        << told;
    EXPECT_EQ(status::PublicMessage(told).find("10.0.0.5"), std::string::npos) << told;
  }
}

TEST(RetryPolicyTest, AWorkerIsNotBlamedForWhatIsTheRequestsDoing) {
  using absl::StatusCode;
  for (const StatusCode code :
       {StatusCode::kInvalidArgument, StatusCode::kOutOfRange, StatusCode::kDeadlineExceeded,
        StatusCode::kResourceExhausted, StatusCode::kFailedPrecondition, StatusCode::kNotFound,
        StatusCode::kPermissionDenied, StatusCode::kUnauthenticated, StatusCode::kUnimplemented}) {
    EXPECT_FALSE(BlamesWorker(absl::Status(code, "x"))) << absl::StatusCodeToString(code);
  }
  for (const StatusCode code :
       {StatusCode::kUnavailable, StatusCode::kInternal, StatusCode::kAborted, StatusCode::kUnknown,
        StatusCode::kDataLoss}) {
    EXPECT_TRUE(BlamesWorker(absl::Status(code, "x"))) << absl::StatusCodeToString(code);
  }
  EXPECT_FALSE(
      BlamesWorker(status::WithReason(absl::UnavailableError("it drains"), status::kDraining)));
  EXPECT_FALSE(BlamesWorker(status::WithReason(absl::InternalError("NaN"), status::kBadLogits)));
}

}  // namespace
}  // namespace router
