#include "service/process.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "grpc/support/log.h"
#include "service/log_format.h"
#include "service/port_file.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"
#include "steady_time/steady_time.h"

namespace service {
namespace {

sigset_t TerminationSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

absl::Status PortFileError(const std::string& path, const std::string& cause) {
  return absl::UnavailableError(
      absl::StrCat("cannot write port file ", path, ": ", absl::AsciiStrToLower(cause)));
}

// gRPC's own messages take the same form; what it calls an error is mostly a peer's doing.
void LogGrpcMessage(gpr_log_func_args* args) {
  const auto level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? spdlog::level::warn : spdlog::level::debug;
  spdlog::log(level, "grpc message={}", LogValue(args->message));
}

}  // namespace

absl::Status InitLogging(const std::string& process_name, const LogOptions& options) {
  static constexpr const char* kLevels[] = {"trace", "debug", "info", "warn", "error"};
  int level = 0;
  while (level < 5 && options.level != kLevels[level]) ++level;
  if (level == 5) {
    return absl::InvalidArgumentError(
        absl::StrCat("log level \"", options.level, "\" is not trace, debug, info, warn or error"));
  }
  auto logger = std::make_shared<spdlog::logger>(process_name,
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_level(static_cast<spdlog::level::level_enum>(level));
  logger->set_formatter(MakeLogFormatter(options.json));
  spdlog::set_default_logger(std::move(logger));
  gpr_set_log_function(&LogGrpcMessage);
  return absl::OkStatus();
}

void BlockTerminationSignals() {
  const sigset_t set = TerminationSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  // A peer that closes its connection is an error of the write, not the end of the process.
  signal(SIGPIPE, SIG_IGN);
}

int WaitForTermination(absl::Duration timeout) {
  const sigset_t set = TerminationSignals();
  const absl::Time end = steady_time::Now() + timeout;
  while (true) {
    int signal_number;
    if (timeout == absl::InfiniteDuration()) {
      signal_number = sigwaitinfo(&set, nullptr);
    } else {
      const absl::Duration left = std::max(end - steady_time::Now(), absl::ZeroDuration());
      const timespec limit = absl::ToTimespec(left);
      signal_number = sigtimedwait(&set, nullptr, &limit);
      if (signal_number < 0 && errno == EAGAIN) return 0;
    }
    if (signal_number > 0) return signal_number;  // else EINTR, from a debugger
  }
}

absl::Status WritePorts(const std::string& path,
                        const std::vector<std::pair<std::string, int32_t>>& ports) {
  if (path.empty()) return absl::OkStatus();
  const std::string unfinished = path + ".tmp";
  errno = 0;
  std::ofstream file(unfinished, std::ios::trunc);
  for (const auto& [name, port] : ports) file << name << "=" << port << "\n";
  file.close();
  if (!file.good()) return PortFileError(path, std::generic_category().message(errno));
  std::error_code error;
  std::filesystem::rename(unfinished, path, error);
  return error ? PortFileError(path, error.message()) : absl::OkStatus();
}

absl::Status WritePortFile(const std::string& path, int32_t grpc_port, int32_t metrics_port) {
  return WritePorts(path, {{"grpc_port", grpc_port}, {"metrics_port", metrics_port}});
}

absl::Status CheckPortFile(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return PortFileError(path, "is a directory");
  const std::string unfinished = path + ".tmp";
  const int fd = open(unfinished.c_str(), O_WRONLY | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0644);
  if (fd < 0) return PortFileError(path, std::generic_category().message(errno));
  close(fd);
  unlink(unfinished.c_str());
  return absl::OkStatus();
}

int FatalExit(const std::string& process_name, const absl::Status& status) {
  const std::string message(status.message());
  std::fprintf(stderr, "%s: %s\n", process_name.c_str(), message.c_str());
  return 1;
}

}  // namespace service
