#include "kernels/cpu/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kernels::cpu {
namespace {

TEST(ThreadPoolTest, EveryTaskRunsExactlyOnce) {
  for (const int32_t num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (const int64_t num_tasks : {0, 1, 2, 3, 64, 1000}) {
      std::vector<int32_t> runs(static_cast<size_t>(num_tasks), 0);
      pool.ParallelFor(num_tasks, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
      EXPECT_EQ(runs, std::vector<int32_t>(static_cast<size_t>(num_tasks), 1));
    }
  }
}

// Plain (not atomic) data goes from loop to loop: a missing happens-before edge is a data race that
// the thread sanitizer sees, and a late worker that ran an old loop's task would break the sums.
TEST(ThreadPoolTest, WhatOneLoopWroteTheNextOneReads) {
  ThreadPool pool(4);
  constexpr int64_t kTasks = 7;
  std::vector<int64_t> values(kTasks, 0);
  for (int64_t round = 0; round < 3000; ++round) {
    std::vector<int64_t> next(kTasks, 0);
    pool.ParallelFor(kTasks, [&](int64_t i) {
      next[static_cast<size_t>(i)] = values[static_cast<size_t>((i + 1) % kTasks)] + 1;
    });
    values = next;
  }
  for (const int64_t value : values) EXPECT_EQ(value, 3000);
}

TEST(ThreadPoolTest, SleepingWorkersWakeUp) {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    // Two tasks that wait for each other: only two threads can finish them.
    std::atomic<int> arrived{0};
    pool.ParallelFor(2, [&](int64_t) {
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();
    });
    EXPECT_EQ(arrived.load(), 2);
    // Longer than the workers' spin, so that the next round finds them asleep.
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(300);
    while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
  }
}

TEST(ThreadPoolTest, ScratchKeepsItsPlaceUntilItGrows) {
  ThreadPool pool(1);
  std::byte* first = pool.Scratch(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(pool.Scratch(50), first);
  EXPECT_NE(pool.Scratch(1 << 20), nullptr);
}

TEST(ThreadPoolDeathTest, NestedLoopsAreABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        ThreadPool pool(2);
        pool.ParallelFor(2, [&](int64_t) { pool.ParallelFor(2, [](int64_t) {}); });
      },
      "ParallelFor inside ParallelFor");
}

}  // namespace
}  // namespace kernels::cpu
