#include "kernels/cpu/latent_entry.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/convert.h"
#include "kernels/store_kv.h"
#include "tests/kernels/random_tensor.h"

namespace kernels::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Written from the format's definition, with no table and no bit tricks.
double E4m3Value(int bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  const double magnitude = exponent == 0 ? mantissa / 8.0 * std::pow(2.0, -6)
                                         : (1 + mantissa / 8.0) * std::pow(2.0, exponent - 7);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(LatentEntryTest, All256Float8CodesAreRight) {
  for (int bits = 0; bits < 256; ++bits) {
    SCOPED_TRACE(bits);
    const float value = FloatFromE4m3(static_cast<uint8_t>(bits));
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(E4m3FromFloat(value) & 0x7f, 0x7f);
      continue;
    }
    EXPECT_EQ(value, E4m3Value(bits));
    EXPECT_EQ(std::signbit(value), (bits & 0x80) != 0);
    EXPECT_EQ(E4m3FromFloat(value), bits);
  }
  EXPECT_EQ(FloatFromE4m3(0x7e), 448.0f);
  EXPECT_EQ(FloatFromE4m3(0x01), 0x1p-9f);
}

TEST(LatentEntryTest, Float8RoundsToNearestEvenBetweenNeighbours) {
  for (int bits = 0; bits < 0x7e; ++bits) {
    SCOPED_TRACE(bits);
    const float low = static_cast<float>(E4m3Value(bits));
    const float high = static_cast<float>(E4m3Value(bits + 1));
    const float middle = (low + high) / 2;  // exact
    const int even = bits % 2 == 0 ? bits : bits + 1;
    EXPECT_EQ(E4m3FromFloat(middle), even);
    EXPECT_EQ(E4m3FromFloat(std::nextafter(middle, 0.0f)), bits);
    EXPECT_EQ(E4m3FromFloat(std::nextafter(middle, kInfinity)), bits + 1);
    EXPECT_EQ(E4m3FromFloat(-middle), even | 0x80);
  }
}

TEST(LatentEntryTest, Float8Saturates) {
  for (const float value : {448.0f, 449.0f, 464.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(E4m3FromFloat(value), 0x7e);
    EXPECT_EQ(E4m3FromFloat(-value), 0xfe);
  }
  EXPECT_EQ(E4m3FromFloat(0x1p-11f), 0x00);
  EXPECT_EQ(E4m3FromFloat(-0.0f), 0x80);
}

TEST(LatentEntryTest, Bfloat16RoundsToNearestEven) {
  const struct {
    uint32_t bits;
    uint16_t expected;
  } cases[] = {
      {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82},
      {0x3f817fff, 0x3f81}, {0xbf808001, 0xbf81}, {0x7f7fffff, 0x7f80}, {0x7f800000, 0x7f80},
      {0xff800000, 0xff80}, {0x00000001, 0x0000}, {0x80000000, 0x8000}, {0x00008001, 0x0001},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.bits);
    EXPECT_EQ(Bfloat16FromFloat(std::bit_cast<float>(c.bits)), c.expected);
  }
  // A NaN whose payload lies in the lost bits only must not become infinite.
  EXPECT_TRUE(
      std::isnan(FloatFromBfloat16(Bfloat16FromFloat(std::bit_cast<float>(uint32_t{0x7f800001})))));
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = FloatFromBfloat16(static_cast<uint16_t>(bits));
    if (!std::isnan(value)) {
      ASSERT_EQ(Bfloat16FromFloat(value), bits);
    }
  }
}

TEST(LatentEntryTest, TheGroupScaleIsTheSmallestPowerOfTwoThatFits) {
  EXPECT_EQ(Float8GroupScale(448), 1.0f);
  EXPECT_EQ(Float8GroupScale(std::nextafter(448.0f, kInfinity)), 2.0f);
  EXPECT_EQ(Float8GroupScale(std::nextafter(448.0f, 0.0f)), 1.0f);
  EXPECT_EQ(Float8GroupScale(7), 0x1p-6f);
  EXPECT_EQ(Float8GroupScale(1), 0x1p-8f);
  EXPECT_EQ(Float8GroupScale(0), 0x1p-22f);  // 1e-4 / 448 rounded up
  for (const float amax : RandomTensor(1000, 7, 100)) {
    const float scale = Float8GroupScale(std::fabs(amax));
    int exponent;
    EXPECT_EQ(std::frexp(scale, &exponent), 0.5f);
    EXPECT_LE(std::fabs(amax), 448 * scale);
    if (std::fabs(amax) > 1e-4f) {
      EXPECT_GT(std::fabs(amax), 448 * scale / 2);
    }
  }
}

