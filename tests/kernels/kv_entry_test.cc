#include "kernels/cpu/kv_entry.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
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

// Two blocks of `block_size` entries, every byte 0xcc.
struct TwoBlocks {
  TwoBlocks(KvFormat format, int32_t block_size, int32_t dim, int32_t rope_dim) {
    pages.format = format;
    pages.block_size = block_size;
    pages.entry_bytes = KvEntryBytes(format, dim, rope_dim);
    pages.block_stride = int64_t{block_size} * pages.entry_bytes + 5;  // not ours
    bytes.assign(2 * pages.block_stride, 0xcc);
    pages.base = reinterpret_cast<std::byte*>(bytes.data());
    EXPECT_TRUE(CheckKvPages(pages, dim, rope_dim).ok());
  }
  KvPages pages;
  std::vector<uint8_t> bytes;
};

TEST(KvEntryTest, All256Float8CodesAreRight) {
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

TEST(KvEntryTest, Float8RoundsToNearestEvenBetweenNeighbours) {
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

TEST(KvEntryTest, Float8Saturates) {
  for (const float value : {448.0f, 449.0f, 464.0f, 1e30f, kInfinity}) {
    EXPECT_EQ(E4m3FromFloat(value), 0x7e);
    EXPECT_EQ(E4m3FromFloat(-value), 0xfe);
  }
  EXPECT_EQ(E4m3FromFloat(0x1p-11f), 0x00);
  EXPECT_EQ(E4m3FromFloat(-0.0f), 0x80);
}

TEST(KvEntryTest, Bfloat16RoundsToNearestEven) {
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

TEST(KvEntryTest, TheGroupScaleIsTheSmallestPowerOfTwoThatFits) {
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

TEST(KvEntryTest, EntriesHaveTheSizesOfTheirFormats) {
  EXPECT_EQ(KvEntryBytes(KvFormat::kFloat32, 512, 64), 2304);
  EXPECT_EQ(KvEntryBytes(KvFormat::kBfloat16, 512, 64), 1152);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8Latent, 512, 64), 656);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8Latent, 130, 6), 130 + 8 + 12);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8IndexKey, 128, 0), 132);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8IndexKey, 32, 0), 36);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8IndexKey, 129, 0), 129 + 8);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8SharedKv, 448, 64), 584);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8SharedKv, 30, 6), 30 + 12 + 8);
  EXPECT_EQ(KvEntryBytes(KvFormat::kFp8SharedKv, 520, 6), 520 + 12 + 16);  // 9 groups
  EXPECT_EQ(KvBlockMultiple(KvFormat::kFp8SharedKv, 448, 64), 576);
  EXPECT_EQ(KvBlockMultiple(KvFormat::kFp8IndexKey, 128, 0), 1);
}

TEST(KvEntryTest, AFloat8LatentHasTheseBytes) {
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
  TwoBlocks cache(KvFormat::kFp8Latent, /*block_size=*/2, 130, 3);
  StoreEntry(cache.pages, PlaceOfSlot(cache.pages, 3), latent.data(), 130, k_rope.data(), 3);

  // The second entry of the second block.
  std::vector<uint8_t> expected(cache.bytes.size(), 0xcc);
  const auto entry = expected.begin() + (2 * 144 + 5) + 144;
  std::fill_n(entry, 130, 0);
  entry[0] = 0x7e;
  entry[1] = 0xd8;
  entry[2] = 0x01;
  entry[127] = 0x68;
  entry[128] = 0x78;
  entry[129] = 0xd7;
  const uint8_t rest[] = {0x00, 0x00, 0x80, 0x3c,               // 2^-6 as float32
                          0x00, 0x00, 0x00, 0x3b,               // 2^-9
                          0x80, 0x3f, 0x00, 0xc0, 0x80, 0x3f};  // 1, -2, 1 + 2^-8 to even
  std::copy(std::begin(rest), std::end(rest), entry + 130);
  EXPECT_EQ(cache.bytes, expected);

  std::vector<float> read(133);
  LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 3), 130, 3, read.data(), read.data() + 130);
  latent[129] = -15 * 0x1p-9f;
  latent.insert(latent.end(), {1.0f, -2.0f, 1.0f});
  EXPECT_EQ(read, latent);
}

