// Maps absl::Status to grpc::Status and back, with a machine-readable reason.
//
// The reason travels as google.rpc.ErrorInfo{reason, domain "ferry"} inside the standard
// `grpc-status-details-bin` trailer, so that foreign clients can read it.  In an absl::Status it is
// the payload kReasonUrl.  Codes mean what serving.md 3.5 says.

#ifndef STATUS_GRPC_STATUS_H_
#define STATUS_GRPC_STATUS_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace status {

inline constexpr char kReasonUrl[] = "ferry/reason";

// Reasons the router acts on (ErrorInfo.reason).
inline constexpr char kStaleEpoch[] = "STALE_EPOCH";      // the receiver has restarted
inline constexpr char kStaleAttempt[] = "STALE_ATTEMPT";  // a newer attempt of the request exists
inline constexpr char kIncompatible[] = "INCOMPATIBLE";   // cache layouts differ; never retried
inline constexpr char kDraining[] = "DRAINING";           // the worker is going away
inline constexpr char kQueueFull[] = "QUEUE_FULL";
inline constexpr char kDeadline[] = "DEADLINE_UNREACHABLE";

// Returns `status` carrying `reason`.  REQUIRES: !status.ok().
absl::Status WithReason(absl::Status status, std::string_view reason);

// The reason that `status` carries, or "".
std::string Reason(const absl::Status& status);

// "ok", "unavailable", "failed_precondition": what logs and metric labels call a code.
std::string CodeName(absl::StatusCode code);

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace status

#endif  // STATUS_GRPC_STATUS_H_
