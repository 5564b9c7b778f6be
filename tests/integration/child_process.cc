#include "tests/integration/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "status/check.h"

namespace integration {
namespace {

int PollMilliseconds(absl::Duration timeout) {
  return static_cast<int>(absl::ToInt64Milliseconds(std::max(timeout, absl::ZeroDuration())));
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

ChildProcess::ChildProcess(pid_t pid, int pid_fd, std::string log_path)
    : pid_(pid), pid_fd_(pid_fd), log_path_(std::move(log_path)) {}

ChildProcess ChildProcess::Start(const std::vector<std::string>& argv,
                                 const std::string& log_path) {
  std::vector<char*> raw;
  for (const std::string& arg : argv) raw.push_back(const_cast<char*>(arg.c_str()));
  raw.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                   0644);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t pid = -1;
  const int error = posix_spawn(&pid, raw[0], &actions, nullptr, raw.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  FERRY_CHECK(error == 0) << "cannot start " << argv[0] << ": error " << error;
  const int pid_fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  FERRY_CHECK(pid_fd >= 0) << "pidfd_open of " << pid << " failed";
  return ChildProcess(pid, pid_fd, log_path);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      pid_fd_(std::exchange(other.pid_fd_, -1)),
      log_path_(std::move(other.log_path_)),
      exit_code_(other.exit_code_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pid_fd_, other.pid_fd_);
  std::swap(log_path_, other.log_path_);
  std::swap(exit_code_, other.exit_code_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ > 0) Kill();
  if (pid_fd_ >= 0) close(pid_fd_);
}

void ChildProcess::Signal(int signal) const {
  if (!exit_code_.has_value()) kill(pid_, signal);
}

std::optional<int> ChildProcess::Wait(absl::Duration timeout) {
  if (exit_code_.has_value()) return exit_code_;
  pollfd fd = {.fd = pid_fd_, .events = POLLIN, .revents = 0};
  if (poll(&fd, 1, PollMilliseconds(timeout)) != 1) return std::nullopt;
  int status = 0;
  waitpid(pid_, &status, 0);
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return exit_code_;
}

void ChildProcess::Kill() {
  Signal(SIGKILL);
  Wait(absl::Seconds(30));
}

std::string ChildProcess::log() const { return ReadFile(log_path_); }

absl::StatusOr<int> WaitForPort(const std::string& path, const std::string& name,
                                absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  const std::filesystem::path file(path);
  const int watch = inotify_init1(IN_CLOEXEC);
  inotify_add_watch(watch, file.parent_path().c_str(), IN_MOVED_TO | IN_CLOSE_WRITE);
  absl::StatusOr<int> port = absl::DeadlineExceededError(absl::StrCat("no ", name, " in ", path));
  while (true) {
    std::istringstream lines(ReadFile(path));
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind(name + "=", 0) == 0) port = std::atoi(line.c_str() + name.size() + 1);
    }
    if (port.ok() || absl::Now() >= deadline) break;
    pollfd fd = {.fd = watch, .events = POLLIN, .revents = 0};
    if (poll(&fd, 1, PollMilliseconds(deadline - absl::Now())) == 1) {
      char events[4096];
      (void)!read(watch, events, sizeof(events));
    }
  }
  close(watch);
  return port;
}

std::string MakeTestDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "ferry_test_XXXXXX").string();
  FERRY_CHECK(mkdtemp(pattern.data()) != nullptr) << pattern;
  return pattern;
}

}  // namespace integration
