#include "service/process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "prometheus/gauge.h"
#include "prometheus/registry.h"
#include "service/listen_address.h"
#include "service/log_format.h"
#include "service/port_file.h"
#include "spdlog/details/log_msg.h"
#include "spdlog/formatter.h"

namespace service {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Pair;

// What a client reads from http://127.0.0.1:port/path.
std::string HttpGet(int32_t port, const std::string& path) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo("127.0.0.1", std::to_string(port).c_str(), &hints, &found) != 0) return "";
  const int fd = socket(found->ai_family, SOCK_STREAM, 0);
  std::string text;
  if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
      char buffer[4096];
      for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
    }
  }
  close(fd);
  freeaddrinfo(found);
  return text;
}

TEST(MetricsServerTest, ServesTheRegistryOnARandomPort) {
  auto registry = std::make_shared<prometheus::Registry>();
  prometheus::BuildGauge().Name("ferry_test_gauge").Register(*registry).Add({}).Set(42);
  auto server = MetricsServer::Start("127.0.0.1:0", registry);
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_GT((*server)->port(), 0);
  EXPECT_THAT(HttpGet((*server)->port(), "/metrics"), HasSubstr("ferry_test_gauge 42"));
}

TEST(MetricsServerTest, APortInUseIsUnavailableAndNamed) {
  auto registry = std::make_shared<prometheus::Registry>();
  auto first = MetricsServer::Start("127.0.0.1:0", registry);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = "127.0.0.1:" + std::to_string((*first)->port());
  const absl::Status second = MetricsServer::Start(address, registry).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(second.message(), "cannot listen on " + address + ": address already in use");
}

// Left alone, the library's thread sleeps two seconds in poll before it looks for its end.  The
// best of several ends counts: a busy machine may make one of them slow.
TEST(MetricsServerTest, EndsWithoutWaitingForItsListener) {
  for (const char* address : {"127.0.0.1:0", "0.0.0.0:0", "localhost:0"}) {
    absl::Duration best = absl::InfiniteDuration();
    for (int i = 0; i < 5 && best > absl::Seconds(1); ++i) {
      auto server = MetricsServer::Start(address, std::make_shared<prometheus::Registry>());
      ASSERT_TRUE(server.ok()) << server.status();
      ASSERT_THAT(HttpGet((*server)->port(), "/metrics"), HasSubstr("200 OK"));
      const absl::Time start = absl::Now();
      server->reset();
      best = std::min(best, absl::Now() - start);
    }
    EXPECT_LT(best, absl::Seconds(1)) << address;
  }
}

TEST(MetricsServerTest, ItsEndLeavesOtherListenersAlone) {
  auto registry = std::make_shared<prometheus::Registry>();
  auto other = MetricsServer::Start("127.0.0.1:0", registry);
  auto server = MetricsServer::Start("127.0.0.1:0", registry);
  ASSERT_TRUE(other.ok() && server.ok()) << other.status() << server.status();
  server->reset();
  EXPECT_THAT(HttpGet((*other)->port(), "/metrics"), HasSubstr("200 OK"));
}

TEST(ListenAddressTest, WhoListensEverywhereIsCalledWhereItsCallsComeFrom) {
  EXPECT_EQ(ReachableAddress("0.0.0.0:8601", "ipv4:10.0.0.5:41234"), "10.0.0.5:8601");
  EXPECT_EQ(ReachableAddress("[::]:8601", "ipv4:10.0.0.5:41234"), "10.0.0.5:8601");
  EXPECT_EQ(ReachableAddress("0:8601", "ipv6:[fd00::7]:41234"), "[fd00::7]:8601");
  EXPECT_EQ(ReachableAddress("[::0]:8601", "ipv6:%5Bfe80::1%25eth0%5D:41234"),
            "[fe80::1%eth0]:8601");
  for (const char* told : {"10.0.0.9:8601", "[::1]:8601", "worker-3:8601", "127.0.0.1:8601", ""}) {
    EXPECT_EQ(ReachableAddress(told, "ipv4:10.0.0.5:41234"), told);
  }
  for (const char* peer : {"", "unix:/run/ferry", "unknown", "ipv4:", "ipv6:x"}) {
    EXPECT_EQ(ReachableAddress("0.0.0.0:8601", peer), "0.0.0.0:8601") << peer;
  }
}

