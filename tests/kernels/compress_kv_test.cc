#include "kernels/cpu/compress_kv.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/kv_entry.h"
#include "kernels/store_kv.h"
#include "tests/kernels/compressor.h"
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

using Shape = CompressorShape;

absl::Status Compress(Compressor& compressor, ThreadPool& pool,
                      const std::vector<Compressor::Chunk>& chunks,
                      const std::vector<Compressor::Tokens>& kv,
                      const std::vector<Compressor::Tokens>& gate) {
  return compressor.Compress(
      [&](const CompressKvParams& params) { return CompressKv(pool, params); }, chunks, kv, gate);
}

class CompressKvTest : public ::testing::TestWithParam<Shape> {
 protected:
  ThreadPool pool_{3};
};

TEST_P(CompressKvTest, EntriesEqualTheDoubleReference) {
  const Shape& shape = GetParam();
  Compressor compressor(shape, 1);
  const int32_t length = 3 * shape.ratio + (shape.ratio > 1 ? shape.ratio / 2 : 0);
  const auto kv = compressor.RandomTokens(length, 2), gate = compressor.RandomTokens(length, 3);
  const absl::Status status = Compress(compressor, pool_, {{0, 0, length, 2}}, {kv}, {gate});
  ASSERT_TRUE(status.ok()) << status;
  const std::vector<double> expected = compressor.Reference(kv, gate, 3);
  // A few float operations on values of about 1, then half a step of the format.
  const double rel = shape.format == KvFormat::kFloat32    ? 0
                     : shape.format == KvFormat::kBfloat16 ? 0x1p-8
                                                           : 0x1p-4;
  const double abs = shape.format == KvFormat::kFloat32 ? 1e-5 : 1e-3;
  EXPECT_TRUE(numerics::AllClose<double>(compressor.Entries(0, 3), expected,
                                         {.abs = abs, .rel = 1.01 * rel}));
}

// Where the rows of a sequence are cut changes no byte, neither of entries nor of the state.
TEST_P(CompressKvTest, ChunksAndDecodesLeaveTheSameBytes) {
  const Shape& shape = GetParam();
  constexpr int32_t kLength = 133;
  Compressor whole(shape, 1);
  const auto kv = whole.RandomTokens(kLength, 2), gate = whole.RandomTokens(kLength, 3);
  ASSERT_TRUE(Compress(whole, pool_, {{0, 0, kLength, 1}}, {kv}, {gate}).ok());
  for (const int32_t chunk : {1, 3, 4, 5, 31, 32, 33, 127, 128, 129}) {
    Compressor cut(shape, 1);
    for (int32_t begin = 0; begin < kLength; begin += chunk) {
      ASSERT_TRUE(
          Compress(cut, pool_, {{0, begin, std::min(begin + chunk, kLength), 1}}, {kv}, {gate})
              .ok());
    }
    EXPECT_TRUE(cut.cache() == whole.cache()) << "chunks of " << chunk;
    EXPECT_TRUE(numerics::BitEqual(cut.StateOf(1), whole.StateOf(1))) << "chunks of " << chunk;
  }
}

// Three sequences in all phases of their windows, in one call and one by one.
TEST_P(CompressKvTest, ABatchLeavesTheBytesOfEachAlone) {
  const Shape& shape = GetParam();
  Compressor together(shape, 1), alone(shape, 1);
  std::vector<Compressor::Tokens> kv, gate;
  for (uint32_t seq = 0; seq < 3; ++seq) {
    kv.push_back(together.RandomTokens(120, 10 + seq));
    gate.push_back(together.RandomTokens(120, 20 + seq));
  }
  const std::vector<std::vector<Compressor::Chunk>> steps = {
      {{0, 0, 37, 3}, {1, 0, 1, 5}},
      {{1, 1, 2, 5}, {2, 0, 64, 0}, {0, 37, 38, 3}},
      {{0, 38, 120, 3}, {2, 64, 65, 0}, {1, 2, 100, 5}}};
  ThreadPool one(1);
  for (const auto& step : steps) {
    ASSERT_TRUE(Compress(together, pool_, step, kv, gate).ok());
    for (const Compressor::Chunk& chunk : step) {
      ASSERT_TRUE(Compress(alone, one, {chunk}, kv, gate).ok());
    }
  }
  EXPECT_TRUE(together.cache() == alone.cache());
  for (const int32_t slot : {0, 3, 5}) {
    EXPECT_TRUE(numerics::BitEqual(together.StateOf(slot), alone.StateOf(slot)));
  }
  // Slots of nobody keep their NaN.
  EXPECT_TRUE(std::isnan(together.StateOf(2)[0]));
}

