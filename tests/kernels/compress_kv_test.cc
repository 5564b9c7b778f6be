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
#include "tests/kernels/test_weights.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kMaxPositions = 600;

struct Shape {
  const char* name;
  int32_t ratio;
  bool overlap;
  int32_t dim;
  int32_t rope_dim;
  int32_t block_entries;
  KvFormat format = KvFormat::kFloat32;

  int32_t channels() const { return overlap ? 2 * dim : dim; }
  int32_t rotary() const { return format == KvFormat::kFp8IndexKey ? 0 : rope_dim; }
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

// One compressor with its cache and its state slots, everything NaN before it is written.
class Compressor {
 public:
  Compressor(const Shape& shape, uint32_t seed) : shape_(shape) {
    bias_ = RandomFloats(int64_t{shape.ratio} * shape.channels(), seed);
    norm_ = RandomFloats(shape.dim, seed + 1);
    for (int32_t p = 0; p < kMaxPositions; ++p) {
      for (int32_t i = 0; i < shape.rope_dim / 2; ++i) {
        const float angle = static_cast<float>(p) * std::pow(100.0f, -static_cast<float>(i));
        cos_.push_back(std::cos(angle));
        sin_.push_back(std::sin(angle));
      }
    }
    const int32_t entry_bytes =
        KvEntryBytes(shape.format, shape.dim - shape.rotary(), shape.rotary());
    block_stride_ = int64_t{shape.block_entries} * entry_bytes + 64;
    cache_.resize(static_cast<size_t>(kBlocks * block_stride_), std::byte{0xff});
    pages_ = {.base = cache_.data(),
              .block_stride = block_stride_,
              .block_size = shape.block_entries,
              .entry_bytes = entry_bytes,
              .format = shape.format};
    state_stride_ = CompressStateBytes(shape.dim, shape.overlap) + 64;
    state_.resize(static_cast<size_t>(kSlots * state_stride_ / 4),
                  std::numeric_limits<float>::quiet_NaN());
  }

  // A chunk of a sequence: its newest rows.
  struct Chunk {
    int32_t seq;
    int32_t begin, end;  // positions
    int32_t slot;
  };
  // Tokens of a sequence: [position, channels].
  using Tokens = std::vector<float>;

  absl::Status Run(ThreadPool& pool, const std::vector<Chunk>& chunks,
                   const std::vector<Tokens>& kv, const std::vector<Tokens>& gate) {
    const auto channels = static_cast<size_t>(shape_.channels());
    std::vector<int32_t> cu = {0}, kv_len, slots, table;
    std::vector<float> kv_rows, gate_rows;
    for (const Chunk& chunk : chunks) {
      cu.push_back(cu.back() + chunk.end - chunk.begin);
      kv_len.push_back(chunk.end);
      slots.push_back(chunk.slot);
      for (int32_t i = 0; i < kBlocksPerSeq; ++i) table.push_back(BlockOf(chunk.seq, i));
      const auto seq = static_cast<size_t>(chunk.seq);
      const auto from = static_cast<size_t>(chunk.begin) * channels;
      const auto to = static_cast<size_t>(chunk.end) * channels;
      kv_rows.insert(kv_rows.end(), kv[seq].begin() + from, kv[seq].begin() + to);
      gate_rows.insert(gate_rows.end(), gate[seq].begin() + from, gate[seq].begin() + to);
    }
    return CompressKv(pool, Params(cu, kv_len, slots, table, kv_rows, gate_rows));
  }

