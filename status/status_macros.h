// Early return on an error, for functions that return absl::Status or StatusOr.

#ifndef STATUS_STATUS_MACROS_H_
#define STATUS_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define FERRY_CONCAT_INNER(a, b) a##b
#define FERRY_CONCAT(a, b) FERRY_CONCAT_INNER(a, b)

// Evaluates `expr` (an absl::Status) and returns it from the function if it is not OK.
#define RETURN_IF_ERROR(expr)                                  \
  do {                                                         \
    ::absl::Status ferry_status_ = (expr);                     \
    if (!ferry_status_.ok()) return ferry_status_;             \
  } while (false)

// Evaluates `expr` (an absl::StatusOr<T>); returns its status on error, else assigns the value.
#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_INNER(FERRY_CONCAT(ferry_statusor_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_INNER(statusor, lhs, expr) \
  auto statusor = (expr);                           \
  if (!statusor.ok()) return statusor.status();     \
  lhs = std::move(statusor).value()

#endif  // STATUS_STATUS_MACROS_H_