INSTANTIATE_TEST_SUITE_P(Shapes, CompressKvTest, ::testing::ValuesIn(CompressorShapes()),
                         [](const auto& info) { return std::string(info.param.name); });

// models.md 7.5: the first entry has no window before it.
TEST(CompressKvFirstEntryTest, PoolsItsOwnWindowOnly) {
  const Shape shape = {"", 4, true, 8, 0, 4};
  Compressor compressor(shape, 1);
  ThreadPool pool(1);
  Compressor::Tokens kv(4 * 16), gate(4 * 16, 0.0f);
  for (size_t token = 0; token < 4; ++token) {
    for (size_t c = 0; c < 16; ++c) kv[token * 16 + c] = c < 8 ? 1e6f : static_cast<float>(c);
  }
  ASSERT_TRUE(Compress(compressor, pool, {{0, 0, 4, 0}}, {kv}, {gate}).ok());
  EXPECT_TRUE(numerics::AllClose<double>(compressor.Entries(0, 1),
                                         compressor.Reference(kv, gate, 1), {.rel = 1e-5}));
}

// Scores far beyond exp's range, rising and falling.
TEST(CompressKvRangeTest, LargeScoresStayFinite) {
  for (const bool rising : {false, true}) {
    const Shape shape = {"", 8, false, 4, 0, 4};
    Compressor compressor(shape, 1);
    ThreadPool pool(1);
    Compressor::Tokens kv = compressor.RandomTokens(8, 2), gate(8 * 4);
    for (int32_t token = 0; token < 8; ++token) {
      std::fill_n(gate.begin() + token * 4, 4,
                  static_cast<float>((rising ? token : 7 - token) * 1000 - 4000));
    }
    ASSERT_TRUE(Compress(compressor, pool, {{0, 0, 8, 0}}, {kv}, {gate}).ok());
    for (const float value : compressor.Entries(0, 1)) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(CompressKvSkipTest, ASequenceWithoutASlotIsLeftAlone) {
  const Shape shape = {"", 4, true, 8, 2, 4};
  Compressor compressor(shape, 1);
  ThreadPool pool(2);
  const auto kv = compressor.RandomTokens(40, 2), gate = compressor.RandomTokens(40, 3);
  const std::vector<std::byte> before = compressor.cache();
  ASSERT_TRUE(Compress(compressor, pool, {{0, 0, 40, -1}}, {kv}, {gate}).ok());
  EXPECT_TRUE(compressor.cache() == before);
  ASSERT_TRUE(
      Compress(compressor, pool, {{0, 0, 40, -1}, {1, 0, 40, 4}}, {kv, kv}, {gate, gate}).ok());
  EXPECT_TRUE(numerics::AllClose<double>(compressor.Entries(1, 10),
                                         compressor.Reference(kv, gate, 10), {.abs = 1e-5}));
}

TEST(CompressKvErrorTest, NamesWhatDoesNotFit) {
  const Shape shape = {"", 4, true, 8, 2, 4};
  Compressor compressor(shape, 1);
  ThreadPool pool(1);
  const std::vector<int32_t> cu = {0, 8}, kv_len = {8}, slots = {0}, no_blocks(40, -1),
                             table(40, 1);
  const std::vector<float> rows(8 * 16);
  const auto message = [&](const CompressKvParams& params) {
    const absl::Status status = CompressKv(pool, params);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  CompressKvParams good = compressor.Params(cu, kv_len, slots, table, rows, rows);
  ASSERT_TRUE(CompressKv(pool, good).ok());
  EXPECT_THAT(message(compressor.Params(cu, kv_len, slots, no_blocks, rows, rows)),
              HasSubstr("entry 0 of sequence 0 has no block"));
  CompressKvParams params = good;
  params.ratio = 0;
  EXPECT_THAT(message(params), HasSubstr("ratio 0"));
  params = good;
  params.rope.max_positions = 4;
  EXPECT_THAT(message(params), HasSubstr("position 4 is outside the rope table of 4"));
  params = good;
  params.gate = nullptr;
  EXPECT_THAT(message(params), HasSubstr("an array is null"));
  params = good;
  params.pages.entry_bytes = 4;
  EXPECT_THAT(message(params), HasSubstr("4"));
}

}  // namespace
}  // namespace kernels::cpu
