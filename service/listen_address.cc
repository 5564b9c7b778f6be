#include "service/listen_address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "status/status_macros.h"

namespace service {
namespace {

absl::Status CannotListen(const std::string& address, const std::string& why) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address, ": ", absl::AsciiStrToLower(why)));
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
    if (!result.host.empty()) return result;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", address, "\" is not host:port with a port of 0 to 65535"));
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
