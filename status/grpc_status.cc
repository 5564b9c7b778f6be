#include "status/grpc_status.h"

#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "ferry/v1/error.pb.h"

namespace status {
namespace {

constexpr char kErrorInfoType[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kDomain[] = "ferry";

std::string ReasonFromDetails(const std::string& details) {
  ferry::v1::RpcStatus rpc_status;
  if (details.empty() || !rpc_status.ParseFromString(details)) return "";
  for (const auto& any : rpc_status.details()) {
    ferry::v1::ErrorInfo info;
    if (any.type_url() == kErrorInfoType && info.ParseFromString(any.value())) return info.reason();
  }
  return "";
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

std::string CodeName(absl::StatusCode code) {
  return absl::AsciiStrToLower(absl::StatusCodeToString(code));
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.raw_code());
  const std::string message(status.message());
  const std::string reason = Reason(status);
  if (reason.empty()) return grpc::Status(code, message);
  ferry::v1::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(kDomain);
  ferry::v1::RpcStatus rpc_status;
  rpc_status.set_code(status.raw_code());
  rpc_status.set_message(message);
  auto* any = rpc_status.add_details();
  any->set_type_url(kErrorInfoType);
  any->set_value(info.SerializeAsString());
  return grpc::Status(code, message, rpc_status.SerializeAsString());
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  const std::string reason = ReasonFromDetails(status.error_details());
  return reason.empty() ? result : WithReason(std::move(result), reason);
}

}  // namespace status
