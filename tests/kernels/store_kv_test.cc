#include "kernels/cpu/store_kv.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/gather_kv.h"
#include "kernels/cpu/kv_entry.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kMaxPositions = 40;
constexpr float kEps = 1e-6f;

// Rows of kv_a and a paged cache with room between entries and blocks, all of it 0xff (NaN in every
// format) until written.
class StoreKvTest : public ::testing::TestWithParam<KvFormat> {
 protected:
  void Make(int32_t rank, int32_t rope_dim, int32_t num_rows) {
    rank_ = rank;
    rope_dim_ = rope_dim;
    num_rows_ = num_rows;
    row_stride_ = rank + rope_dim + 3;
    kv_a_ = RandomTensor(num_rows * row_stride_, 1, 3);
    weight_ = RandomTensor(rank, 2);
    const std::vector<float> angles = RandomTensor(kMaxPositions * rope_dim / 2, 3);
    cos_.clear();
    sin_.clear();
    for (const float angle : angles) {
      cos_.push_back(std::cos(angle));
      sin_.push_back(std::sin(angle));
    }
    positions_.resize(num_rows);
    slots_.resize(num_rows);
    for (int32_t row = 0; row < num_rows; ++row) {
      positions_[row] = row * 7 % kMaxPositions;
      slots_[row] = (row * 5 + 3) % (kNumBlocks * kBlockSize);
    }
    pages_.block_size = kBlockSize;
    pages_.format = GetParam();
    pages_.entry_bytes = KvEntryBytes(GetParam(), rank, rope_dim) + 4;
    pages_.block_stride = pages_.entry_bytes * kBlockSize + 12;
    memory_.assign(pages_.block_stride * kNumBlocks, std::byte{0xff});
    pages_.base = memory_.data();

    params_.num_rows = num_rows;
    params_.kv_a = kv_a_.data();
    params_.kv_a_row_stride = row_stride_;
    params_.kv_lora_rank = rank;
    params_.norm_weight = weight_.data();
    params_.norm_eps = kEps;
    params_.rope = {cos_.data(), sin_.data(), rope_dim, kMaxPositions, RopeLayout::kInterleaved};
    params_.positions = positions_.data();
    params_.slots = slots_.data();
    params_.pages = pages_;
  }

  // The entry of a row before it is rounded to the format.
  std::vector<double> ExactEntry(int32_t row) const {
    const float* x = kv_a_.data() + row * row_stride_;
    double sum = 0;
    for (int32_t i = 0; i < rank_; ++i) sum += static_cast<double>(x[i]) * x[i];
    std::vector<double> entry(rank_ + rope_dim_);
    for (int32_t i = 0; i < rank_; ++i) {
      entry[i] = x[i] / std::sqrt(sum / rank_ + kEps) * weight_[i];
    }
    for (int32_t i = 0; i < rope_dim_ / 2; ++i) {
      const double c = cos_[positions_[row] * rope_dim_ / 2 + i];
      const double s = sin_[positions_[row] * rope_dim_ / 2 + i];
      const double a = x[rank_ + 2 * i], b = x[rank_ + 2 * i + 1];
      entry[rank_ + 2 * i] = a * c - b * s;
      entry[rank_ + 2 * i + 1] = b * c + a * s;
    }
    return entry;
  }

  // Reads slots back: [slots, rank + rope_dim].
  std::vector<float> Gather(const std::vector<int64_t>& slots) {
    std::vector<float> latent(slots.size() * (rank_ + 1)), k_rope(slots.size() * (rope_dim_ + 2));
    GatherKvParams params;
    params.num_rows = static_cast<int32_t>(slots.size());
    params.slots = slots.data();
    params.pages = pages_;
    params.kv_lora_rank = rank_;
    params.rope_dim = rope_dim_;
    params.latent = latent.data();
    params.latent_row_stride = rank_ + 1;
    params.k_rope = k_rope.data();
    params.k_rope_row_stride = rope_dim_ + 2;
    EXPECT_TRUE(GatherKv(pool_, params).ok());
    std::vector<float> out;
    for (size_t i = 0; i < slots.size(); ++i) {
      out.insert(out.end(), latent.data() + i * (rank_ + 1),
                 latent.data() + i * (rank_ + 1) + rank_);
      out.insert(out.end(), k_rope.data() + i * (rope_dim_ + 2),
                 k_rope.data() + i * (rope_dim_ + 2) + rope_dim_);
    }
    return out;
  }

