// Maps absl::Status to grpc::Status and back, with a machine-readable reason and a time to come
// back after.
//
// They travel as google.rpc.ErrorInfo{reason, domain "ferry"} and google.rpc.RetryInfo inside the
// standard `grpc-status-details-bin` trailer, so that foreign clients can read them.  In an
// absl::Status they are the payloads kReasonUrl and kRetryAfterUrl.  Codes mean what serving.md 3.5
// says.

#ifndef STATUS_GRPC_STATUS_H_
#define STATUS_GRPC_STATUS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"

namespace status {

inline constexpr char kReasonUrl[] = "ferry/reason";
inline constexpr char kRetryAfterUrl[] = "ferry/retry-after-ms";

// Reasons the router acts on (ErrorInfo.reason).
inline constexpr char kStaleEpoch[] = "STALE_EPOCH";      // the receiver has restarted
inline constexpr char kStaleAttempt[] = "STALE_ATTEMPT";  // a newer attempt of the request exists
inline constexpr char kIncompatible[] = "INCOMPATIBLE";   // cache layouts differ; never retried
inline constexpr char kDraining[] = "DRAINING";           // the worker is going away
inline constexpr char kQueueFull[] = "QUEUE_FULL";
inline constexpr char kTenantLimit[] = "TENANT_LIMIT";     // the tenant has its share already
inline constexpr char kCallTooLarge[] = "CALL_TOO_LARGE";  // more than may ever wait at a time
inline constexpr char kNoWorker[] = "NO_WORKER";           // nobody decodes the model now
inline constexpr char kDeadline[] = "DEADLINE_UNREACHABLE";
inline constexpr char kBadLogits[] = "BAD_LOGITS";  // of this request; the worker is well

// Returns `status` carrying `reason`.  REQUIRES: !status.ok().
absl::Status WithReason(absl::Status status, std::string_view reason);

// The reason that `status` carries, or "".
std::string Reason(const absl::Status& status);

// Returns `status` that tells whoever gets it to come back after `delay`, rounded up to whole
// milliseconds.  REQUIRES: !status.ok(), delay > 0.
absl::Status WithRetryAfter(absl::Status status, absl::Duration delay);

// The delay that `status` carries, or zero.
absl::Duration RetryAfter(const absl::Status& status);

// "ok", "unavailable", "failed_precondition": what logs and metric labels call a code.
std::string CodeName(absl::StatusCode code);

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace status

#endif  // STATUS_GRPC_STATUS_H_
