#include "router/event_loop.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace router {
namespace {

using testing::ElementsAre;

TEST(EventLoopTest, RunsTasksInOrderAndTimersWhenTheyAreDue) {
  EventLoop loop;
  std::vector<int> order;  // the loop's thread only, read after Stop
  std::atomic<bool> last{false};
  loop.Run([&] {
    loop.After(absl::Milliseconds(20), [&] {
      order.push_back(4);
      last = true;
      last.notify_all();
    });
    loop.After(absl::Milliseconds(5), [&] { order.push_back(3); });
    const auto cancelled = loop.After(absl::Milliseconds(1), [&] { order.push_back(99); });
    loop.CancelTimer(cancelled);
    loop.CancelTimer(cancelled);
    loop.Post([&] { order.push_back(2); });
    order.push_back(1);
  });
  last.wait(false);
  loop.Stop();
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4));
}

TEST(EventLoopTest, TheAwakeClockStandsStillWhileTheLoopCannotRun) {
  EventLoop loop;
  const absl::Duration kAway = absl::Milliseconds(700);
  absl::Duration passed, awake;  // the loop's thread only, read after Stop
  std::atomic<bool> last{false};
  loop.Run([&] {
    const absl::Time start = EventLoop::Now();
    const absl::Time awake_start = loop.AwakeNow();
    loop.After(absl::Milliseconds(1), [&, start, awake_start] {
      passed = EventLoop::Now() - start;
      awake = loop.AwakeNow() - awake_start;
      last = true;
      last.notify_all();
    });
    while (EventLoop::Now() - start < kAway) {  // as if the process stood still
    }
  });
  last.wait(false);
  loop.Stop();
  EXPECT_GE(passed, kAway);
  EXPECT_LE(awake, passed - kAway + absl::Milliseconds(1));
}

TEST(EventLoopTest, ManyThreadsMayPostAndStopRunsWhatWasPosted) {
  int64_t sum = 0;  // the loop's thread only, read after Stop
  {
    EventLoop loop;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) loop.Post([&sum] { ++sum; });
      });
    }
    for (std::thread& thread : threads) thread.join();
    loop.Stop();
    loop.Post([&sum] { sum = -1; });  // dropped
  }
  EXPECT_EQ(sum, 4000);
}

}  // namespace
}  // namespace router
