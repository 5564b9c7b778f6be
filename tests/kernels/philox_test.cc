#include "kernels/philox.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kernels {
namespace {

using ::testing::ElementsAre;

// Known answers of philox4x32-10 published with the paper's library (Random123, kat_vectors).
TEST(PhiloxTest, EqualsTheKnownAnswers) {
  EXPECT_THAT(Philox4x32({{0, 0, 0, 0}}, 0, 0).words,
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(
      Philox4x32({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, 0xffffffff, 0xffffffff).words,
      ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      Philox4x32({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0).words,
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(PhiloxTest, SeedBranchAndPositionEachChangeTheNumber) {
  EXPECT_EQ(SamplingNumber(0, 0, 0), 0x6627e8d5u);
  const std::set<uint32_t> numbers = {
      SamplingNumber(0, 0, 0), SamplingNumber(1, 0, 0), SamplingNumber(uint64_t{1} << 32, 0, 0),
      SamplingNumber(0, 1, 0), SamplingNumber(0, 0, 1), SamplingNumber(0, 1, 1)};
  EXPECT_EQ(numbers.size(), 6u);
}

}  // namespace
}  // namespace kernels
