#include "tracing/span_exporter.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tracing {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// An HTTP server that notes what is posted and answers with the status that is next.
class Collector {
 public:
  explicit Collector(std::vector<int> statuses = {}) : statuses_(std::move(statuses)) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        listen(listener_, 8) != 0 ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
      ADD_FAILURE() << "no listener";
    }
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Main(); });
  }
  ~Collector() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  std::string endpoint() const { return absl::StrCat("http://127.0.0.1:", port_); }
  // The whole requests, when there are so many.
  std::vector<std::string> WaitFor(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return requests_.size() >= count; });
    return requests_;
  }

 private:
  void Main() {
    for (int fd; (fd = accept(listener_, nullptr, nullptr)) >= 0; close(fd)) {
      while (Serve(fd)) {
      }
    }
  }
  bool Serve(int fd) {
    std::string text;
    size_t length = std::string::npos;
    while (text.size() < length) {
      char buffer[4096];
      const ssize_t got = recv(fd, buffer, sizeof(buffer), 0);
      if (got <= 0) return false;
      text.append(buffer, got);
      const size_t end = text.find("\r\n\r\n");
      const size_t stated = text.find("Content-Length: ");
      if (end == std::string::npos || stated == std::string::npos) continue;
      length = end + 4 + std::stoul(text.substr(stated + 16));
    }
    int status = 200;
    {
      const std::lock_guard lock(mutex_);
      requests_.push_back(text);
      if (requests_.size() <= statuses_.size()) status = statuses_[requests_.size() - 1];
      changed_.notify_all();
    }
    const std::string answer =
        absl::StrCat("HTTP/1.1 ", status, " x\r\nContent-Length: 2\r\n\r\n{}");
    return send(fd, answer.data(), answer.size(), MSG_NOSIGNAL) > 0;
  }

  const std::vector<int> statuses_;
  int listener_ = -1;
  int port_ = 0;
  std::thread thread_;
  std::mutex mutex_;  // guards requests_
  std::condition_variable changed_;
  std::vector<std::string> requests_;
};

Span Named(const std::string& name) {
  return {.context = BeginSpan(""),
          .name = name,
          .start = absl::FromUnixNanos(1700000000123456789),
          .end = absl::FromUnixNanos(1700000001123456789)};
}

SpanExporter::Options To(const std::string& endpoint) {
  return {.endpoint = endpoint,
          .service_name = "ferry-test",
          .service_version = "1",
          .first_back_off = absl::Milliseconds(1)};
}

void WaitUntil(const std::function<bool()>& condition) {
  while (!condition()) absl::SleepFor(absl::Milliseconds(1));  // the test's time limit bounds it
}

TEST(SpanExporterTest, ASpanArrivesWithAllThatIsKnownOfIt) {
  Collector collector;
  const auto exporter = SpanExporter::Create(To(collector.endpoint() + "/"));
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  Span span = Named("prefill");
  span.context = BeginSpan("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
  span.attributes = {{"worker", std::string("10.0.0.5:8601")},
                     {"tokens", int64_t{7}},
                     {"share", 0.5},
                     {"bytes", std::string("\xff")}};
  span.error = "lost";
  span.is_server = true;
  (*exporter)->Export({span});
  const std::string request = collector.WaitFor(1)[0];
  EXPECT_THAT(request, HasSubstr("POST /v1/traces HTTP/1.1\r\n"));
  EXPECT_THAT(request, HasSubstr("Content-Type: application/json\r\n"));
  const json body = json::parse(request.substr(request.find("\r\n\r\n")));
  const json& resource = body["resourceSpans"][0];
  EXPECT_EQ(resource["resource"]["attributes"][0],
            json::parse(R"({"key": "service.name", "value": {"stringValue": "ferry-test"}})"));
  const json& sent = resource["scopeSpans"][0]["spans"][0];
  EXPECT_EQ(sent["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(sent["parentSpanId"], "00f067aa0ba902b7");
  EXPECT_EQ(sent["spanId"], span.context.span_id);
  EXPECT_EQ(sent["kind"], 2);
  EXPECT_EQ(sent["startTimeUnixNano"], "1700000000123456789");
  EXPECT_EQ(sent["endTimeUnixNano"], "1700000001123456789");
  EXPECT_EQ(sent["status"], json::parse(R"({"code": 2, "message": "lost"})"));
  EXPECT_EQ(sent["attributes"][1], json::parse(R"({"key": "tokens", "value": {"intValue": "7"}})"));
  WaitUntil([&] { return (*exporter)->num_exported() == 1; });
}

TEST(SpanExporterTest, AnOverloadedCollectorIsAskedAgainARefusalIsFinal) {
  Collector collector({503, 429, 200, 400, 200});
  const auto exporter = SpanExporter::Create(To(collector.endpoint()));
  ASSERT_TRUE(exporter.ok());
  (*exporter)->Export({Named("first")});
  const std::vector<std::string> tries = collector.WaitFor(3);
  for (const std::string& request : tries) EXPECT_THAT(request, HasSubstr("\"first\""));
  WaitUntil([&] { return (*exporter)->num_exported() == 1; });
  (*exporter)->Export({Named("second")});
  WaitUntil([&] { return (*exporter)->num_dropped() == 1; });
  (*exporter)->Export({Named("third")});
  WaitUntil([&] { return (*exporter)->num_exported() == 2; });
  EXPECT_EQ(collector.WaitFor(5).size(), 5u);
}

TEST(SpanExporterTest, WithoutACollectorTheQueueIsBoundedAndNobodyWaits) {
  SpanExporter::Options options = To("http://127.0.0.1:1");
  options.max_queue = 10;
  const auto exporter = SpanExporter::Create(options);
  ASSERT_TRUE(exporter.ok());
  for (int i = 0; i < 100; ++i) (*exporter)->Export({Named("a"), Named("b")});
  EXPECT_EQ((*exporter)->num_dropped(), 190);
  EXPECT_EQ((*exporter)->num_exported(), 0);
}

TEST(SpanExporterTest, WhatIsQueuedAtTheEndIsSentYet) {
  Collector collector;
  {
    const auto exporter = SpanExporter::Create(To(collector.endpoint()));
    ASSERT_TRUE(exporter.ok());
    (*exporter)->Export({Named("last")});
  }
  EXPECT_THAT(collector.WaitFor(1)[0], HasSubstr("\"last\""));
}

}  // namespace
}  // namespace tracing
