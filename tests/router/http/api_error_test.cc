#include "router/http/api_error.h"

#include <utility>

#include "gtest/gtest.h"
#include "router/http/json_body.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router::http {
namespace {

std::string RetryAfterOf(const absl::Status& status) {
  for (const auto& [name, value] : ErrorResponse(status).headers) {
    if (name == "retry-after") return value;
  }
  return "";
}

Json ErrorOf(const absl::Status& status) {
  return Json::parse(ErrorResponse(status).body)["error"];
}

TEST(ApiErrorTest, RetryAfterIsWhatTheRefusalSaysInWholeSeconds) {
  for (const absl::Status& status :
       {absl::ResourceExhaustedError("full"), absl::UnavailableError("away")}) {
    EXPECT_EQ(RetryAfterOf(status), "1") << "nothing is known";
    for (const auto& [delay, seconds] :
         {std::pair{absl::Milliseconds(100), "1"}, std::pair{absl::Seconds(1), "1"},
          std::pair{absl::Milliseconds(1001), "2"}, std::pair{absl::Milliseconds(59500), "60"}}) {
      EXPECT_EQ(RetryAfterOf(status::WithRetryAfter(status, delay)), seconds);
      EXPECT_EQ(RetryAfterOf(OfPrompt(3, status::WithRetryAfter(status, delay))), seconds);
    }
  }
  EXPECT_EQ(RetryAfterOf(absl::InternalError("broken")), "");
}

TEST(ApiErrorTest, ALogHasTheMemberAndNotItsValue) {
  const std::pair<const char*, const char*> cases[] = {
      {"temperature is \"secret\": must be a number", "the body cannot be served: temperature"},
      {"messages[0].role is \"secret\"", "the body cannot be served: messages[0].role"},
      {"A secret is 1: there is no such member of a request", "the body cannot be served"},
      {"the body is not JSON: last read: 'secret'", "the body cannot be served"}};
  for (const auto& [message, logged] : cases) {
    EXPECT_EQ(ForLog(absl::InvalidArgumentError(message)), absl::InvalidArgumentError(logged));
  }
  const absl::Status other = absl::ResourceExhaustedError("3 long texts wait to be read");
  EXPECT_EQ(ForLog(other), other);
}

TEST(ApiErrorTest, OneOfSeveralPromptsIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"prompt has 9 tokens: the context is 8", "prompt[2] has 9 tokens: the context is 8"},
      {"prompt text is empty", "prompt[2] text is empty"},
      {"prompt tokens.ids[1] is 300: must be less", "prompt[2][1] is 300: must be less"},
      {"sampling.max_tokens is 8: with a prompt of 9",
       "prompt[2]: max_tokens is 8: with a prompt of 9"},
      {"prompts are not liked", "prompt[2]: prompts are not liked"}};
  for (const auto& [message, named] : cases) {
    const Json error = ErrorOf(OfPrompt(2, absl::InvalidArgumentError(message)));
    EXPECT_EQ(error["message"], named);
    EXPECT_EQ(error["param"],
              std::string_view(named).starts_with("prompt[2][1]") ? "prompt[2][1]" : "prompt[2]");
  }
}

TEST(ApiErrorTest, WhatAllOfThemMeetIsNoOnesPrompt) {
  for (const char* const reason : {status::kQueueFull, status::kTenantLimit, status::kCallTooLarge,
                                   status::kDraining, status::kNoWorker}) {
    const absl::Status whole =
        status::WithReason(absl::ResourceExhaustedError("all of it"), reason);
    EXPECT_EQ(ErrorOf(OfPrompt(0, whole))["message"], "all of it") << reason;
  }
  const absl::Status late =
      status::WithReason(absl::ResourceExhaustedError("too late"), status::kDeadline);
  EXPECT_EQ(ErrorOf(OfPrompt(1, late))["message"], "prompt[1]: too late");
  EXPECT_EQ(status::Reason(OfPrompt(1, late)), status::kDeadline);
}

TEST(ApiErrorTest, OnlyWorkersThatDoNotFitEachOtherMakeAPreconditionAClientsToTryAgain) {
  const absl::Status failed = absl::FailedPreconditionError("no");
  EXPECT_EQ(HttpStatusOf(failed), 500);
  EXPECT_EQ(HttpStatusOf(status::WithReason(failed, status::kStaleEpoch)), 500);
  const absl::Status misfit = status::WithReason(failed, status::kIncompatible);
  EXPECT_EQ(HttpStatusOf(misfit), 503);
  EXPECT_EQ(RetryAfterOf(misfit), "1");
  EXPECT_EQ(HttpStatusOf(OfPrompt(2, misfit)), 503);
}

TEST(ApiErrorTest, ThePublicReadsWhatIsForIt) {
  const absl::Status status = status::WithPublicMessage(
      absl::UnavailableError("worker 10.0.0.5:8601 is gone"), "no worker could answer");
  EXPECT_EQ(ErrorOf(status)["message"], "no worker could answer");
  EXPECT_EQ(ErrorOf(OfPrompt(1, status))["message"], "prompt[1]: no worker could answer");
  EXPECT_EQ(ErrorEvent(status).find("10.0.0.5"), std::string::npos);
}

}  // namespace
}  // namespace router::http
