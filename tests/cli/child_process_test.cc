#include "cli/child_process.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <string>

#include "gtest/gtest.h"

namespace cli {
namespace {

// What a child prints, read through a pipe.
class LogPipe {
 public:
  LogPipe() { EXPECT_EQ(pipe(fds_.data()), 0); }
  ~LogPipe() {
    close(fds_[0]);
    CloseWriter();
  }
  int writer() const { return fds_[1]; }
  void CloseWriter() {
    if (fds_[1] >= 0) close(fds_[1]);
    fds_[1] = -1;
  }
  // Waits for `count` lines.
  std::string ReadLines(int count) {
    std::string text;
    char c;
    while (count > 0 && read(fds_[0], &c, 1) == 1) {
      text += c;
      if (c == '\n') --count;
    }
    return text;
  }

 private:
  std::array<int, 2> fds_{};
};

std::unique_ptr<ChildProcess> Shell(const LogPipe& log, const std::string& script) {
  auto child = ChildProcess::Start(
      {.name = "w-0", .arguments = {"/bin/sh", "-c", script}, .log_fd = log.writer()});
  EXPECT_TRUE(child.ok()) << child.status();
  return *std::move(child);
}

TEST(ChildProcessTest, PrefixesEveryLine) {
  LogPipe log;
  const auto child = Shell(log, "echo one; echo two >&2; printf three");
  ASSERT_TRUE(child->WaitForExit(absl::Seconds(20)));
  EXPECT_EQ(child->wait_status(), 0);
  EXPECT_EQ(log.ReadLines(3), "w-0 | one\nw-0 | two\nw-0 | three\n");
}

TEST(ChildProcessTest, SaysHowItEnded) {
  LogPipe log;
  const auto failed = Shell(log, "echo cannot listen; exit 3");
  ASSERT_TRUE(failed->WaitForExit(absl::Seconds(20)));
  EXPECT_EQ(failed->CheckRunning().message(), "w-0 exited with status 3: cannot listen");
  const auto killed = Shell(log, "echo serving; kill -9 $$");
  ASSERT_TRUE(killed->WaitForExit(absl::Seconds(20)));
  EXPECT_EQ(killed->CheckRunning().message(), "w-0 was killed by signal 9");
  const auto aborted = Shell(log, "echo check failed; kill -6 $$");
  ASSERT_TRUE(aborted->WaitForExit(absl::Seconds(20)));
  EXPECT_EQ(aborted->CheckRunning().message(), "w-0 was killed by signal 6: check failed");
}

TEST(ChildProcessTest, RunsWithSignalsUnblockedInItsOwnGroup) {
  sigset_t set, before;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &set, &before);
  LogPipe log;
  const auto child = Shell(log, "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 1; done");
  EXPECT_EQ(log.ReadLines(1), "w-0 | up\n");
  EXPECT_TRUE(child->CheckRunning().ok());
  EXPECT_EQ(getpgid(child->pid()), child->pid());
  child->Signal(SIGTERM);
  ASSERT_TRUE(child->WaitForExit(absl::Seconds(20)));
  EXPECT_EQ(child->CheckRunning().message(), "w-0 exited with status 0: bye");
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST(ChildProcessTest, WaitEndsAtItsTimeoutAndTheDestructorKills) {
  LogPipe log;
  auto child = Shell(log, "trap '' TERM; echo up; exec sleep 1000");
  EXPECT_EQ(log.ReadLines(1), "w-0 | up\n");
  child->Signal(SIGTERM);
  EXPECT_FALSE(child->WaitForExit(absl::Milliseconds(50)));
  const pid_t pid = child->pid();
  child.reset();
  EXPECT_NE(kill(pid, 0), 0);
}

TEST(ChildProcessTest, NamesAnExecutableThatIsNotThere) {
  const auto child = ChildProcess::Start({.name = "w", .arguments = {"/nowhere/ferry-x"}});
  EXPECT_EQ(child.status().message(), "cannot run /nowhere/ferry-x: No such file or directory");
}

}  // namespace
}  // namespace cli