  CompressKvParams Params(const std::vector<int32_t>& cu, const std::vector<int32_t>& kv_len,
                          const std::vector<int32_t>& slots, const std::vector<int32_t>& table,
                          const std::vector<float>& kv, const std::vector<float>& gate) {
    return {.num_seqs = static_cast<int32_t>(kv_len.size()),
            .cu_seqlens_q = cu.data(),
            .kv_len = kv_len.data(),
            .block_table = table.data(),
            .block_table_stride = kBlocksPerSeq,
            .ratio = shape_.ratio,
            .overlap = shape_.overlap,
            .dim = shape_.dim,
            .kv = kv.data(),
            .kv_row_stride = shape_.channels(),
            .gate = gate.data(),
            .gate_row_stride = shape_.channels(),
            .position_bias = bias_.data(),
            .norm_weight = norm_.data(),
            .norm_eps = 1e-3f,
            .rope = {.cos = cos_.data(),
                     .sin = sin_.data(),
                     .rope_dim = shape_.rope_dim,
                     .max_positions = kMaxPositions},
            .pages = pages_,
            .state = reinterpret_cast<std::byte*>(state_.data()),
            .state_stride = state_stride_,
            .state_slots = slots.data()};
  }

  // Entries of a sequence as floats, [entries, dim].
  std::vector<float> Entries(int32_t seq, int32_t count) const {
    std::vector<float> values(static_cast<size_t>(count * shape_.dim));
    for (int32_t e = 0; e < count; ++e) {
      float* at = &values[static_cast<size_t>(e * shape_.dim)];
      const int64_t slot = int64_t{BlockOf(seq, e / shape_.block_entries)} * shape_.block_entries +
                           e % shape_.block_entries;
      LoadEntry(pages_, PlaceOfSlot(pages_, slot), shape_.dim - shape_.rotary(), shape_.rotary(),
                at, at + shape_.dim - shape_.rotary());
    }
    return values;
  }

  // models.md 7.4, 7.5 in double.
  std::vector<double> Reference(const Tokens& kv, const Tokens& gate, int32_t count) const {
    std::vector<double> entries;
    const int32_t dim = shape_.dim, channels = shape_.channels();
    for (int32_t e = 0; e < count; ++e) {
      std::vector<double> r;
      for (int32_t d = 0; d < dim; ++d) {
        double sum = 0, weighted = 0;
        const auto add = [&](int32_t position, int32_t channel) {
          const auto at = static_cast<size_t>(position * channels + channel);
          const double weight =
              std::exp(double{gate[at]} +
                       bias_[static_cast<size_t>(position % shape_.ratio * channels + channel)]);
          sum += weight;
          weighted += weight * kv[at];
        };
        for (int32_t j = 0; j < shape_.ratio; ++j) {
          const int32_t position = e * shape_.ratio + j;
          if (shape_.overlap && e > 0) add(position - shape_.ratio, d);
          add(position, shape_.overlap ? dim + d : d);
        }
        r.push_back(weighted / sum);
      }
      r = RmsNormReference(r, norm_, 1e-3);
      const int32_t first = dim - shape_.rope_dim;
      for (int32_t i = 0; i < shape_.rope_dim / 2; ++i) {
        const auto at = static_cast<size_t>(e * shape_.ratio * (shape_.rope_dim / 2) + i);
        const double a = r[static_cast<size_t>(first + 2 * i)];
        const double b = r[static_cast<size_t>(first + 2 * i + 1)];
        r[static_cast<size_t>(first + 2 * i)] = a * cos_[at] - b * sin_[at];
        r[static_cast<size_t>(first + 2 * i + 1)] = b * cos_[at] + a * sin_[at];
      }
      entries.insert(entries.end(), r.begin(), r.end());
    }
    return entries;
  }

  const std::vector<std::byte>& cache() const { return cache_; }
  absl::Span<const float> StateOf(int32_t slot) const {
    return absl::MakeConstSpan(state_).subspan(
        static_cast<size_t>(slot * state_stride_ / 4),
        static_cast<size_t>(CompressStateBytes(shape_.dim, shape_.overlap) / 4));
  }
  Tokens RandomTokens(int32_t count, uint32_t seed) const {
    return RandomFloats(int64_t{count} * shape_.channels(), seed);
  }

