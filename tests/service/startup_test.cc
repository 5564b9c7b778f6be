#include "service/startup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "service/port_file.h"
#include "service/process.h"

namespace service {
namespace {

using ::testing::HasSubstr;

StartFlags Good() {
  return {.listen = "127.0.0.1:0", .metrics_listen = "127.0.0.1:0", .port_file = "", .tls = {}};
}

std::string FreePort() {
  const auto server = GrpcServer::Start("127.0.0.1:0", {}, {});
  return "127.0.0.1:" + std::to_string((*server)->port());
}

TEST(CheckStartTest, NamesTheFlagThatIsWrong) {
  EXPECT_EQ(CheckStart(Good()), absl::OkStatus());
  StartFlags flags = Good();
  flags.tls = {.cert_file = "/nowhere/cert.pem", .key_file = "/nowhere/key.pem", .ca_file = ""};
  EXPECT_THAT(std::string(CheckStart(flags).message()), HasSubstr("/nowhere/key.pem"));
  flags = Good();
  const std::string free = FreePort();
  flags.listen = flags.metrics_listen = free;
  EXPECT_EQ(CheckStart(flags),
            absl::InvalidArgumentError("--listen and --metrics_listen are both " + free));
  flags = Good();
  flags.metrics_listen = "256.0.0.1:0";
  EXPECT_THAT(std::string(CheckStart(flags).message()), HasSubstr("256.0.0.1:0"));
}

TEST(CheckStartTest, APortFileThatCannotBeWrittenIsNamedWithTheCause) {
  const std::string dir = testing::TempDir() + "startup." + std::to_string(getpid());
  std::filesystem::create_directories(dir);
  StartFlags flags = Good();
  flags.port_file = dir + "/ports";
  EXPECT_EQ(CheckStart(flags), absl::OkStatus());
  EXPECT_TRUE(std::filesystem::is_empty(dir)) << "leaves nothing behind";
  flags.port_file = dir + "/missing/ports";
  EXPECT_EQ(CheckStart(flags), absl::UnavailableError("cannot write port file " + flags.port_file +
                                                      ": no such file or directory"));
  EXPECT_EQ(WritePortFile(flags.port_file, 1, 2), CheckStart(flags));
  flags.port_file = dir;
  EXPECT_EQ(CheckStart(flags),
            absl::UnavailableError("cannot write port file " + dir + ": is a directory"));
  std::filesystem::remove_all(dir);
}

TEST(OpenFileLimitTest, IsRaisedToTheHardOneOrTooLow) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto limited = [](rlim_t soft, rlim_t hard) {
    const rlimit limit = {.rlim_cur = soft, .rlim_max = hard};
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) _exit(2);
    const absl::Status status = RaiseOpenFileLimit();
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    rlimit now{};
    getrlimit(RLIMIT_NOFILE, &now);
    _exit(status.ok() && now.rlim_cur == hard ? 0 : 1);
  };
  EXPECT_EXIT(limited(150, 400), testing::ExitedWithCode(0), "OK");
  EXPECT_EXIT(limited(20, 100), testing::ExitedWithCode(1),
              "at most 100 files may be open \\(ulimit -n\\), at least [0-9]+ are needed");
}

TEST(EndOnSignalTest, ASignalEndsTheProcessAtOnce) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  for (const int number : {SIGTERM, SIGINT}) {
    EXPECT_EXIT(
        {
          BlockTerminationSignals();
          (void)InitLogging("proc", {});
          const EndOnSignal starting;
          kill(getpid(), number);
          pause();
        },
        testing::ExitedWithCode(0), "stopped while starting signal=" + std::to_string(number));
  }
}

TEST(EndOnSignalTest, AfterTheStartASignalIsForTheProcessItself) {
  BlockTerminationSignals();
  { const EndOnSignal starting; }
  kill(getpid(), SIGTERM);
  EXPECT_EQ(WaitForTermination(absl::Seconds(10)), SIGTERM);
}

}  // namespace
}  // namespace service
