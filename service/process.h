// What a Ferry process sets up once in main: logs, signals, metrics endpoint, and how it reports a
// fatal configuration error (one sentence on stderr, exit code 1).

#ifndef SERVICE_PROCESS_H_
#define SERVICE_PROCESS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace prometheus {
class Registry;
}

namespace service {

inline constexpr char kVersion[] = "0.1.0";  // of every Ferry program

struct LogOptions {
  std::string level = "info";  // trace, debug, info, warn, error
  bool json = false;           // one JSON object a line instead of key=value
};

// Messages are written as `words key=value key="a value"`; LogValue makes the values.
// Lines on stderr: time, level, process name, key=value pairs.
// Errors: kInvalidArgument for an unknown level.
absl::Status InitLogging(const std::string& process_name, const LogOptions& options);

// `value` as it may stand behind "key=": quoted and escaped if it has spaces, quotes or control
// characters.
std::string LogValue(std::string_view value);

// Blocks SIGTERM and SIGINT in this thread and every thread made later; ignores SIGPIPE.
// Call before any thread exists.
void BlockTerminationSignals();
// Waits for one of them; returns its number, or 0 when `timeout` passed first.  Every
// kHeapTrimInterval it trims the heap (heap.h), as the thread has nothing else to do.
// REQUIRES: called by one thread.
inline constexpr absl::Duration kHeapTrimInterval = absl::Seconds(10);
int WaitForTermination(absl::Duration timeout = absl::InfiniteDuration());

// Serves `registry` at http://address/metrics.
class MetricsServer {
 public:
  // `address`: "host:port", port 0: any.  Errors: kUnavailable naming the address.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& address, std::shared_ptr<prometheus::Registry> registry);
  virtual ~MetricsServer() = default;
  virtual int32_t port() const = 0;
};

// Prints `process: message` to stderr; returns 1.
int FatalExit(const std::string& process_name, const absl::Status& status);

}  // namespace service

#endif  // SERVICE_PROCESS_H_