  static constexpr int32_t kBlockSize = 4;
  static constexpr int32_t kNumBlocks = 12;
  int32_t rank_ = 0, rope_dim_ = 0, num_rows_ = 0;
  int64_t row_stride_ = 0;
  std::vector<float> kv_a_, weight_, cos_, sin_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  std::vector<std::byte> memory_;
  KvPages pages_;
  StoreKvParams params_;
  ThreadPool pool_{2};
};

TEST_P(StoreKvTest, StoredRowsReadBackAsTheReference) {
  const struct { int32_t rank, rope_dim; } sizes[] = {{512, 64}, {24, 6}, {130, 2}, {300, 0}};
  for (const auto& size : sizes) {
    SCOPED_TRACE(size.rank);
    Make(size.rank, size.rope_dim, 29);
    ASSERT_TRUE(StoreKv(pool_, params_).ok());
    const std::vector<float> read = Gather(slots_);
    std::vector<double> expected;
    for (int32_t row = 0; row < num_rows_; ++row) {
      const std::vector<double> entry = ExactEntry(row);
      expected.insert(expected.end(), entry.begin(), entry.end());
    }
    // float32 rounding; half a step of 8 bits; half a step of e4m3 (4 bits), whose subnormals are
    // 2^-9 of a scale that is at most 2/448 of the group's largest (here below 16).
    numerics::Tolerance tolerance{.abs = 1e-6, .rel = 1e-5};
    if (GetParam() == KvFormat::kBfloat16) tolerance = {.abs = 1e-30, .rel = 0x1.01p-8};
    if (GetParam() == KvFormat::kFp8Latent)
      tolerance = {.abs = 16.0 / 224 * 0x1p-10, .rel = 0x1.01p-4};
    EXPECT_TRUE(numerics::AllClose(read, expected, tolerance));
  }
}

TEST_P(StoreKvTest, WritesItsEntriesAndNotAByteElse) {
  Make(130, 6, 20);
  slots_[4] = -1;
  slots_[17] = std::numeric_limits<int64_t>::min();
  positions_[4] = -5;  // not looked at where nothing is stored
  ASSERT_TRUE(StoreKv(pool_, params_).ok());
  std::vector<bool> ours(memory_.size(), false);
  for (int32_t row = 0; row < num_rows_; ++row) {
    if (slots_[row] < 0) continue;
    const std::byte* entry = EntryAt(pages_, PlaceOfSlot(pages_, slots_[row]));
    const int64_t begin = entry - memory_.data();
    EXPECT_EQ(begin, slots_[row] / kBlockSize * pages_.block_stride +
                         slots_[row] % kBlockSize * pages_.entry_bytes);
    std::fill_n(ours.begin() + begin, KvEntryBytes(GetParam(), 130, 6), true);
  }
  for (size_t i = 0; i < memory_.size(); ++i) {
    if (!ours[i]) {
      ASSERT_EQ(memory_[i], std::byte{0xff}) << "byte " << i;
    }
  }
}

TEST_P(StoreKvTest, ARowsBytesDoNotDependOnTheCall) {
  Make(512, 64, 29);
  ASSERT_TRUE(StoreKv(pool_, params_).ok());
  const std::vector<std::byte> together = memory_;
  memory_.assign(memory_.size(), std::byte{0xff});
  ThreadPool one(1);
  for (int32_t row = num_rows_ - 1; row >= 0; --row) {
    StoreKvParams single = params_;
    single.num_rows = 1;
    single.kv_a += row * row_stride_;
    single.positions += row;
    single.slots += row;
    ASSERT_TRUE(StoreKv(one, single).ok());
  }
  EXPECT_TRUE(together == memory_);
}

TEST_P(StoreKvTest, GatherGivesZerosForNoSlot) {
  Make(24, 6, 3);
  const std::vector<float> read = Gather({-1, -7});
  EXPECT_THAT(read, ::testing::Each(0.0f));
}

