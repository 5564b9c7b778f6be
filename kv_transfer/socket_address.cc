#include "kv_transfer/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kv_transfer {
namespace {

uint16_t Port(const SocketAddress& address) {
  return ntohs(address.storage.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port
                   : reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
}

std::string IpText(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
              sizeof(text));
    return text;
  }
  inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
            sizeof(text));
  return absl::StrCat("[", text, "]");
}

}  // namespace

absl::StatusOr<SocketAddress> MakeSocketAddress(const std::string& ip, int32_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (port < 0 || port > 65535 ||
      getaddrinfo(ip.c_str(), absl::StrCat(port).c_str(), &hints, &found) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", ip, "\" port ", port, " is not a numeric address"));
  }
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

absl::StatusOr<SocketAddress> ParseSocketAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  int32_t port = 0;
  if (colon == std::string::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port)) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not ip:port"));
  }
  std::string ip = text.substr(0, colon);
  if (ip.size() > 2 && ip.front() == '[' && ip.back() == ']') ip = ip.substr(1, ip.size() - 2);
  return MakeSocketAddress(ip, port);
}

std::string ToText(const SocketAddress& address) {
  return absl::StrCat(IpText(address.get()), ":", Port(address));
}

}  // namespace kv_transfer
