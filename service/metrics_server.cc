#include "service/process.h"

#include <netdb.h>
#include <sys/socket.h>

#include <cstring>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "prometheus/exposer.h"
#include "prometheus/registry.h"
#include "service/listen_address.h"
#include "status/status_macros.h"

namespace service {
namespace {

// The exposer's thread looks for its end only when poll returns, which an idle listener does every
// two seconds.  A listener that is shut down for reading makes poll return at once, and goes on
// doing so. The library hands out no descriptor, so look for the one that listens where it was told
// to.
void WakeListener(const HostPort& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found) !=
      0) {
    return;  // only slow
  }
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    int fd = -1;
    if (!absl::SimpleAtoi(entry->path().filename().string(), &fd)) continue;
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) continue;
    sockaddr_storage name{};
    size = sizeof(name);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) != 0) continue;
    for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
      if (a->ai_addrlen == size && std::memcmp(a->ai_addr, &name, size) == 0) {
        shutdown(fd, SHUT_RD);
      }
    }
  }
  freeaddrinfo(found);
}

class ExposerServer final : public MetricsServer {
 public:
  ExposerServer(const std::string& address, std::shared_ptr<prometheus::Registry> registry)
      : registry_(std::move(registry)), exposer_(address, /*num_threads=*/1) {
    exposer_.RegisterCollectable(registry_);
    address_.host = ParseListenAddress(address)->host;  // checked by Start
    address_.port = exposer_.GetListeningPorts().front();
  }
  ~ExposerServer() override { WakeListener(address_); }
  int32_t port() const override { return address_.port; }

 private:
  HostPort address_;  // with the port that was chosen
  std::shared_ptr<prometheus::Registry> registry_;
  prometheus::Exposer exposer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address, std::shared_ptr<prometheus::Registry> registry) {
  // The exposer says only that it failed.
  RETURN_IF_ERROR(CheckCanListen(address));
  try {
    return std::make_unique<ExposerServer>(address, std::move(registry));
  } catch (const std::exception& error) {  // CivetException: lost the port since the check
    const std::string message = error.what();
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", message));
  }
}

}  // namespace service
