#include "service/heap.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace service {
namespace {

// The test's own arguments, after LimitHeap.
std::vector<std::string> arguments;

TEST(HeapTest, TheProgramBeginsAnewUnderItsNameWithItsArguments) {
  ASSERT_NE(std::getenv("GLIBC_TUNABLES"), nullptr);
  std::string name;
  std::ifstream("/proc/self/comm") >> name;
  EXPECT_EQ(name, "heap_test");
  // As the system knows them.
  std::vector<std::string> given;
  std::ifstream command_line("/proc/self/cmdline");
  for (std::string argument; std::getline(command_line, argument, '\0');) given.push_back(argument);
  EXPECT_EQ(arguments, given);
}

TEST(HeapTest, WhatIsSaidOfTheHeapAlreadyIsLeftAsItIs) {
  char* argv[] = {const_cast<char*>("begun anew"), nullptr};
  const std::string before = std::getenv("GLIBC_TUNABLES");
  LimitHeap(argv);  // returns
  EXPECT_EQ(std::getenv("GLIBC_TUNABLES"), before);
}

TEST(HeapTest, AProgramBeginsAnewOnceThoughItsEnvironmentIsTakenAway) {
  char* argv[] = {const_cast<char*>("begun anew twice"), nullptr};
  const std::string before = std::getenv("GLIBC_TUNABLES");
  EXPECT_EQ(std::getenv(kBegunAnew), nullptr);
  unsetenv("GLIBC_TUNABLES");
  setenv(kBegunAnew, "1", /*overwrite=*/1);
  LimitHeap(argv);  // returns
  EXPECT_EQ(std::getenv(kBegunAnew), nullptr) << "its children may begin anew";
  setenv("GLIBC_TUNABLES", before.c_str(), /*overwrite=*/1);
}

// Sanitizers bring a heap of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The loader, called by hand with the program: there is nothing to begin anew.
TEST(HeapTest, WhatTheLoaderWasCalledForGoesOn) {
  std::string line, loader;
  for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line) && loader.empty();) {
    if (line.find("/ld-linux") != std::string::npos) loader = line.substr(line.find('/'));
  }
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command =
      "env -u GLIBC_TUNABLES '" + loader + "' '" + program + "' --gtest_filter=None";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

// What malloc_info says.
std::string HeapInfo() {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const stream = open_memstream(&text, &size);
  malloc_info(0, stream);
  std::fclose(stream);
  std::string info(text, size);
  std::free(text);
  return info;
}

TEST(HeapTest, ACrowdOfThreadsSharesAFewArenas) {
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
  const std::string info = HeapInfo();
  int num_arenas = 0;
  for (size_t at = 0; (at = info.find("<heap nr=", at)) != std::string::npos; ++at) ++num_arenas;
  EXPECT_GE(num_arenas, 1);
  EXPECT_LE(num_arenas, kMaxHeapArenas);
}

// A thread that has freed blocks of many sizes and stays keeps none but small ones: the heap counts
// what a thread keeps as in use.
TEST(HeapTest, WhatAThreadHasFreedIsFreeForAll) {
  constexpr size_t kSmallest = 300, kLargest = 1000, kStep = 16, kOfEach = 7;
  std::barrier in_turn(2);
  std::thread thread([&] {
    in_turn.arrive_and_wait();
    std::vector<void*> blocks;
    blocks.reserve(kOfEach * (kLargest - kSmallest));
    for (size_t size = kSmallest; size < kLargest; size += kStep) {
      for (size_t i = 0; i < kOfEach; ++i) blocks.push_back(std::malloc(size));
    }
    for (void* const block : blocks) std::free(block);
    std::vector<void*>().swap(blocks);
    in_turn.arrive_and_wait();  // freed
    in_turn.arrive_and_wait();  // counted
  });
  const size_t before = mallinfo2().uordblks;
  in_turn.arrive_and_wait();
  in_turn.arrive_and_wait();
  const size_t after = mallinfo2().uordblks;
  in_turn.arrive_and_wait();
  thread.join();
  EXPECT_LT(after, before + kLargest * kOfEach);
}

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

int main(int argc, char** argv) {
  service::LimitHeap(argv);
  service::arguments.assign(argv, argv + argc);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
