#include "service/process.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "grpc/support/log.h"
#include "service/heap.h"
#include "service/log_format.h"
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
  static absl::Time next_trim = steady_time::Now() + kHeapTrimInterval;
  const sigset_t set = TerminationSignals();
  const absl::Time end = steady_time::Now() + timeout;
  while (true) {
    absl::Time now = steady_time::Now();
    if (now >= next_trim) {
      TrimHeap();
      now = steady_time::Now();
      next_trim = now + kHeapTrimInterval;
    }
    const timespec limit =
        absl::ToTimespec(std::max(std::min(end, next_trim) - now, absl::ZeroDuration()));
    const int signal_number = sigtimedwait(&set, nullptr, &limit);
    if (signal_number > 0) return signal_number;
    if (signal_number < 0 && errno == EAGAIN && steady_time::Now() >= end) return 0;
    // Else EINTR, from a debugger, or the heap's turn.
  }
}

int FatalExit(const std::string& process_name, const absl::Status& status) {
  const std::string message(status.message());
  std::fprintf(stderr, "%s: %s\n", process_name.c_str(), message.c_str());
  return 1;
}

}  // namespace service
