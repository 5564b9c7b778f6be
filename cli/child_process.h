// ChildProcess: one server process that `ferry` started, with its log lines and its end.
//
// The child has a process group of its own, so that Ctrl-C at the terminal reaches only `ferry`,
// which ends children in order; and the kernel kills it when the thread that started it dies. Owned
// by the thread that made it.

#ifndef CLI_CHILD_PROCESS_H_
#define CLI_CHILD_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace cli {

class ChildProcess final {
 public:
  struct Options {
    std::string name = {};               // for messages and log lines
    std::vector<std::string> arguments;  // the executable's path first
    // Every line that the child prints goes to this descriptor as "name | line"; it must stay open.
    int log_fd = 2;
  };
  // Errors: kNotFound if the executable cannot be run, kInternal if the system has no room.
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(Options options);
  // Kills the child if it still runs.
  ~ChildProcess();

  const std::string& name() const { return options_.name; }
  pid_t pid() const { return pid_; }

  // OK while it runs; else how it ended ("prefill-0 exited with status 1: its last line").
  absl::Status CheckRunning();
  void Signal(int signal_number);
  // Waits for its end; false when `timeout` passed first.
  bool WaitForExit(absl::Duration timeout);
  // 0: ended by itself with status 0 (or by SIGTERM while that was asked for).  REQUIRES: it has
  // ended.
  int wait_status() const { return wait_status_; }

 private:
  explicit ChildProcess(Options options) : options_(std::move(options)) {}
  bool Reap(bool block);
  void CopyLog();
  absl::Status HowItEnded();

  const Options options_;
  pid_t pid_ = -1;
  int exit_fd_ = -1;  // pidfd: readable when the child has ended
  int log_fd_ = -1;   // our end of its stdout and stderr
  bool ended_ = false;
  int wait_status_ = 0;
  std::thread log_thread_;
  std::mutex mutex_;  // guards last_line_, which log_thread_ writes
  std::string last_line_;
};

}  // namespace cli

#endif  // CLI_CHILD_PROCESS_H_
