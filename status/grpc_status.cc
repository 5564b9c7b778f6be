#include "status/grpc_status.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ferry/v1/error.pb.h"

namespace status {
namespace {

constexpr char kErrorInfoType[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kRetryInfoType[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr char kDomain[] = "ferry";

void AddDetail(const char* type, const google::protobuf::Message& message,
               ferry::v1::RpcStatus* to) {
  auto* any = to->add_details();
  any->set_type_url(type);
  any->set_value(message.SerializeAsString());
}

}  // namespace

absl::Status WithReason(absl::Status status, std::string_view reason) {
  status.SetPayload(kReasonUrl, absl::Cord(std::string(reason)));
  return status;
}

std::string Reason(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : "";
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration delay) {
  const int64_t ms = absl::ToInt64Milliseconds(absl::Ceil(delay, absl::Milliseconds(1)));
  status.SetPayload(kRetryAfterUrl, absl::Cord(absl::StrCat(ms)));
  return status;
}

absl::Duration RetryAfter(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryAfterUrl);
  int64_t ms = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &ms)) {
    return absl::ZeroDuration();
  }
  return absl::Milliseconds(ms);
}

std::string CodeName(absl::StatusCode code) {
  return absl::AsciiStrToLower(absl::StatusCodeToString(code));
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.raw_code());
  const std::string message(status.message());
  const std::string reason = Reason(status);
  const absl::Duration retry_after = RetryAfter(status);
  if (reason.empty() && retry_after == absl::ZeroDuration()) return grpc::Status(code, message);
  ferry::v1::RpcStatus rpc_status;
  rpc_status.set_code(status.raw_code());
  rpc_status.set_message(message);
  if (!reason.empty()) {
    ferry::v1::ErrorInfo info;
    info.set_reason(reason);
    info.set_domain(kDomain);
    AddDetail(kErrorInfoType, info, &rpc_status);
  }
  if (retry_after > absl::ZeroDuration()) {
    ferry::v1::RetryInfo info;
    absl::Duration below_a_second;
    info.mutable_retry_delay()->set_seconds(
        absl::IDivDuration(retry_after, absl::Seconds(1), &below_a_second));
    info.mutable_retry_delay()->set_nanos(
        static_cast<int32_t>(absl::ToInt64Nanoseconds(below_a_second)));
    AddDetail(kRetryInfoType, info, &rpc_status);
  }
  return grpc::Status(code, message, rpc_status.SerializeAsString());
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  if (result.message().empty()) result = absl::Status(result.code(), CodeName(result.code()));
  ferry::v1::RpcStatus rpc_status;
  if (!rpc_status.ParseFromString(status.error_details())) return result;
  for (const auto& any : rpc_status.details()) {
    ferry::v1::ErrorInfo error;
    if (any.type_url() == kErrorInfoType && error.ParseFromString(any.value()) &&
        !error.reason().empty()) {
      result = WithReason(std::move(result), error.reason());
    }
    ferry::v1::RetryInfo retry;
    if (any.type_url() == kRetryInfoType && retry.ParseFromString(any.value())) {
      const absl::Duration delay = absl::Seconds(retry.retry_delay().seconds()) +
                                   absl::Nanoseconds(retry.retry_delay().nanos());
      if (delay > absl::ZeroDuration()) result = WithRetryAfter(std::move(result), delay);
    }
  }
  return result;
}

}  // namespace status