TEST(KvEntryTest, ABlockOfFloat8IndexKeysHasTheseBytes) {
  // Two keys of 130 values a block: 2 * 130 data bytes, then 2 * 2 scales.
  std::vector<float> key(130, 0.0f);
  key[0] = 7.0f;
  key[129] = 0.5f;
  TwoBlocks cache(KvFormat::kFp8IndexKey, /*block_size=*/2, 130, 0);
  StoreEntry(cache.pages, PlaceOfSlot(cache.pages, 1), key.data(), 130, nullptr, 0);
  std::vector<uint8_t> expected(cache.bytes.size(), 0xcc);
  std::fill_n(expected.begin() + 130, 130, 0);  // the second key of the first block
  expected[130] = 0x7e;
  expected[130 + 129] = 0x78;
  const uint8_t scales[] = {0x00, 0x00, 0x80, 0x3c, 0x00, 0x00, 0x00, 0x3b};  // 2^-6, 2^-9
  std::copy(std::begin(scales), std::end(scales), expected.begin() + 260 + 8);
  EXPECT_EQ(cache.bytes, expected);
  // The other key of the block lies before it, its scales too.
  StoreEntry(cache.pages, PlaceOfSlot(cache.pages, 0), key.data(), 130, nullptr, 0);
  std::copy_n(expected.begin() + 130, 130, expected.begin());
  std::copy_n(expected.begin() + 268, 8, expected.begin() + 260);
  EXPECT_EQ(cache.bytes, expected);
  std::vector<float> read(130);
  LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 1), 130, 0, read.data(), nullptr);
  EXPECT_EQ(read, key);
}

TEST(KvEntryTest, ABlockOfFloat8SharedKvHasTheseBytes) {
  // Two entries of 65 + 2 values: rows of 65 + 4 bytes, then 8 scale bytes each.
  std::vector<float> values(65, 0.0f);
  values[0] = 7.0f;     // 448 at scale 2^-6, byte 121
  values[63] = -1.0f;   // -64: 0x80 | 13 << 3
  values[64] = 100.0f;  // scale 2^-2, byte 125; 400 lies between 384 and 416, to even: 0x7c
  const float rope[] = {1.0f, 0x1.03p0f};
  TwoBlocks cache(KvFormat::kFp8SharedKv, /*block_size=*/2, 65, 2);
  StoreEntry(cache.pages, PlaceOfSlot(cache.pages, 3), values.data(), 65, rope, 2);
  std::vector<uint8_t> expected(cache.bytes.size(), 0xcc);
  const auto block = expected.begin() + 2 * 77 + 5;
  std::fill_n(block + 69, 65, 0);
  block[69] = 0x7e;
  block[69 + 63] = 0xe8;
  block[69 + 64] = 0x7c;
  const uint8_t rest[] = {0x80, 0x3f, 0x82, 0x3f};
  std::copy(std::begin(rest), std::end(rest), block + 69 + 65);
  const uint8_t scales[] = {121, 125, 0, 0, 0, 0, 0, 0};
  std::copy(std::begin(scales), std::end(scales), block + 2 * 69 + 8);
  EXPECT_EQ(cache.bytes, expected);

  std::vector<float> read(67);
  LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 3), 65, 2, read.data(), read.data() + 65);
  values[64] = 96.0f;  // 384 / 4
  values.push_back(1.0f);
  values.push_back(0x1.04p0f);
  EXPECT_EQ(read, values);
}

// The published layouts (models.md 9.2 to 9.4) at their sizes: a value in every group, packed and
// unpacked.  Group g holds 7 * 2^g, so 0x7e at scale 2^(g - 6), and -2^g, so -64: 0xe8.
struct Published {
  KvFormat format;
  int32_t dim, rope_dim, group;
  std::vector<float> values, rope;