// Index keys of the same rows, in pages of their own; the latents stay what they are.
class StoreIndexKeyTest : public StoreKvTest {
 protected:
  void Make(int32_t dim, int32_t rope_dim) {
    StoreKvTest::Make(/*rank=*/24, rope_dim, /*num_rows=*/20);
    dim_ = dim;
    key_ = RandomTensor(num_rows_ * (dim + 1), 11, 3);
    for (float& value : key_) value += 0.7f;  // a mean to take away
    norm_weight_ = RandomTensor(dim, 12);
    norm_bias_ = RandomTensor(dim, 13);
    KvPages& pages = params_.index_key.pages;
    pages.format = IndexFormat();
    pages.block_size = kBlockSize;
    pages.entry_bytes = KvEntryBytes(pages.format, dim, 0);
    pages.block_stride = pages.entry_bytes * kBlockSize + 12;
    keys_.assign(pages.block_stride * kNumBlocks, std::byte{0xff});
    pages.base = keys_.data();
    params_.index_key.dim = dim;
    params_.index_key.key = key_.data();
    params_.index_key.key_row_stride = dim + 1;
    params_.index_key.norm_weight = norm_weight_.data();
    params_.index_key.norm_bias = norm_bias_.data();
    params_.index_key.rope = params_.rope;
    params_.index_key.rope.layout = RopeLayout::kHalfSplit;
  }

  static KvFormat IndexFormat() {
    return GetParam() == KvFormat::kFp8Latent ? KvFormat::kFp8IndexKey : GetParam();
  }

  std::vector<double> ExactKey(int32_t row) const {
    const float* x = key_.data() + row * (dim_ + 1);
    double mean = 0, variance = 0;
    for (int32_t i = 0; i < dim_; ++i) mean += static_cast<double>(x[i]) / dim_;
    for (int32_t i = 0; i < dim_; ++i) variance += (x[i] - mean) * (x[i] - mean) / dim_;
    std::vector<double> key(dim_);
    for (int32_t i = 0; i < dim_; ++i) {
      key[i] = (x[i] - mean) / std::sqrt(variance + 1e-6) * norm_weight_[i] + norm_bias_[i];
    }
    const int32_t half = rope_dim_ / 2;
    const std::vector<double> before = key;
    for (int32_t i = 0; i < half; ++i) {
      const double c = cos_[positions_[row] * half + i], s = sin_[positions_[row] * half + i];
      key[i] = before[i] * c - before[i + half] * s;
      key[i + half] = before[i + half] * c + before[i] * s;
    }
    return key;
  }

  int32_t dim_ = 0;
  std::vector<float> key_, norm_weight_, norm_bias_;
  std::vector<std::byte> keys_;
};

TEST_P(StoreIndexKeyTest, StoredKeysReadBackAsTheReference) {
  const struct { int32_t dim, rope_dim; } sizes[] = {{128, 64}, {32, 16}, {7, 6}, {130, 0}};
  for (const auto& size : sizes) {
    SCOPED_TRACE(size.dim);
    Make(size.dim, size.rope_dim);
    slots_[3] = -1;
    positions_[3] = -5;  // not looked at
    params_.index_key.dim = 0;
    ASSERT_TRUE(StoreKv(pool_, params_).ok());
    const std::vector<std::byte> latents = memory_;
    params_.index_key.dim = size.dim;
    ASSERT_TRUE(StoreKv(pool_, params_).ok());
    EXPECT_TRUE(memory_ == latents);
    std::vector<float> read(size.dim);
    const KvPages& pages = params_.index_key.pages;
    for (int32_t row = 0; row < num_rows_; ++row) {
      if (slots_[row] < 0) continue;
      LoadEntry(pages, PlaceOfSlot(pages, slots_[row]), size.dim, 0, read.data(), nullptr);
      // As for latents; a key's largest is below 32.
      numerics::Tolerance tolerance{.abs = 2e-6, .rel = 1e-5};
      if (GetParam() == KvFormat::kBfloat16) tolerance = {.abs = 1e-5, .rel = 0x1.01p-8};
      if (GetParam() == KvFormat::kFp8Latent) {
        tolerance = {.abs = 32.0 / 224 * 0x1p-10, .rel = 0x1.01p-4};
      }
      EXPECT_TRUE(numerics::AllClose(read, ExactKey(row), tolerance)) << "row " << row;
    }
  }
}

