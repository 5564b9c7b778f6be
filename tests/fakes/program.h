// Program: one run of a Ferry binary in a test; what it says on stderr comes through a pipe.
//
// Thread-compatible.  The destructor kills and reaps what still runs.

#ifndef TESTS_FAKES_PROGRAM_H_
#define TESTS_FAKES_PROGRAM_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace fakes {

class Program final {
 public:
  // `name` lies in FERRY_BIN_DIR.
  Program(const std::string& name, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), absl::StrCat(std::getenv("FERRY_BIN_DIR"), "/", name));
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(ends[1]);
    stderr_ = ends[0];
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(stderr_);
  }

  pid_t pid() const { return pid_; }
  void Signal(int number) const { kill(pid_, number); }

  // Reads until `words` have been said; false if it ends before.
  bool ReadUntil(const std::string& words) {
    while (said_.find(words) == std::string::npos) {
      if (!ReadMore()) return false;
    }
    return true;
  }
  // Waits for its end: the exit code, or 1000 + the signal that ended it.
  int Wait() {
    while (ReadMore()) {
    }
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

  const std::string& said() const { return said_; }
  // The number behind `name` in what was said; -1 if it was not said.
  int Number(const std::string& name) const {
    const size_t at = said_.find(name);
    return at == std::string::npos ? -1 : std::atoi(said_.c_str() + at + name.size());
  }

 private:
  bool ReadMore() {
    char buffer[4096];
    const ssize_t n = read(stderr_, buffer, sizeof(buffer));
    if (n > 0) said_.append(buffer, static_cast<size_t>(n));
    return n > 0;
  }

  pid_t pid_ = -1;
  int stderr_ = -1;
  std::string said_;
};

}  // namespace fakes

#endif  // TESTS_FAKES_PROGRAM_H_
