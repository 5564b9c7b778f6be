#include "engine/cache_memory.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace engine {
namespace {

TEST(CacheMemoryTest, MappedMemoryIsZeroAndStaysWhenMoved) {
  CacheMemory memory = *CacheMemory::Map(3 << 20);
  EXPECT_TRUE(std::all_of(memory.span().begin(), memory.span().end(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
  std::byte* const data = memory.data();
  data[5] = std::byte{1};
  const CacheMemory moved = std::move(memory);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.data()[5], std::byte{1});
  EXPECT_EQ(moved.span().size(), size_t{3} << 20);
}

TEST(CacheMemoryTest, MemoryThatIsNotThereIsNamed) {
  const auto memory = CacheMemory::Map(int64_t{1} << 60);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(memory.status().message().find("1152921504606846976"), std::string::npos);
}

// A device may have more memory than the host.
TEST(CacheMemoryDeathTest, ReservedAddressesNeedNoMemoryAndHaveNone) {
  const CacheMemory memory = *CacheMemory::Reserve(int64_t{1} << 42);
  EXPECT_EQ(memory.span().size(), size_t{1} << 42);
  EXPECT_DEATH(memory.data()[0] = std::byte{1}, "");
}

}  // namespace
}  // namespace engine
