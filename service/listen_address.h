// "host:port" as flags have it: parsing, the reason why it cannot be listened on, and where a peer
// that listens on all interfaces can be called.

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

// Where the process that said `told` of itself can be called: `told`, with the IP that its call
// came from (gRPC's peer(): "ipv4:10.0.0.5:41234") where `told` names all interfaces
// ("0.0.0.0:8601", "[::]:8601").  Unchanged where the peer has no IP.
std::string ReachableAddress(const std::string& told, const std::string& grpc_peer);

// The other way round: where that peer can call this process, which listens on `own`: `own`, with
// the IP that this host has on its way to the peer where `own` names all interfaces.
std::string OwnAddressFor(const std::string& own, const std::string& grpc_peer);

// Binds and closes a socket.  Errors: kUnavailable "cannot listen on ADDRESS: address already in
// use", or whatever else the system says.
absl::Status CheckCanListen(const std::string& address);

}  // namespace service

#endif  // SERVICE_LISTEN_ADDRESS_H_
