// SilentServer: takes TCP connections on loopback and says nothing, as a process that has been
// stopped.
//
// Thread-compatible.

#ifndef TESTS_FAKES_SILENT_SERVER_H_
#define TESTS_FAKES_SILENT_SERVER_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "status/check.h"

namespace fakes {

class SilentServer final {
 public:
  SilentServer() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    FERRY_CHECK(bind(fd_, reinterpret_cast<sockaddr*>(&address), length) == 0) << "bind";
    FERRY_CHECK(listen(fd_, 8) == 0) << "listen";
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~SilentServer() { close(fd_); }
  SilentServer(const SilentServer&) = delete;
  SilentServer& operator=(const SilentServer&) = delete;

  const std::string& address() const { return address_; }
  int fd() const { return fd_; }                                // readable: somebody comes
  int Accept() const { return accept(fd_, nullptr, nullptr); }  // the caller's to close

 private:
  const int fd_;
  std::string address_;
};

}  // namespace fakes

#endif  // TESTS_FAKES_SILENT_SERVER_H_