TEST(ListenAddressTest, WhoListensEverywhereTellsACallerTheAddressOnItsWay) {
  EXPECT_EQ(OwnAddressFor("0.0.0.0:8601", "ipv4:127.0.0.1:41234"), "127.0.0.1:8601");
  EXPECT_EQ(OwnAddressFor("[::]:8601", "ipv4:127.0.0.1:41234"), "127.0.0.1:8601");
  for (const char* own : {"10.0.0.9:8601", "worker-3:8601", ""}) {
    EXPECT_EQ(OwnAddressFor(own, "ipv4:127.0.0.1:41234"), own);
  }
  for (const char* peer : {"", "unix:/run/ferry", "unknown", "ipv4:", "ipv6:x"}) {
    EXPECT_EQ(OwnAddressFor("0.0.0.0:8601", peer), "0.0.0.0:8601") << peer;
  }
}

TEST(ListenAddressTest, ParsesHostsAndPorts) {
  EXPECT_EQ(ParseListenAddress("0.0.0.0:80")->host, "0.0.0.0");
  EXPECT_EQ(ParseListenAddress("[::1]:8500")->host, "::1");
  EXPECT_EQ(ParseListenAddress("[::1]:8500")->ToString(), "[::1]:8500");
  for (const char* bad : {"", "host", "host:", ":80", "host:65536", "host:-1", "host:x",
                          "http://host:80", "dns:///host:80", "a b:80"}) {
    EXPECT_EQ(ParseListenAddress(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(LoggingTest, AnUnknownLevelIsRefused) {
  LogOptions options;
  options.level = "loud";
  const absl::Status status = InitLogging("test", options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"loud\""));
}

std::string Format(bool json, const std::string& text) {
  spdlog::details::log_msg message("proc", spdlog::level::info, text);
  spdlog::memory_buf_t buffer;
  MakeLogFormatter(json)->format(message, buffer);
  return std::string(buffer.data(), buffer.size());
}

TEST(LoggingTest, LinesAreKeyValuePairs) {
  EXPECT_THAT(Format(false, "request_id=a tokens=3"),
              MatchesRegex("time=[0-9T:.-]+Z level=info process=proc request_id=a tokens=3\n"));
}

TEST(LoggingTest, JsonLinesHaveAMemberPerPair) {
  const std::string line =
      Format(true, "request done request_id=a status=" + LogValue("x \"y\"\nz"));
  EXPECT_THAT(line, HasSubstr("\"message\":\"request done\",\"request_id\":\"a\""));
  EXPECT_THAT(line, HasSubstr("\"status\":\"x \\\"y\\\"\\u000az\"}\n"));
}

TEST(LoggingTest, AValueCannotBreakALine) {
  EXPECT_EQ(LogValue("plain-1"), "plain-1");
  EXPECT_EQ(LogValue(""), "\"\"");
  EXPECT_EQ(LogValue("a b\nlevel=error"), "\"a b\\nlevel=error\"");
  const LogFields fields = ParseLogMessage("word k=" + LogValue("a\\ \"b\"") + " n=1 tail");
  EXPECT_EQ(fields.words, "word tail");
  EXPECT_THAT(fields.pairs, testing::ElementsAre(Pair("k", "a\\ \"b\""), Pair("n", "1")));
}

TEST(SignalsTest, WaitReturnsTheSignalOrTimesOut) {
  BlockTerminationSignals();
  EXPECT_EQ(WaitForTermination(absl::ZeroDuration()), 0);
  kill(getpid(), SIGTERM);
  EXPECT_EQ(WaitForTermination(), SIGTERM);
  kill(getpid(), SIGINT);
  EXPECT_EQ(WaitForTermination(absl::Seconds(10)), SIGINT);
}

TEST(PortFileTest, HoldsBothPortsAndAnEmptyPathWritesNothing) {
  EXPECT_TRUE(WritePortFile("", 1, 2).ok());
  const std::string path = testing::TempDir() + "ports." + std::to_string(getpid());
  ASSERT_TRUE(WritePortFile(path, 8500, 9500).ok());
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(text.str(), "grpc_port=8500\nmetrics_port=9500\n");
  std::filesystem::remove(path);
  EXPECT_EQ(WritePortFile("/nowhere/ports", 1, 2).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace service
