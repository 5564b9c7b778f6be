#include "cli/child_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace cli {
namespace {

// Exit code of a child whose exec failed, as shells have it.
constexpr int kExecFailed = 127;

void WriteAll(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nobody reads our log any more
    done += static_cast<size_t>(n);
  }
}

// What the child does between fork and exec: only calls that are safe there.
[[noreturn]] void Become(char* const* argv, int output_fd, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExecFailed);  // the parent died before prctl
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  dup2(output_fd, STDOUT_FILENO);
  dup2(output_fd, STDERR_FILENO);
  execv(argv[0], argv);
  _exit(kExecFailed);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(Options options) {
  const std::string& path = options.arguments[0];
  if (access(path.c_str(), X_OK) != 0) {
    return absl::NotFoundError(absl::StrCat("cannot run ", path, ": ", std::strerror(errno)));
  }
  std::unique_ptr<ChildProcess> child(new ChildProcess(std::move(options)));
  std::array<int, 2> pipe_fds{};
  if (pipe2(pipe_fds.data(), O_CLOEXEC) != 0) {
    return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  child->log_fd_ = pipe_fds[0];
  std::vector<char*> argv;
  for (const std::string& argument : child->options_.arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  child->pid_ = fork();
  if (child->pid_ == 0) Become(argv.data(), pipe_fds[1], parent);
  const int fork_errno = errno;
  close(pipe_fds[1]);
  if (child->pid_ < 0)
    return absl::InternalError(absl::StrCat("fork: ", std::strerror(fork_errno)));
  // Debian 12's <sys/pidfd.h> cannot be used from C++.
  child->exit_fd_ = static_cast<int>(syscall(SYS_pidfd_open, child->pid_, 0));
  if (child->exit_fd_ < 0) {
    return absl::InternalError(absl::StrCat("pidfd_open: ", std::strerror(errno)));
  }
  child->log_thread_ = std::thread([raw = child.get()] { raw->CopyLog(); });
  return child;
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0 && !ended_) {
    Signal(SIGKILL);
    Reap(/*block=*/true);
  }
  if (log_thread_.joinable()) log_thread_.join();
  if (log_fd_ >= 0) close(log_fd_);
  if (exit_fd_ >= 0) close(exit_fd_);
}

void ChildProcess::CopyLog() {
  std::string line;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t n = read(log_fd_, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    for (ssize_t i = 0; i < n; ++i) {
      if (buffer[i] != '\n') {
        line += buffer[i];
        continue;
      }
      WriteAll(options_.log_fd, absl::StrCat(options_.name, " | ", line, "\n"));
      const std::lock_guard<std::mutex> lock(mutex_);
      last_line_ = std::exchange(line, "");
    }
  }
  if (line.empty()) return;
  WriteAll(options_.log_fd, absl::StrCat(options_.name, " | ", line, "\n"));
  const std::lock_guard<std::mutex> lock(mutex_);
  last_line_ = line;
}

bool ChildProcess::Reap(bool block) {
  if (ended_) return true;
  pid_t result;
  do {
    result = waitpid(pid_, &wait_status_, block ? 0 : WNOHANG);
  } while (result < 0 && errno == EINTR);
  ended_ = result == pid_;
  return ended_;
}

absl::Status ChildProcess::CheckRunning() {
  return Reap(/*block=*/false) ? HowItEnded() : absl::OkStatus();
}

absl::Status ChildProcess::HowItEnded() {
  // Its end closed the pipe: after this the last line is known.
  if (log_thread_.joinable()) log_thread_.join();
  const bool killed = WIFSIGNALED(wait_status_);
  const std::string how = killed ? absl::StrCat("was killed by signal ", WTERMSIG(wait_status_))
                                 : absl::StrCat("exited with status ", WEXITSTATUS(wait_status_));
  // Whoever is killed cannot say why: the last line is about something else.  Aborting is its own.
  const bool could_say_why = !killed || WTERMSIG(wait_status_) == SIGABRT;
  const std::lock_guard<std::mutex> lock(mutex_);
  return absl::UnavailableError(could_say_why && !last_line_.empty()
                                    ? absl::StrCat(options_.name, " ", how, ": ", last_line_)
                                    : absl::StrCat(options_.name, " ", how));
}

void ChildProcess::Signal(int signal_number) {
  if (!ended_) kill(pid_, signal_number);
}

bool ChildProcess::WaitForExit(absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (!Reap(/*block=*/false)) {
    const absl::Duration left = end - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    pollfd ready{exit_fd_, POLLIN, 0};
    // Rounded up, so that the last wait does not become a busy loop.
    const auto left_ms = std::min<int64_t>(absl::ToInt64Milliseconds(left), 1'000'000) + 1;
    poll(&ready, 1, static_cast<int>(left_ms));
  }
  return true;
}

}  // namespace cli
