#include "kernels/cpu/indexer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/indexer_batch.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels::cpu {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Batch = IndexerBatch;

class IndexerLogitsTest : public ::testing::TestWithParam<KvFormat> {
 protected:
  // Rows that see all keys, one key, a block's edge, and nothing.
  static std::vector<Batch::Row> Rows() {
    return {{0, 149}, {1, 1099}, {0, 0}, {0, 7}, {1, 8}, {0, -1}, {1, 1030}};
  }
};

TEST_P(IndexerLogitsTest, MatchTheReference) {
  ThreadPool pool(2);
  const struct { int32_t heads, dim; } sizes[] = {{64, 128}, {20, 32}, {1, 5}, {65, 130}};
  for (const auto& size : sizes) {
    SCOPED_TRACE(size.heads);
    Batch batch(GetParam(), size.heads, size.dim, {150, 1100}, Rows(), /*top_k=*/1);
    ASSERT_TRUE(IndexerLogits(pool, batch.Logits()).ok());
    for (int32_t row = 0; row < batch.num_rows; ++row) {
      const std::vector<double> expected = batch.ReferenceLogits(row);
      const float* actual = batch.logits.data() + row * batch.logits_stride;
      const bool scored = expected.size() > 1;
      // Sums of some thousand products of unit normals.
      if (scored) {
        EXPECT_TRUE(AllClose<double>(absl::MakeConstSpan(actual, expected.size()), expected,
                                     {.abs = 1e-4, .rel = 1e-5}));
      }
      for (int64_t j = scored ? static_cast<int64_t>(expected.size()) : 0; j < batch.logits_stride;
           ++j) {
        ASSERT_TRUE(std::isnan(actual[j])) << "row " << row << " column " << j;
      }
    }
  }
}

TEST_P(IndexerLogitsTest, ALogitsBitsDependOnItsRowAndKeyAlone) {
  ThreadPool one(1), three(3);
  Batch batch(GetParam(), 20, 32, {150, 1100}, Rows(), /*top_k=*/1);
  ASSERT_TRUE(IndexerLogits(three, batch.Logits()).ok());
  const std::vector<float> together = batch.logits;
  std::fill(batch.logits.begin(), batch.logits.end(), kNan);
  for (int32_t row = batch.num_rows - 1; row >= 0; --row) {
    IndexerLogitsParams p = batch.Logits();
    p.rows.num_rows = 1;
    p.rows.positions += row;
    p.rows.row_to_seq += row;
    p.q += row * p.q_row_stride;
    p.weights += row * p.weights_row_stride;
    p.logits += row * p.logits_stride;
    ASSERT_TRUE(IndexerLogits(one, p).ok());
  }
  EXPECT_TRUE(BitEqual(batch.logits, together));
}

TEST_P(IndexerLogitsTest, AKeyMayStandForSeveralTokens) {
  ThreadPool pool(1);
  // 4 tokens a key: position 6 sees one key, 7 two, 2000 sees 500.
  Batch batch(GetParam(), 3, 16, {600}, {{0, 6}, {0, 7}, {0, 2000}, {0, 2}}, /*top_k=*/1, 4);
  EXPECT_EQ(batch.index.Visible(0), 1);
  EXPECT_EQ(batch.index.Visible(1), 2);
  EXPECT_EQ(batch.index.Visible(2), 500);
  EXPECT_EQ(batch.index.Visible(3), 0);
  ASSERT_TRUE(IndexerLogits(pool, batch.Logits()).ok());
  for (const int32_t row : {1, 2}) {
    const std::vector<double> expected = batch.ReferenceLogits(row);
    EXPECT_TRUE(AllClose<double>(
        absl::MakeConstSpan(&batch.logits[row * batch.logits_stride], expected.size()), expected,
        {.abs = 1e-5, .rel = 1e-5}));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, IndexerLogitsTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8IndexKey));

TEST(IndexerLogitsTest, RefuseWhatCannotBe) {
  ThreadPool pool(1);
  Batch batch(KvFormat::kFloat32, 2, 4, {30}, {{0, 29}, {0, 3}}, /*top_k=*/4);
  const auto refused = [&](auto change, const char* message) {
    IndexerLogitsParams p = batch.Logits();
    change(p);
    const absl::Status status = IndexerLogits(pool, p);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.ToString(), HasSubstr(message));
  };
  refused([](auto& p) { p.rows.num_rows = -1; }, "-1 rows");
  refused([](auto& p) { p.num_heads = 0; }, "0 heads");
  refused([](auto& p) { p.head_dim = 5; }, "5 values");
  refused([](auto& p) { p.rows.top_k = 0; }, "top_k 0");
  refused([](auto& p) { p.rows.tokens_per_key = 0; }, "0 tokens a key");
  refused([](auto& p) { p.q = nullptr; }, "is null");
  refused([](auto& p) { p.logits_stride = 29; }, "row 0 sees 30 keys, its logits have room for 29");
  refused([](auto& p) { p.rows.block_table_stride = 3; }, "no block at index 3");
  batch.table[2] = -1;
  refused([](auto&) {}, "row 0 of sequence 0 sees 30 keys and has no block at index 2");
}