TEST(LatentEntryTest, EntriesHaveTheSizesOfTheirFormats) {
  EXPECT_EQ(LatentEntryBytes(KvFormat::kFloat32, 512, 64), 2304);
  EXPECT_EQ(LatentEntryBytes(KvFormat::kBfloat16, 512, 64), 1152);
  EXPECT_EQ(LatentEntryBytes(KvFormat::kFp8Latent, 512, 64), 656);
  EXPECT_EQ(LatentEntryBytes(KvFormat::kFp8Latent, 130, 6), 130 + 8 + 12);
}

TEST(LatentEntryTest, AFloat8EntryHasTheseBytes) {
  // 130 latent values: a group of 128 with largest magnitude 7 (scale 2^-6), one of 2 with 0.5
  // (2^-9).
  std::vector<float> latent(130, 0.0f);
  latent[0] = 7.0f;      // 448 stored: 0x7e
  latent[1] = -0.25f;    // -16: exponent 4 + 7 = 11, mantissa 0: 0xd8
  latent[2] = 0x1p-15f;  // 2^-9, the smallest: 0x01
  latent[127] = 1.0f;    // 64: 13 << 3: 0x68
  latent[128] = 0.5f;    // 256: 15 << 3: 0x78
  latent[129] = -0.03f;  // -15.36 -> -15: 1.875 * 8: exponent 10, mantissa 7: 0xd7
  const std::vector<float> k_rope = {1.0f, -2.0f, 0x1.01p0f};
  std::vector<std::byte> entry(LatentEntryBytes(KvFormat::kFp8Latent, 130, 3) + 1, std::byte{0xcc});
  EncodeEntry(KvFormat::kFp8Latent, latent.data(), 130, k_rope.data(), 3, entry.data());

  std::vector<uint8_t> expected(130, 0);
  expected[0] = 0x7e;
  expected[1] = 0xd8;
  expected[2] = 0x01;
  expected[127] = 0x68;
  expected[128] = 0x78;
  expected[129] = 0xd7;
  const uint8_t tail[] = {0x00, 0x00, 0x80, 0x3c,              // 2^-6 as float32
                          0x00, 0x00, 0x00, 0x3b,              // 2^-9
                          0x80, 0x3f, 0x00, 0xc0, 0x80, 0x3f,  // 1, -2, 1 + 2^-8 to even
                          0xcc};                               // not ours
  expected.insert(expected.end(), std::begin(tail), std::end(tail));
  ASSERT_EQ(entry.size(), expected.size());
  for (size_t i = 0; i < entry.size(); ++i) {
    EXPECT_EQ(static_cast<int>(entry[i]), expected[i]) << "byte " << i;
  }
}

TEST(LatentEntryTest, ABfloat16EntryHasTheseBytes) {
  const float latent[] = {1.0f, -0.5f};
  const float k_rope[] = {3.0f, 0x1.03p0f};
  std::byte entry[8];
  EncodeEntry(KvFormat::kBfloat16, latent, 2, k_rope, 2, entry);
  const uint8_t expected[] = {0x80, 0x3f, 0x00, 0xbf, 0x40, 0x40, 0x82, 0x3f};
  EXPECT_EQ(std::memcmp(entry, expected, 8), 0);
}

TEST(LatentEntryTest, AReaderAcceptsScalesThatAreNotPowersOfTwo) {
  std::byte entry[8 + 4] = {};
  for (std::byte& b : entry) b = std::byte{0x38};  // 1.0
  const float scale = 0.3f;
  std::memcpy(entry + 8, &scale, 4);
  float latent[8];
  DecodeEntry(KvFormat::kFp8Latent, entry, 8, 0, latent, nullptr);
  for (const float value : latent) EXPECT_EQ(value, 0.3f);
}

TEST(LatentEntryTest, DecodingEveryCodeInEveryPlaceEqualsTheTable) {
  // Sizes that are not multiples of anything, so that every path of a vectorised decoder is taken.
  for (const int32_t rank : {1, 7, 8, 16, 33, 128, 129, 300, 512}) {
    SCOPED_TRACE(rank);
    std::vector<std::byte> entry(LatentEntryBytes(KvFormat::kFp8Latent, rank, 0));
    const int32_t num_groups = (rank + 127) / 128;
    std::vector<float> latent(rank);
    for (int shift = 0; shift < 256; ++shift) {
      for (int32_t i = 0; i < rank; ++i) entry[i] = static_cast<std::byte>(i + shift);
      for (int32_t group = 0; group < num_groups; ++group) {
        const float scale = std::ldexp(1.25f, group);
        std::memcpy(entry.data() + rank + 4 * group, &scale, 4);
      }
      DecodeEntry(KvFormat::kFp8Latent, entry.data(), rank, 0, latent.data(), nullptr);
      for (int32_t i = 0; i < rank; ++i) {
        const uint8_t code = static_cast<uint8_t>(i + shift);
        if ((code & 0x7f) == 0x7f) {
          ASSERT_TRUE(std::isnan(latent[i]));
        } else {
          ASSERT_EQ(latent[i], static_cast<float>(E4m3Value(code) * std::ldexp(1.25, i / 128)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace kernels::cpu
