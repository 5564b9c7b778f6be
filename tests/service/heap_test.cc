#include "service/heap.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

namespace service {
namespace {

// Ends the process with the number of arenas that a crowd of threads makes.
void ExitWithNumArenas() {
  LimitHeapArenas();
  constexpr int kThreads = 24;
  std::barrier all(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&all] {
      const std::vector<char> block(10000);  // larger than what a thread keeps for itself
      all.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const stream = open_memstream(&text, &size);
  malloc_info(0, stream);
  std::fclose(stream);
  int num_arenas = 0;
  for (const char* at = text; (at = std::strstr(at, "<heap nr=")) != nullptr; ++at) ++num_arenas;
  std::free(text);
  std::_Exit(num_arenas);
}

// In a process of its own: an arena that has been made stays.
TEST(HeapTest, ACrowdOfThreadsSharesAFewArenas) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      ExitWithNumArenas(),
      [](int status) {
        return WIFEXITED(status) && WEXITSTATUS(status) >= 1 &&
               WEXITSTATUS(status) <= kMaxHeapArenas;
      },
      "");
}

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // they bring a heap of their own
int64_t ResidentBytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(HeapTest, WhatIsFreeBetweenBlocksInUseGoesBackToTheSystem) {
  constexpr size_t kBlocks = 8000, kBlockBytes = 10000, kKept = 100;
  std::vector<std::vector<char>> blocks;
  for (size_t i = 0; i < kBlocks; ++i) blocks.emplace_back(kBlockBytes, 'x');
  for (size_t i = 0; i < kBlocks; ++i) {
    if (i % kKept != kKept - 1) std::vector<char>().swap(blocks[i]);
  }
  const int64_t before = ResidentBytes();
  TrimHeap();
  EXPECT_LT(ResidentBytes(), before - int64_t{kBlocks * kBlockBytes} * 9 / 10);
}
#endif

}  // namespace
}  // namespace service
