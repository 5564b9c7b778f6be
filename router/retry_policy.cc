#include "router/retry_policy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router {
namespace {

constexpr absl::Duration kFirstBackOff = absl::Milliseconds(50);
constexpr absl::Duration kMaxBackOff = absl::Seconds(1);

absl::Duration BackOff(int32_t failures) {
  return std::min(kFirstBackOff * (1 << std::min(failures - 1, 10)), kMaxBackOff);
}

// The request has not been at the worker, or leaves it with all others.
bool IsInnocent(const absl::Status& error, bool accepted) {
  const std::string reason = status::Reason(error);
  if (reason == status::kDraining || reason == status::kStaleEpoch) return true;
  return !accepted && (absl::IsUnavailable(error) || absl::IsCancelled(error));
}

// What is wrong with the request itself, or over for it: no other worker would do better.
bool IsTheRequestsOwn(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kDeadlineExceeded:
      return true;
    default:
      return false;
  }
}

// nullptr: a worker that finds fault with a request speaks of the request; else it speaks of itself
// and of others.
const char* PublicSentence(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return nullptr;
    case absl::StatusCode::kUnavailable:
      return "no worker could answer";
    case absl::StatusCode::kDeadlineExceeded:
      return "the deadline has passed";
    default:
      return "a worker failed";
  }
}

}  // namespace

RetryVerdict DecideRetry(const absl::Status& error, bool accepted, int32_t max_attempts,
                         FailureCounts* failures) {
  if (absl::IsResourceExhausted(error) || IsInnocent(error, accepted)) {
    ++failures->refused;
    return {.retry = true, .same_worker_back_off = BackOff(failures->refused)};
  }
  if (IsTheRequestsOwn(error.code())) return {};
  switch (error.code()) {
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kNotFound:  // the other worker had dropped its half already
      ++failures->aborted;
      if (failures->aborted % 2 == 0) ++failures->counted;
      break;
    case absl::StatusCode::kInternal:
      ++failures->counted;
      if (++failures->internal > 1) return {};
      break;
    default:  // unavailable, failed precondition, data loss, cancelled by the worker, ...
      ++failures->counted;
      break;
  }
  if (failures->counted >= max_attempts) return {};
  return {.retry = true,
          .same_worker_back_off = BackOff(std::max(1, failures->counted + failures->aborted))};
}

bool BlamesWorker(const absl::Status& error) {
  const std::string reason = status::Reason(error);
  if (reason == status::kDraining || reason == status::kBadLogits) return false;
  if (IsTheRequestsOwn(error.code())) return false;
  switch (error.code()) {
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kFailedPrecondition:  // another process is there, or they do not fit
    case absl::StatusCode::kNotFound:            // the other worker has dropped its half
    case absl::StatusCode::kAlreadyExists:
      return false;
    default:
      return true;
  }
}

absl::Status FinalStatus(const absl::Status& error, int32_t attempts) {
  absl::StatusCode code = error.code();
  switch (code) {
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kCancelled:  // by the worker: the client has not asked for it
    case absl::StatusCode::kAlreadyExists:
      code = absl::StatusCode::kUnavailable;
      break;
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kUnauthenticated:  // the router is not known there
    case absl::StatusCode::kPermissionDenied:
      code = absl::StatusCode::kInternal;
      break;
    default:
      break;
  }
  const std::string tries =
      attempts > 1 ? absl::StrCat("gave up after ", attempts, " attempts: ") : "";
  absl::Status result(code, absl::StrCat(tries, std::string(error.message())));
  const char* const sentence = PublicSentence(code);
  result = status::WithPublicMessage(
      std::move(result),
      absl::StrCat(tries, sentence == nullptr ? status::PublicMessage(error) : sentence));
  const std::string reason = status::Reason(error);
  return reason.empty() ? result : status::WithReason(std::move(result), reason);
}

}  // namespace router
