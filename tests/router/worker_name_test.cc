#include "router/worker_name.h"

#include <atomic>
#include <future>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/name_watch.h"

namespace router {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(WorkerNameTest, AnAddressAName) {
  EXPECT_EQ(ParseWorkerName("10.0.0.5:8601")->kind, WorkerName::Kind::kAddress);
  const auto hosts = ParseWorkerName("dns:///prefill.example:8601");
  ASSERT_TRUE(hosts.ok()) << hosts.status();
  EXPECT_EQ(hosts->kind, WorkerName::Kind::kHosts);
  EXPECT_EQ(hosts->host, "prefill.example");
  EXPECT_EQ(hosts->port, 8601);
  const auto services = ParseWorkerName("dns:///_grpc._tcp.prefill");
  ASSERT_TRUE(services.ok()) << services.status();
  EXPECT_EQ(services->kind, WorkerName::Kind::kServices);
  EXPECT_EQ(services->host, "_grpc._tcp.prefill");
}

TEST(WorkerNameTest, WhatIsNeitherIsNamed) {
  for (const char* text : {"", "nowhere", "a:0", "a:70000", "dns:///", "dns:///name",
                           "dns:///name:0", "dns:///:8601", "dns://name:8601", "dns:///a/b:1"}) {
    const auto parsed = ParseWorkerName(text);
    EXPECT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(text));
  }
}

TEST(WorkerNameTest, LooksUpWithoutAServerWhatNeedsNone) {
  EXPECT_THAT(*LookUp(*ParseWorkerName("dns:///127.0.0.1:8601")), ElementsAre("127.0.0.1:8601"));
  EXPECT_THAT(*LookUp(*ParseWorkerName("dns:///[::1]:8601")), ElementsAre("[::1]:8601"));
}

TEST(NameWatchTest, AsksForEveryNameAgainAndAgain) {
  std::atomic<int> first = 0;
  std::atomic<int> second = 0;
  std::promise<void> enough;
  const NameWatch watch(
      {*ParseWorkerName("dns:///a:1"), *ParseWorkerName("dns:///b:2")}, absl::Milliseconds(1),
      [&](size_t name, const NameWatch::Found& found) {
        EXPECT_EQ(found.ok(), name == 0);
        ++(name == 0 ? first : second);
        if (name == 1 && second == 3) enough.set_value();
      },
      [](const WorkerName& name) -> NameWatch::Found {
        if (name.host == "a") return std::vector<std::string>{"10.0.0.1:1"};
        return absl::UnavailableError("no server");
      });
  enough.get_future().wait();
  EXPECT_GE(first, 3);
}

TEST(NameWatchTest, EndsAtOnceWhileTheResolverHangs) {
  struct Gate {
    std::promise<void> inside;
    std::promise<void> open;
    std::promise<void> left;
  };
  const auto gate = std::make_shared<Gate>();
  std::atomic<bool> told = false;
  {
    const NameWatch watch(
        {*ParseWorkerName("dns:///a:1")}, absl::Milliseconds(1),
        [&told](size_t, const NameWatch::Found&) { told = true; },
        [gate](const WorkerName&) -> NameWatch::Found {
          gate->inside.set_value();
          gate->open.get_future().wait();
          gate->left.set_value();
          return absl::UnavailableError("at last");
        });
    gate->inside.get_future().wait();
  }
  gate->open.set_value();
  gate->left.get_future().wait();
  EXPECT_FALSE(told);
}

}  // namespace
}  // namespace router