TEST_P(StoreIndexKeyTest, RefusesWhatCannotBe) {
  Make(32, 16);
  const std::vector<std::byte> latents = memory_, keys = keys_;
  const auto refused = [&](auto change, const char* message) {
    StoreKvParams p = params_;
    change(p.index_key);
    const absl::Status status = StoreKv(pool_, p);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.ToString(), HasSubstr(message));
  };
  refused([](auto& index) { index.key = nullptr; }, "index keys is null");
  refused([](auto& index) { index.dim = 14; }, "index keys of 14 values, 16 rotary");
  refused([](auto& index) { index.dim = 33; }, "33 values");
  refused([](auto& index) { index.rope.max_positions = 3; }, "position");
  EXPECT_TRUE(memory_ == latents);
  EXPECT_TRUE(keys_ == keys);
}

INSTANTIATE_TEST_SUITE_P(Formats, StoreIndexKeyTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8Latent));

// V4: the norm covers all of a row, rotary values included.
TEST_P(StoreKvTest, TheNormMayCoverTheRotaryValues) {
  Make(24, 6, 5);
  weight_ = RandomTensor(30, 2);
  params_.norm_weight = weight_.data();
  params_.norm_rope = true;
  ASSERT_TRUE(StoreKv(pool_, params_).ok());
  const std::vector<float> read = Gather(slots_);
  for (int32_t row = 0; row < num_rows_; ++row) {
    const float* x = kv_a_.data() + row * row_stride_;
    double sum = 0;
    for (int32_t i = 0; i < 30; ++i) sum += double{x[i]} * x[i];
    std::vector<double> entry;
    for (int32_t i = 0; i < 30; ++i)
      entry.push_back(x[i] / std::sqrt(sum / 30 + kEps) * weight_[i]);
    for (int32_t i = 0; i < 3; ++i) {
      const double c = cos_[positions_[row] * 3 + i], s = sin_[positions_[row] * 3 + i];
      const double a = entry[24 + 2 * i], b = entry[24 + 2 * i + 1];
      entry[24 + 2 * i] = a * c - b * s;
      entry[24 + 2 * i + 1] = b * c + a * s;
    }
    // As above.
    numerics::Tolerance tolerance{.abs = 1e-6, .rel = 1e-5};
    if (GetParam() == KvFormat::kBfloat16) tolerance = {.abs = 1e-5, .rel = 0x1.01p-8};
    if (GetParam() == KvFormat::kFp8Latent)
      tolerance = {.abs = 16.0 / 224 * 0x1p-10, .rel = 0x1.01p-4};
    EXPECT_TRUE(
        numerics::AllClose(absl::MakeConstSpan(read).subspan(static_cast<size_t>(row) * 30, 30),
                           absl::MakeConstSpan(entry), tolerance));
  }
}

TEST_P(StoreKvTest, RefusesWhatCannotBe) {
  Make(24, 6, 3);
  const std::vector<std::byte> before = memory_;
  positions_[2] = kMaxPositions;
  absl::Status status = StoreKv(pool_, params_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.ToString(), HasSubstr("row 2: position 40"));
  positions_[2] = kMaxPositions - 1;
  params_.pages.entry_bytes = KvEntryBytes(GetParam(), 24, 6) - 1;
  EXPECT_EQ(StoreKv(pool_, params_).code(), absl::StatusCode::kInvalidArgument);
  params_.pages = pages_;
  params_.pages.block_stride = pages_.entry_bytes;
  EXPECT_EQ(StoreKv(pool_, params_).code(), absl::StatusCode::kInvalidArgument);
  params_.pages = pages_;
  params_.num_rows = -1;
  EXPECT_EQ(StoreKv(pool_, params_).code(), absl::StatusCode::kInvalidArgument);
  params_.num_rows = 0;
  EXPECT_TRUE(StoreKv(pool_, params_).ok());
  EXPECT_TRUE(before == memory_);
  GatherKvParams gather;
  gather.dtype = DType::kBfloat16;
  EXPECT_THAT(GatherKv(pool_, gather).ToString(), HasSubstr("rows of dtype bfloat16"));
}

