#include "service/listen_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "status/status_macros.h"

namespace service {
namespace {

absl::Status CannotListen(const std::string& address, const std::string& why) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address, ": ", absl::AsciiStrToLower(why)));
}

// The IP of "ipv4:1.2.3.4:5", "ipv6:[::1]:5" or "ipv6:%5B::1%5D:5"; "" of anything else.
std::string IpOfPeer(const std::string& grpc_peer) {
  std::string peer = absl::StrReplaceAll(grpc_peer, {{"%5B", "["}, {"%5D", "]"}, {"%25", "%"}});
  const size_t colon = peer.find(':');
  if (colon == std::string::npos || (peer.rfind("ipv4:", 0) != 0 && peer.rfind("ipv6:", 0) != 0)) {
    return "";
  }
  const absl::StatusOr<HostPort> parsed = ParseListenAddress(peer.substr(colon + 1));
  return parsed.ok() ? parsed->host : "";
}

// Of "0.0.0.0", "::" and other ways to write them; names are not looked up.
bool NamesAllInterfaces(const std::string& host) {
  in_addr v4{};
  in6_addr v6{};
  if (inet_aton(host.c_str(), &v4) != 0) return v4.s_addr == INADDR_ANY;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6);
}

// The IP of this host in packets to `ip`; "" if there is no way.
std::string SourceIpTo(const std::string& ip) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  constexpr char kAnyPort[] = "9";  // nothing is sent there
  if (getaddrinfo(ip.c_str(), kAnyPort, &hints, &found) != 0) return "";
  const int fd = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, found->ai_protocol);
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  char text[NI_MAXHOST] = "";
  if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof(text), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    text[0] = 0;
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return text;
}

// `address`, with `ip` where it names all interfaces.
std::string WithIp(const std::string& address, const std::string& ip) {
  absl::StatusOr<HostPort> parsed = ParseListenAddress(address);
  if (ip.empty() || !parsed.ok() || !NamesAllInterfaces(parsed->host)) return address;
  parsed->host = ip;
  return parsed->ToString();
}

}  // namespace

std::string HostPort::ToString() const {
  const bool v6 = host.find(':') != std::string::npos;
  return v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

absl::StatusOr<HostPort> ParseListenAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostPort result;
  int32_t port = -1;
  if (colon != std::string::npos && absl::SimpleAtoi(address.substr(colon + 1), &port) &&
      port >= 0 && port <= 65535) {
    result.port = port;
    result.host = address.substr(0, colon);
    if (result.host.size() >= 2 && result.host.front() == '[' && result.host.back() == ']') {
      result.host = result.host.substr(1, result.host.size() - 2);
    }
    // A URL is no host.
    if (!result.host.empty() && result.host.find_first_of("/ ") == std::string::npos) return result;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", address, "\" is not host:port with a port of 0 to 65535"));
}

std::string ReachableAddress(const std::string& told, const std::string& grpc_peer) {
  return WithIp(told, IpOfPeer(grpc_peer));
}

std::string OwnAddressFor(const std::string& own, const std::string& grpc_peer) {
  return WithIp(own, SourceIpTo(IpOfPeer(grpc_peer)));
}

absl::Status CheckCanListen(const std::string& address) {
  ASSIGN_OR_RETURN(const HostPort parsed, ParseListenAddress(address));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(parsed.host.c_str(), std::to_string(parsed.port).c_str(), &hints, &found);
  if (error != 0) return CannotListen(address, gai_strerror(error));
  absl::Status status;
  const int fd = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, found->ai_protocol);
  const int on = 1;
  if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // Two sockets with SO_REUSEADDR may share an address until one of them listens.
  if (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0) {
    status = CannotListen(address, std::generic_category().message(errno));
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return status;
}

}  // namespace service