  Published(KvFormat f, int32_t d, int32_t r, int32_t g)
      : format(f), dim(d), rope_dim(r), group(g), values(d, 0.0f), rope(r, 0.0f) {
    for (int32_t i = 0; i < dim / group; ++i) {
      values[i * group] = std::ldexp(7.0f, i);
      values[i * group + group - 1] = std::ldexp(-1.0f, i);
    }
    if (rope_dim > 0) {
      rope[0] = 1.0f;              // 0x3f80
      rope[rope_dim - 1] = -2.5f;  // 0xc020
    }
  }
  // Stores it as entry 1 of the second of two blocks of two; `expected` gets that block's bytes,
  // 0xcc where nothing is written.
  void ExpectBytes(const std::function<void(uint8_t* block)>& expected) const {
    TwoBlocks cache(format, /*block_size=*/2, dim, rope_dim);
    StoreEntry(cache.pages, PlaceOfSlot(cache.pages, 3), values.data(), dim, rope.data(), rope_dim);
    std::vector<uint8_t> all(cache.bytes.size(), 0xcc);
    expected(all.data() + cache.pages.block_stride);
    EXPECT_EQ(cache.bytes, all);
    std::vector<float> back(dim), rope_back(rope_dim);
    LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 3), dim, rope_dim, back.data(),
              rope_back.data());
    EXPECT_EQ(back, values);
    EXPECT_EQ(rope_back, rope);
  }
  void PutValues(uint8_t* at) const {
    std::fill_n(at, dim, 0);
    for (int32_t i = 0; i < dim; i += group) {
      at[i] = 0x7e;
      at[i + group - 1] = 0xe8;
    }
  }
  static void PutRope(uint8_t* at) {
    std::fill_n(at, 128, 0);
    at[0] = 0x80;
    at[1] = 0x3f;
    at[126] = 0x20;
    at[127] = 0xc0;
  }
};

TEST(KvEntryTest, TheLatentOf656Bytes) {
  const Published latent(KvFormat::kFp8Latent, 512, 64, 128);
  latent.ExpectBytes([&](uint8_t* block) {
    uint8_t* const entry = block + 656;
    latent.PutValues(entry);
    // 2^-6, 2^-5, 2^-4, 2^-3 as float32.
    const uint8_t scales[] = {0, 0, 0x80, 0x3c, 0, 0, 0x00, 0x3d,
                              0, 0, 0x80, 0x3d, 0, 0, 0x00, 0x3e};
    std::copy(std::begin(scales), std::end(scales), entry + 512);
    Published::PutRope(entry + 528);
  });
}

TEST(KvEntryTest, TheSharedKvOf584Bytes) {
  const Published kv(KvFormat::kFp8SharedKv, 448, 64, 64);
  kv.ExpectBytes([&](uint8_t* block) {
    kv.PutValues(block + 576);
    Published::PutRope(block + 576 + 448);
    // Behind both entries: 2^-6 to 2^0 as exponents, and a zero.
    const uint8_t scales[] = {121, 122, 123, 124, 125, 126, 127, 0};
    std::copy(std::begin(scales), std::end(scales), block + 2 * 576 + 8);
  });
}

TEST(KvEntryTest, TheIndexKeyOf132Bytes) {
  const Published key(KvFormat::kFp8IndexKey, 128, 0, 128);
  key.ExpectBytes([&](uint8_t* block) {
    key.PutValues(block + 128);
    const uint8_t scale[] = {0, 0, 0x80, 0x3c};  // behind both keys
    std::copy(std::begin(scale), std::end(scale), block + 2 * 128 + 4);
  });
}

TEST(KvEntryTest, AnInfiniteValueDoesNotComeBackAsANumber) {
  for (const KvFormat format :
       {KvFormat::kFp8Latent, KvFormat::kFp8IndexKey, KvFormat::kFp8SharedKv}) {
    TwoBlocks cache(format, 2, 4, 0);
    const float values[] = {1.0f, kInfinity, 2.0f, 3.0f};
    float read[4];
    StoreEntry(cache.pages, PlaceOfSlot(cache.pages, 1), values, 4, nullptr, 0);
    LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 1), 4, 0, read, nullptr);
    EXPECT_FALSE(std::isfinite(read[1]));
  }
}

