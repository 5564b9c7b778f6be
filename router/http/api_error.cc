#include "router/http/api_error.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "router/http/json_body.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router::http {
namespace {

constexpr absl::Duration kRetryAfter = absl::Seconds(1);  // where nothing is known

const char* TypeOf(int http_status) {
  switch (http_status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "service_unavailable_error";
    case 504:
      return "timeout_error";
    default:
      return http_status < 500 ? "invalid_request_error" : "server_error";
  }
}

Json CodeOf(int http_status, const std::string& message) {
  if (http_status == 401) return "invalid_api_key";
  if (http_status == 404 && absl::StartsWith(message, "model ")) return "model_not_found";
  if (http_status == 429) return "rate_limit_exceeded";
  return nullptr;
}

// "temperature is 3: must be ...": temperature.
Json ParamOf(int http_status, const std::string& message) {
  if (http_status == 404 && absl::StartsWith(message, "model ")) return "model";
  if (http_status != 400) return nullptr;
  const size_t end = message.find(' ');
  std::string first = message.substr(0, end);
  const bool is_place = absl::EndsWith(first, ":");  // "prompt[1]: max_tokens is ..."
  if (is_place) first.pop_back();
  if (first.empty() || end == std::string::npos ||
      first.find_first_not_of("abcdefghijklmnopqrstuvwxyz_[].0123456789") != std::string::npos) {
    return nullptr;
  }
  if (is_place) return first;
  for (const char* const verb : {" is ", " has ", " must ", " gives ", " tokens", " text "}) {
    if (message.compare(end, std::string(verb).size(), verb) == 0) return first;
  }
  return nullptr;
}

// For the client, in whose request members have no "sampling." before them, and a prompt may be an
// array of ids.
std::string Message(const absl::Status& status) {
  std::string message = status::PublicMessage(status);
  for (const auto& [of_grpc, of_http] :
       {std::pair<absl::string_view, absl::string_view>{"sampling.", ""},
        {"prompt tokens.ids", "prompt"}}) {
    if (!absl::StartsWith(message, of_grpc)) continue;
    message.replace(0, of_grpc.size(), of_http.data(), of_http.size());
    break;
  }
  return message;
}

}  // namespace

int HttpStatusOf(const absl::Status& status) {
  if (status::Reason(status) == status::kIncompatible) return 503;
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kAlreadyExists:
      return 409;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kCancelled:
      return 499;
    case absl::StatusCode::kUnimplemented:
      return 501;
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

absl::Status OfPrompt(size_t index, const absl::Status& status) {
  const std::string reason = status::Reason(status);
  for (const char* const whole : {status::kQueueFull, status::kTenantLimit, status::kCallTooLarge,
                                  status::kDraining, status::kNoWorker}) {
    if (reason == whole) return status;
  }
  std::string message = Message(status);
  constexpr char kPrompt[] = "prompt";
  const bool is_about_it = absl::StartsWith(message, absl::StrCat(kPrompt, " ")) ||
                           absl::StartsWith(message, absl::StrCat(kPrompt, "["));
  message = is_about_it
                ? absl::StrCat(kPrompt, "[", index, "]", message.substr(sizeof(kPrompt) - 1))
                : absl::StrCat(kPrompt, "[", index, "]: ", message);
  absl::Status named(status.code(), message);
  if (!reason.empty()) named = status::WithReason(std::move(named), reason);
  if (const absl::Duration delay = status::RetryAfter(status); delay > absl::ZeroDuration()) {
    named = status::WithRetryAfter(std::move(named), delay);
  }
  return named;
}

std::string ErrorBody(int http_status, const std::string& message) {
  const Json body = {{"error",
                      {{"message", message},
                       {"type", TypeOf(http_status)},
                       {"param", ParamOf(http_status, message)},
                       {"code", CodeOf(http_status, message)}}}};
  return Dump(body);
}

absl::Status ForLog(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status)) return status;
  const Json param = ParamOf(400, std::string(status.message()));
  return absl::InvalidArgumentError(absl::StrCat(
      "the body cannot be served", param.is_string() ? ": " + param.get<std::string>() : ""));
}

Response ErrorResponse(const absl::Status& status) {
  Response response = {.status = HttpStatusOf(status)};
  response.body = ErrorBody(response.status, Message(status));
  if (response.status == 429 || response.status == 503) {
    const absl::Duration delay = std::max(kRetryAfter, status::RetryAfter(status));
    response.headers.emplace_back(
        "retry-after", absl::StrCat(absl::ToInt64Seconds(absl::Ceil(delay, absl::Seconds(1)))));
  }
  if (response.status == 401) response.headers.emplace_back("www-authenticate", "Bearer");
  return response;
}

std::string ErrorEvent(const absl::Status& status) {
  return absl::StrCat("data: ", ErrorBody(HttpStatusOf(status), Message(status)), "\n\n");
}

}  // namespace router::http
