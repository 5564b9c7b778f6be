// "host:port" as flags have it: parsing, and the reason why it cannot be listened on.

#ifndef SERVICE_LISTEN_ADDRESS_H_
#define SERVICE_LISTEN_ADDRESS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace service {

struct HostPort {
  std::string host;              // "127.0.0.1", "::1" (without brackets), "worker-3"
  int32_t port = 0;              // 0: any
  std::string ToString() const;  // with brackets where the host needs them
};

// Errors: kInvalidArgument naming the address.
absl::StatusOr<HostPort> ParseListenAddress(const std::string& address);

// Binds and closes a socket.  Errors: kUnavailable "cannot listen on ADDRESS: address already in
// use", or whatever else the system says.
absl::Status CheckCanListen(const std::string& address);

}  // namespace service

#endif  // SERVICE_LISTEN_ADDRESS_H_
