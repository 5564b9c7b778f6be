#include "service/heap.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

}  // namespace
}  // namespace service