TEST(KvEntryTest, ABfloat16EntryHasTheseBytes) {
  const float latent[] = {1.0f, -0.5f};
  const float k_rope[] = {3.0f, 0x1.03p0f};
  TwoBlocks cache(KvFormat::kBfloat16, /*block_size=*/2, 2, 2);
  StoreEntry(cache.pages, PlaceOfSlot(cache.pages, 1), latent, 2, k_rope, 2);
  const uint8_t entry[] = {0x80, 0x3f, 0x00, 0xbf, 0x40, 0x40, 0x82, 0x3f};
  std::vector<uint8_t> expected(cache.bytes.size(), 0xcc);
  std::copy(std::begin(entry), std::end(entry), expected.begin() + 8);
  EXPECT_EQ(cache.bytes, expected);
  float read[4];
  LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 1), 2, 2, read, read + 2);
  EXPECT_THAT(read, ::testing::ElementsAre(1.0f, -0.5f, 3.0f, 0x1.04p0f));
}

TEST(KvEntryTest, AReaderAcceptsScalesThatAreNotPowersOfTwo) {
  for (const KvFormat format : {KvFormat::kFp8Latent, KvFormat::kFp8IndexKey}) {
    TwoBlocks cache(format, /*block_size=*/1, 8, 0);
    std::fill_n(cache.bytes.begin(), 8, 0x38);  // 1.0
    const float scale = 0.3f;
    std::memcpy(cache.bytes.data() + 8, &scale, 4);
    float latent[8];
    LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 0), 8, 0, latent, nullptr);
    for (const float value : latent) EXPECT_EQ(value, 0.3f);
  }
}

TEST(KvEntryTest, PagesMustFitTheEntries) {
  const auto refused = [](KvFormat format, int32_t extra_bytes, int32_t rope_dim) {
    std::vector<std::byte> memory(4096);
    KvPages pages{memory.data(), 2048, 4, KvEntryBytes(format, 64, rope_dim) + extra_bytes, format};
    return !CheckKvPages(pages, 64, rope_dim).ok();
  };
  EXPECT_FALSE(refused(KvFormat::kFp8Latent, 4, 8));
  EXPECT_TRUE(refused(KvFormat::kFp8Latent, -1, 8));
  EXPECT_FALSE(refused(KvFormat::kFp8SharedKv, 0, 8));
  EXPECT_TRUE(refused(KvFormat::kFp8SharedKv, 8, 8));  // scales would not be found
  EXPECT_FALSE(refused(KvFormat::kFp8IndexKey, 0, 0));
  EXPECT_TRUE(refused(KvFormat::kFp8IndexKey, 4, 0));
  EXPECT_TRUE(refused(KvFormat::kFp8IndexKey, 0, 8));
}

TEST(KvEntryTest, DecodingEveryCodeInEveryPlaceEqualsTheTable) {
  // Sizes that are not multiples of anything, so that every path of a vectorised decoder is taken.
  for (const int32_t rank : {1, 7, 8, 16, 33, 128, 129, 300, 512}) {
    SCOPED_TRACE(rank);
    TwoBlocks cache(KvFormat::kFp8Latent, /*block_size=*/1, rank, 0);
    uint8_t* entry = cache.bytes.data();
    const int32_t num_groups = (rank + 127) / 128;
    std::vector<float> latent(rank);
    for (int shift = 0; shift < 256; ++shift) {
      for (int32_t i = 0; i < rank; ++i) entry[i] = static_cast<uint8_t>(i + shift);
      for (int32_t group = 0; group < num_groups; ++group) {
        const float scale = std::ldexp(1.25f, group);
        std::memcpy(entry + rank + 4 * group, &scale, 4);
      }
      LoadEntry(cache.pages, PlaceOfSlot(cache.pages, 0), rank, 0, latent.data(), nullptr);
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
