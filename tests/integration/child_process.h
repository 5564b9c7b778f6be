// ChildProcess: a real Ferry process that a test starts, signals and reaps.
//
// Thread-compatible.  The destructor kills what still runs.

#ifndef TESTS_INTEGRATION_CHILD_PROCESS_H_
#define TESTS_INTEGRATION_CHILD_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace integration {

class ChildProcess final {
 public:
  // Starts argv[0] with stdout and stderr appended to `log_path`.
  static ChildProcess Start(const std::vector<std::string>& argv, const std::string& log_path);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // Exit code, or 128 + signal; nothing when it still runs after `timeout`.
  std::optional<int> Wait(absl::Duration timeout);
  void Kill();  // SIGKILL and reap
  std::string log() const;

 private:
  ChildProcess(pid_t pid, int pid_fd, std::string log_path);

  pid_t pid_ = -1;
  int pid_fd_ = -1;  // readable when the process has ended
  std::string log_path_;
  std::optional<int> exit_code_;
};

// The value of "name=" in a port file, once the file exists.
// Errors: kDeadlineExceeded after `timeout`.
absl::StatusOr<int> WaitForPort(const std::string& path, const std::string& name,
                                absl::Duration timeout);

// A fresh directory below the build's temporary folder; removed never (logs are read after a
// failure).
std::string MakeTestDir();

}  // namespace integration

#endif  // TESTS_INTEGRATION_CHILD_PROCESS_H_