  static constexpr int32_t kBlocksPerSeq = 40;
  static constexpr int32_t kSeqs = 3;
  static constexpr int32_t kBlocks = kSeqs * kBlocksPerSeq + 1;
  static constexpr int32_t kSlots = 6;
  // Every sequence's own, in no order.
  static int32_t BlockOf(int32_t seq, int32_t i) { return 1 + (i * 11 + 5) % 40 + 40 * seq; }

 private:
  const Shape shape_;
  std::vector<float> bias_, norm_, cos_, sin_, state_;
  std::vector<std::byte> cache_;
  int64_t block_stride_ = 0;
  int64_t state_stride_ = 0;
  KvPages pages_;
};

std::vector<Shape> Shapes() {
  return {{"csa", 4, true, 96, 16, 16},
          {"hca", 32, false, 96, 16, 2},
          {"ratio_one", 1, false, 10, 0, 16},
          {"ratio_one_overlap", 1, true, 10, 2, 16},
          {"odd_ratio", 7, true, 70, 6, 3},
          {"csa_bfloat16", 4, true, 96, 16, 16, KvFormat::kBfloat16},
          {"csa_fp8", 4, true, 512, 64, 16, KvFormat::kFp8SharedKv},
          {"hca_fp8", 32, false, 80, 16, 2, KvFormat::kFp8SharedKv},
          {"index_key_fp8", 4, true, 128, 64, 16, KvFormat::kFp8IndexKey}};
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
  const absl::Status status = compressor.Run(pool_, {{0, 0, length, 2}}, {kv}, {gate});
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
  ASSERT_TRUE(whole.Run(pool_, {{0, 0, kLength, 1}}, {kv}, {gate}).ok());
  for (const int32_t chunk : {1, 3, 4, 5, 31, 32, 33, 127, 128, 129}) {
    Compressor cut(shape, 1);
    for (int32_t begin = 0; begin < kLength; begin += chunk) {
      ASSERT_TRUE(
          cut.Run(pool_, {{0, begin, std::min(begin + chunk, kLength), 1}}, {kv}, {gate}).ok());
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
    ASSERT_TRUE(together.Run(pool_, step, kv, gate).ok());
    for (const Compressor::Chunk& chunk : step) {
      ASSERT_TRUE(alone.Run(one, {chunk}, kv, gate).ok());
    }
  }
  EXPECT_TRUE(together.cache() == alone.cache());
  for (const int32_t slot : {0, 3, 5}) {
    EXPECT_TRUE(numerics::BitEqual(together.StateOf(slot), alone.StateOf(slot)));
  }
  // Slots of nobody keep their NaN.
  EXPECT_TRUE(std::isnan(together.StateOf(2)[0]));
}

INSTANTIATE_TEST_SUITE_P(Shapes, CompressKvTest, ::testing::ValuesIn(Shapes()),
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
  ASSERT_TRUE(compressor.Run(pool, {{0, 0, 4, 0}}, {kv}, {gate}).ok());
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
    ASSERT_TRUE(compressor.Run(pool, {{0, 0, 8, 0}}, {kv}, {gate}).ok());
    for (const float value : compressor.Entries(0, 1)) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(CompressKvSkipTest, ASequenceWithoutASlotIsLeftAlone) {
  const Shape shape = {"", 4, true, 8, 2, 4};
  Compressor compressor(shape, 1);
  ThreadPool pool(2);
  const auto kv = compressor.RandomTokens(40, 2), gate = compressor.RandomTokens(40, 3);
  const std::vector<std::byte> before = compressor.cache();
  ASSERT_TRUE(compressor.Run(pool, {{0, 0, 40, -1}}, {kv}, {gate}).ok());
  EXPECT_TRUE(compressor.cache() == before);
  ASSERT_TRUE(compressor.Run(pool, {{0, 0, 40, -1}, {1, 0, 40, 4}}, {kv, kv}, {gate, gate}).ok());
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
