// Numeric "ip:port" addresses, IPv4 or [IPv6].

#ifndef KV_TRANSFER_SOCKET_ADDRESS_H_
#define KV_TRANSFER_SOCKET_ADDRESS_H_

#include <sys/socket.h>

#include <string>

#include "absl/status/statusor.h"

namespace kv_transfer {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Errors: kInvalidArgument unless `ip` is a numeric address and 0 <= port <= 65535.
absl::StatusOr<SocketAddress> MakeSocketAddress(const std::string& ip, int32_t port);

// Errors: kInvalidArgument unless `text` is "ip:port" or "[ip]:port".
absl::StatusOr<SocketAddress> ParseSocketAddress(const std::string& text);

// What ParseSocketAddress reads.
std::string ToText(const SocketAddress& address);

}  // namespace kv_transfer

#endif  // KV_TRANSFER_SOCKET_ADDRESS_H_
