#include "router/hash_parts.h"

#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"

namespace router {
namespace {

using block_hash::BlockHash;

BlockHash Hash(uint32_t value) {
  BlockHash hash;
  for (size_t i = 0; i < 4; ++i) hash.bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  return hash;
}

TEST(HashPartsTest, EqualsAMapOverRandomHistories) {
  std::mt19937 random(1);
  HashParts<int, 8> parts;
  std::map<uint32_t, int> model;
  for (int step = 0; step < 20000; ++step) {
    const uint32_t key = random() % 500;
    if (random() % 3 > 0) {
      const int value = static_cast<int>(random() % 1000);
      parts[Hash(key)] = value;
      model[key] = value;
    } else {
      EXPECT_EQ(parts.Erase(Hash(key)), model.erase(key) > 0);
    }
    EXPECT_EQ(parts.size(), model.size());
  }
  for (uint32_t key = 0; key < 500; ++key) {
    const int* const value = parts.Find(Hash(key));
    ASSERT_EQ(value != nullptr, model.contains(key)) << key;
    if (value != nullptr) {
      EXPECT_EQ(*value, model[key]);
    }
  }
}

TEST(HashPartsTest, ANewEntryIsAValueOfItsType) {
  HashParts<int, 4> parts;
  EXPECT_EQ(parts[Hash(7)], 0);
  EXPECT_EQ(parts.size(), 1u);
}

TEST(HashPartsTest, ThePartsTogetherAreTheWhole) {
  constexpr size_t kParts = 16;
  constexpr uint32_t kEntries = 1000;
  HashParts<int, kParts> parts;
  for (uint32_t key = 0; key < kEntries; ++key) parts[Hash(key)] = 1;
  const size_t bytes = parts.approximate_bytes();
  EXPECT_GE(bytes, kEntries * (sizeof(BlockHash) + sizeof(int)));
  std::set<BlockHash> taken;
  for (size_t part = 0; part < kParts; ++part) {
    for (const auto& [hash, value] : parts.TakePart(part)) {
      EXPECT_TRUE(taken.insert(hash).second);
      EXPECT_EQ(parts.Find(hash), nullptr);
    }
    EXPECT_EQ(parts.size(), kEntries - taken.size());
  }
  EXPECT_EQ(taken.size(), kEntries);
  EXPECT_LT(parts.approximate_bytes(), bytes / 10);
}

}  // namespace
}  // namespace router
