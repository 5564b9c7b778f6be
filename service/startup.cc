#include "service/startup.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "service/listen_address.h"
#include "service/port_file.h"
#include "service/process.h"
#include "spdlog/spdlog.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace service {
namespace {

// A worker with two links has 30 files open before it knows anybody.
constexpr rlim_t kMinOpenFiles = 128;

absl::Status CheckPorts(const StartFlags& flags) {
  RETURN_IF_ERROR(CheckCanListen(flags.listen));
  RETURN_IF_ERROR(CheckCanListen(flags.metrics_listen));
  ASSIGN_OR_RETURN(const HostPort own, ParseListenAddress(flags.metrics_listen));
  if (own.port > 0 && flags.listen == flags.metrics_listen) {
    return absl::InvalidArgumentError(
        absl::StrCat("--listen and --metrics_listen are both ", flags.listen));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RaiseOpenFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::OkStatus();
  if (limit.rlim_max < kMinOpenFiles) {
    return absl::UnavailableError(absl::StrCat("at most ", limit.rlim_max,
                                               " files may be open (ulimit -n), at least ",
                                               kMinOpenFiles, " are needed"));
  }
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    spdlog::warn("open file limit not raised cause={}", LogValue(std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status CheckStart(const StartFlags& flags) {
  RETURN_IF_ERROR(RaiseOpenFileLimit());
  RETURN_IF_ERROR(CheckPorts(flags));
  RETURN_IF_ERROR(CheckPortFile(flags.port_file));
  return CheckServerTls(flags.tls);
}

EndOnSignal::EndOnSignal() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  signal_fd_ = signalfd(-1, &signals, SFD_CLOEXEC);
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  FERRY_CHECK(signal_fd_ >= 0 && stop_fd_ >= 0) << std::strerror(errno);
  thread_ = std::thread([this] {
    pollfd waits[] = {{.fd = stop_fd_, .events = POLLIN, .revents = 0},
                      {.fd = signal_fd_, .events = POLLIN, .revents = 0}};
    while (poll(waits, 2, -1) < 0) {
    }
    if ((waits[0].revents & POLLIN) != 0) return;
    signalfd_siginfo signal{};
    if (read(signal_fd_, &signal, sizeof(signal)) != sizeof(signal)) return;
    spdlog::info("stopped while starting signal={}", signal.ssi_signo);
    spdlog::default_logger()->flush();
    // Not exit(): other threads are in the middle of their work.
    _exit(0);
  });
}

EndOnSignal::~EndOnSignal() {
  eventfd_write(stop_fd_, 1);
  thread_.join();
  close(signal_fd_);
  close(stop_fd_);
}

}  // namespace service
