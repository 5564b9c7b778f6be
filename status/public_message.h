// What somebody outside may read of an error: workers' addresses and what went wrong at them are
// for logs and for those who run the system.
//
// Stateless functions.

#ifndef STATUS_PUBLIC_MESSAGE_H_
#define STATUS_PUBLIC_MESSAGE_H_

#include <string>

#include "absl/status/status.h"

namespace status {

inline constexpr char kPublicMessageUrl[] = "ferry/public-message";

// Returns `status` with a sentence for those who may not see its message.  REQUIRES: !status.ok().
absl::Status WithPublicMessage(absl::Status status, const std::string& sentence);

// That sentence; without one the message itself.
std::string PublicMessage(const absl::Status& status);

}  // namespace status

#endif  // STATUS_PUBLIC_MESSAGE_H_