class TopKSlotsTest : public ::testing::Test {
 protected:
  // Selects in `batch` from batch.logits and compares every row.
  void Check(Batch& batch, int32_t width = 128) {
    std::vector<int32_t> slots(batch.num_rows * (width + 3), 12345), lengths(batch.num_rows, -9);
    const TopKSlotsParams params{.rows = batch.index,
                                 .block_entries = batch.pages.block_size,
                                 .logits = batch.logits.data(),
                                 .logits_stride = batch.logits_stride,
                                 .slots = slots.data(),
                                 .slots_stride = width + 3,
                                 .slots_width = width,
                                 .lengths = lengths.data()};
    const absl::Status status = TopKSlots(pool_, params);
    ASSERT_TRUE(status.ok()) << status;
    for (int32_t row = 0; row < batch.num_rows; ++row) {
      std::vector<int32_t> expected;
      for (const int32_t key : KeptPositions(&batch.logits[row * batch.logits_stride],
                                             batch.index.Visible(row), batch.index.top_k)) {
        expected.push_back(batch.Slot(batch.row_to_seq[row], key));
      }
      EXPECT_EQ(lengths[row], static_cast<int32_t>(expected.size()));
      expected.resize(width, -1);
      expected.resize(width + 3, 12345);
      EXPECT_THAT(std::vector<int32_t>(slots.begin() + row * (width + 3),
                                       slots.begin() + (row + 1) * (width + 3)),
                  ElementsAreArray(expected))
          << "row " << row;
    }
  }

  ThreadPool pool_{2};
};

TEST_F(TopKSlotsTest, KeepsTheLargestInPositionOrder) {
  for (const int32_t top_k : {1, 2, 24, 128}) {
    // One more key than is kept, exactly as many, one less, one, none, many.
    Batch batch(KvFormat::kFloat32, 1, 1, {300, 1000},
                {{0, top_k}, {0, top_k - 1}, {0, top_k - 2}, {0, 0}, {1, -1}, {1, 999}, {0, 299}},
                top_k);
    batch.logits = RandomTensor(batch.logits.size(), 5);
    Check(batch);
  }
}

TEST_F(TopKSlotsTest, TiesGoToTheLowerPosition) {
  Batch batch(KvFormat::kFloat32, 1, 1, {300}, {{0, 299}, {0, 299}, {0, 299}, {0, 200}}, 24);
  std::fill(batch.logits.begin(), batch.logits.end(), 0.5f);  // row 0: all equal
  std::mt19937 random(1);
  for (int64_t j = 0; j < batch.logits_stride; ++j) {
    batch.logits[batch.logits_stride + j] = static_cast<float>(random() % 4);
    // Zeros of both signs are equal.
    batch.logits[2 * batch.logits_stride + j] = random() % 2 == 0 ? 0.0f : -0.0f;
    // Neighbours that differ in the last bit only are not.
    batch.logits[3 * batch.logits_stride + j] =
        random() % 2 == 0 ? 1.0f : std::nextafter(1.0f, 2.0f);
  }
  Check(batch);
}

TEST_F(TopKSlotsTest, EveryKindOfNumberHasItsPlace) {
  Batch batch(KvFormat::kFloat32, 1, 1, {9}, {{0, 8}, {0, 8}, {0, 8}}, 3);
  const float row[] = {-1.0f, kNan, kInfinity, -kInfinity, 1e-40f, -1e-40f, 0.0f, 3e38f, -kNan};
  std::copy(std::begin(row), std::end(row), batch.logits.begin());
  // Fewer numbers than are kept: NaN fill up, the lower ones first.
  const float few[] = {kNan, kNan, -kInfinity, kNan, kNan, kNan, kNan, kNan, kNan};
  std::copy(std::begin(few), std::end(few), batch.logits.begin() + batch.logits_stride);
  Check(batch);
}

TEST_F(TopKSlotsTest, RowsThatKeepAllNeedNoLogits) {
  Batch batch(KvFormat::kFloat32, 1, 1, {100}, {{0, 9}, {0, 2}}, 10);
  std::vector<int32_t> slots(2 * 128);
  const TopKSlotsParams params{.rows = batch.index,
                               .block_entries = 8,
                               .logits = batch.logits.data(),
                               .logits_stride = 0,
                               .slots = slots.data(),
                               .slots_stride = 128,
                               .slots_width = 128};
  ASSERT_TRUE(TopKSlots(pool_, params).ok());
  for (int32_t j = 0; j < 128; ++j) {
    EXPECT_EQ(slots[j], j < 10 ? batch.Slot(0, j) : -1);
    EXPECT_EQ(slots[128 + j], j < 3 ? batch.Slot(0, j) : -1);
  }
}

TEST_F(TopKSlotsTest, KeysThatStandForSeveralTokens) {
  Batch batch(KvFormat::kFloat32, 1, 1, {200}, {{0, 799}, {0, 3}, {0, 2}, {0, 44}}, 10, 4);
  batch.logits = RandomTensor(batch.logits.size(), 6);
  Check(batch);
}

TEST_F(TopKSlotsTest, RefusesWhatCannotBe) {
  Batch batch(KvFormat::kFloat32, 1, 1, {30}, {{0, 29}, {0, 3}}, 4);
  std::vector<int32_t> slots(2 * 128, 7);
  const TopKSlotsParams good{.rows = batch.index,
                             .block_entries = 8,
                             .logits = batch.logits.data(),
                             .logits_stride = batch.logits_stride,
                             .slots = slots.data(),
                             .slots_stride = 128,
                             .slots_width = 128};
  const auto refused = [&](auto change, const char* message) {
    TopKSlotsParams p = good;
    change(p);
    const absl::Status status = TopKSlots(pool_, p);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.ToString(), HasSubstr(message));
  };
  refused([](auto& p) { p.rows.num_rows = -1; }, "-1 rows");
  refused([](auto& p) { p.slots_width = 3; }, "3 slots a row");
  refused([](auto& p) { p.slots_stride = 127; }, "stride 127");
  refused([](auto& p) { p.logits_stride = 29; }, "room for 29");
  refused([](auto& p) { p.block_entries = 0; }, "0 entries a block");
  refused([](auto& p) { p.slots = nullptr; }, "nowhere to write");
  EXPECT_THAT(slots, ::testing::Each(7));
}

}  // namespace
}  // namespace kernels::cpu