INSTANTIATE_TEST_SUITE_P(Formats, StoreKvTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8Latent));

// Entries move between pages of other block sizes and strides, whatever the format.
class CopyKvEntriesTest : public ::testing::TestWithParam<KvFormat> {
 protected:
  static constexpr int32_t kDim = 70;
  static constexpr int32_t kBlocks = 3;
  struct Memory {
    Memory(KvFormat format, int32_t rope_dim, int32_t block_size) {
      const int32_t entry_bytes = KvEntryBytes(format, kDim, rope_dim);
      pages = {.block_stride = int64_t{entry_bytes} * block_size + 16,
               .block_size = block_size,
               .entry_bytes = entry_bytes,
               .format = format};
      bytes.resize(static_cast<size_t>(pages.block_stride * kBlocks), std::byte{0xff});
      pages.base = bytes.data();
    }
    std::vector<std::byte> bytes;
    KvPages pages;
  };
  const int32_t rope_dim_ = GetParam() == KvFormat::kFp8IndexKey ? 0 : 6;
  ThreadPool pool_{2};

  std::vector<float> Load(const Memory& memory, int64_t slot) const {
    std::vector<float> values(static_cast<size_t>(kDim + rope_dim_));
    LoadEntry(memory.pages, PlaceOfSlot(memory.pages, slot), kDim, rope_dim_, values.data(),
              values.data() + kDim);
    return values;
  }
};

TEST_P(CopyKvEntriesTest, BytesArriveAndNothingElseChanges) {
  Memory from(GetParam(), rope_dim_, 5), to(GetParam(), rope_dim_, 8);
  for (int64_t slot = 0; slot < 15; ++slot) {
    const std::vector<float> values = RandomTensor(kDim + rope_dim_, static_cast<uint32_t>(slot));
    StoreEntry(from.pages, PlaceOfSlot(from.pages, slot), values.data(), kDim, values.data() + kDim,
               rope_dim_);
  }
  Memory expected = to;
  expected.pages.base = expected.bytes.data();
  const std::vector<int64_t> src = {0, 14, 7, -1, 3}, dst = {23, 8, 0, 1, -1};
  for (const size_t i : {0u, 1u, 2u}) {
    // The same values make the same bytes.
    const std::vector<float> values = RandomTensor(kDim + rope_dim_, static_cast<uint32_t>(src[i]));
    StoreEntry(expected.pages, PlaceOfSlot(expected.pages, dst[i]), values.data(), kDim,
               values.data() + kDim, rope_dim_);
  }
  const CopyKvEntriesParams params = {.num_entries = 5,
                                      .src_slots = src.data(),
                                      .dst_slots = dst.data(),
                                      .src = from.pages,
                                      .dst = to.pages,
                                      .dim = kDim,
                                      .rope_dim = rope_dim_};
  ASSERT_TRUE(CopyKvEntries(pool_, params).ok());
  EXPECT_TRUE(to.bytes == expected.bytes);
  EXPECT_TRUE(numerics::BitEqual(Load(to, 23), Load(from, 0)));

  CopyKvEntriesParams bad = params;
  bad.dst.format = GetParam() == KvFormat::kFloat32 ? KvFormat::kBfloat16 : KvFormat::kFloat32;
  EXPECT_THAT(CopyKvEntries(pool_, bad).ToString(), HasSubstr("to format"));
  bad = params;
  bad.src.base = nullptr;
  EXPECT_THAT(CopyKvEntries(pool_, bad).ToString(), HasSubstr("no memory"));
}

INSTANTIATE_TEST_SUITE_P(Formats, CopyKvEntriesTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8Latent, KvFormat::kFp8IndexKey,
                                           KvFormat::kFp8SharedKv));

}  // namespace
}  // namespace kernels::cpu
