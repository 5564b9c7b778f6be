#include "kernels/indexer.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/indexer_batch.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using numerics::AllClose;
using numerics::BitEqual;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class IndexerDeviceTest : public DeviceTest {
 protected:
  using DeviceTest::DeviceTest;

  IndexerRows RowsOnDevice(const IndexerBatch& batch) {
    IndexerRows rows = batch.index;
    rows.positions = Upload(batch.positions);
    rows.row_to_seq = Upload(batch.row_to_seq);
    rows.block_table = Upload(batch.table);
    return rows;
  }
  IndexerLogitsParams LogitsOnDevice(IndexerBatch& batch) {
    IndexerLogitsParams p = batch.Logits();
    p.rows = RowsOnDevice(batch);
    p.q = Upload(batch.q);
    p.weights = Upload(batch.weights);
    p.pages.base = UploadBytes(batch.memory);
    p.logits = Upload(batch.logits);
    return p;
  }
  // Each row by itself, the last first, has the bits that it has among the others.
  void ExpectRowsAloneGiveTheSame(IndexerBatch& batch) {
    const IndexerLogitsParams together = LogitsOnDevice(batch);
    ASSERT_TRUE(device_->IndexerLogits({}, together).ok());
    const IndexerLogitsParams alone = LogitsOnDevice(batch);
    for (int32_t row = batch.num_rows - 1; row >= 0; --row) {
      IndexerLogitsParams p = alone;
      p.rows.num_rows = 1;
      p.rows.positions += row;
      p.rows.row_to_seq += row;
      p.q += row * p.q_row_stride;
      p.weights += row * p.weights_row_stride;
      p.logits += row * p.logits_stride;
      ASSERT_TRUE(device_->IndexerLogits({}, p).ok());
    }
    EXPECT_TRUE(BitEqual(Download(alone.logits, batch.logits.size()),
                         Download(together.logits, batch.logits.size())));
  }
};

class CudaIndexerLogitsTest : public IndexerDeviceTest,
                              public ::testing::WithParamInterface<KvFormat> {
 protected:
  // Rows that see all keys, one key, a block's edge, and nothing.
  static std::vector<IndexerBatch::Row> Rows() {
    return {{0, 149}, {1, 1099}, {0, 0}, {0, 7}, {1, 8}, {0, -1}, {1, 1030}};
  }
};

TEST_P(CudaIndexerLogitsTest, MatchTheReference) {
  const struct { int32_t heads, dim; } sizes[] = {{64, 128}, {20, 32}, {1, 5}, {65, 130}};
  for (const auto& size : sizes) {
    SCOPED_TRACE(size.heads);
    IndexerBatch batch(GetParam(), size.heads, size.dim, {150, 1100}, Rows(), /*top_k=*/1);
    const IndexerLogitsParams params = LogitsOnDevice(batch);
    ASSERT_TRUE(device_->IndexerLogits({}, params).ok());
    batch.logits = Download(params.logits, batch.logits.size());
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

TEST_P(CudaIndexerLogitsTest, ALogitsBitsDependOnItsRowAndKeyAlone) {
  IndexerBatch batch(GetParam(), 20, 32, {150, 1100}, Rows(), /*top_k=*/1);
  ExpectRowsAloneGiveTheSame(batch);
}

TEST_P(CudaIndexerLogitsTest, AKeyMayStandForSeveralTokens) {
  IndexerBatch batch(GetParam(), 3, 16, {600}, {{0, 6}, {0, 7}, {0, 2000}, {0, 2}}, /*top_k=*/1, 4);
  const IndexerLogitsParams params = LogitsOnDevice(batch);
  ASSERT_TRUE(device_->IndexerLogits({}, params).ok());
  batch.logits = Download(params.logits, batch.logits.size());
  for (const int32_t row : {1, 2}) {
    const std::vector<double> expected = batch.ReferenceLogits(row);
    EXPECT_TRUE(AllClose<double>(
        absl::MakeConstSpan(&batch.logits[row * batch.logits_stride], expected.size()), expected,
        {.abs = 1e-5, .rel = 1e-5}));
  }
}

TEST_P(CudaIndexerLogitsTest, AKeyWithoutABlockIsReported) {
  IndexerBatch batch(GetParam(), 2, 16, {30}, {{0, 29}}, /*top_k=*/4);
  batch.table[2] = -1;
  ASSERT_TRUE(device_->IndexerLogits({}, LogitsOnDevice(batch)).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("sequence 0 has no block for position"));
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaIndexerLogitsTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8IndexKey));

// Tensor cores: queries rounded to bf16 or, with fp8 keys, to e4m3, which here hold them.
class CudaIndexProductsTest : public IndexerDeviceTest,
                              public ::testing::WithParamInterface<KvFormat> {
 protected:
  CudaIndexProductsTest() : IndexerDeviceTest(/*bfloat16=*/true) {}

  static void RoundQueries(IndexerBatch& batch) {
    for (float& value : batch.q) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      bits &= GetParam() == KvFormat::kFp8IndexKey ? 0xfff00000 : 0xffff0000;
      std::memcpy(&value, &bits, sizeof(bits));
    }
  }

  void Check(IndexerBatch& batch) {
    RoundQueries(batch);
    const IndexerLogitsParams params = LogitsOnDevice(batch);
    ASSERT_TRUE(device_->IndexerLogits({}, params).ok());
    batch.logits = Download(params.logits, batch.logits.size());
    for (int32_t row = 0; row < batch.num_rows; ++row) {
      const std::vector<double> expected = batch.ReferenceLogits(row);
      const float* actual = batch.logits.data() + row * batch.logits_stride;
      const auto num_keys = static_cast<int64_t>(expected.size());
      const bool scored = num_keys > batch.index.top_k;
      // Sums of some thousand products of unit normals.  Those of e4m3 are rounded at 2^-13 of the
      // largest: dots to about 40 at 0.005, which 64 heads make 0.3 * 8 * 0.005.
      const numerics::Tolerance tolerance =
          GetParam() == KvFormat::kFp8IndexKey
              ? numerics::Tolerance{.abs = 5e-2, .rel = 1e-4, .cosine = 1e-6}
              : numerics::Tolerance{.abs = 1e-3, .rel = 1e-4};
      if (scored) {
        EXPECT_TRUE(
            AllClose<double>(absl::MakeConstSpan(actual, expected.size()), expected, tolerance))
            << "row " << row;
      }
      for (int64_t j = scored ? num_keys : 0; j < batch.logits_stride; ++j) {
        ASSERT_TRUE(std::isnan(actual[j])) << "row " << row << " column " << j;
      }
    }
  }
};

TEST_P(CudaIndexProductsTest, MatchTheReference) {
  // Rows of decodes, one a sequence, and of chunks; some see too little to be scored.
  std::vector<IndexerBatch::Row> rows = {{0, 149}, {1, 1099}, {0, 0}, {0, 7}, {1, 8}, {0, -1}};
  for (int32_t r = 0; r < 21; ++r) rows.push_back({r < 13 ? 1 : 2, 700 + r});
  IndexerBatch batch(GetParam(), 64, 128, {150, 1100, 2000}, rows, /*top_k=*/60, 1, /*gap=*/4);
  Check(batch);
}

TEST_P(CudaIndexProductsTest, AKeyMayStandForSeveralTokens) {
  IndexerBatch batch(GetParam(), 64, 128, {600}, {{0, 6}, {0, 7}, {0, 2000}, {0, 2}}, 1, 4, 4);
  Check(batch);
}

// Of so many tiles that each block has several runs and each warpgroup uses its buffers again: a
// batch of decodes, few rows, and a prompt's many.
TEST_P(CudaIndexProductsTest, ALogitsBitsDependOnItsRowAndKeyAlone) {
  for (const auto& [decodes, chunk] : {std::pair(60, 21), {8, 0}, {20, 250}}) {
    SCOPED_TRACE(chunk);
    std::vector<IndexerBatch::Row> rows;
    for (int32_t r = 0; r < decodes; ++r) {
      rows.push_back({r % 3, r % 3 == 0 ? 40 * r : 5900 + r});
    }
    for (int32_t r = 0; r < chunk; ++r) rows.push_back({2, 6000 - chunk + r});
    IndexerBatch batch(GetParam(), 64, 128, {2500, 6000, 6000}, rows, /*top_k=*/60, 1, /*gap=*/4);
    ExpectRowsAloneGiveTheSame(batch);
  }
}

// As they come: a head's query is rounded by its own size, to three or to seven bits behind the
// point.
TEST_P(CudaIndexProductsTest, QueriesAreRounded) {
  IndexerBatch batch(GetParam(), 64, 128, {700}, {{0, 699}, {0, 698}, {0, 30}}, 20, 1, /*gap=*/4);
  for (int64_t i = 0; i < static_cast<int64_t>(batch.q.size()); ++i) {
    const auto head = static_cast<int32_t>(i % batch.q_row_stride / batch.q_head_stride);
    batch.q[i] *= std::ldexp(1.3f, head % 20 - 10);
  }
  for (size_t i = 0; i < batch.weights.size(); ++i) {
    batch.weights[i] *= std::ldexp(1.0f, 10 - static_cast<int32_t>(i % 66) % 20);
  }
  const IndexerLogitsParams params = LogitsOnDevice(batch);
  ASSERT_TRUE(device_->IndexerLogits({}, params).ok());
  batch.logits = Download(params.logits, batch.logits.size());
  const double cosine = GetParam() == KvFormat::kFp8IndexKey ? 1e-3 : 1e-5;
  for (int32_t row = 0; row < 2; ++row) {
    EXPECT_TRUE(
        AllClose<double>(absl::MakeConstSpan(&batch.logits[row * batch.logits_stride], 700 - row),
                         batch.ReferenceLogits(row), {.abs = kInfinity, .cosine = cosine}));
  }
}

TEST_P(CudaIndexProductsTest, AKeyWithoutABlockScoresAsZeros) {
  IndexerBatch batch(GetParam(), 64, 128, {300}, {{0, 299}}, /*top_k=*/4, 1, /*gap=*/4);
  RoundQueries(batch);
  batch.table[9] = -1;
  const IndexerLogitsParams params = LogitsOnDevice(batch);
  ASSERT_TRUE(device_->IndexerLogits({}, params).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("sequence 0 has no block for position 72"));
  batch.logits = Download(params.logits, batch.logits.size());
  for (int32_t key = 0; key < 300; ++key) {
    EXPECT_EQ(batch.logits[key] == 0, key / 8 == 9) << "key " << key;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaIndexProductsTest,
                         ::testing::Values(KvFormat::kBfloat16, KvFormat::kFp8IndexKey));

class CudaTopKSlotsTest : public IndexerDeviceTest {
 protected:
  // Selects in `batch` from batch.logits and compares every row.
  void Check(IndexerBatch& batch, int32_t width = 128) {
    const auto rows = static_cast<size_t>(batch.num_rows);
    const int64_t stride = width + 3;
    TopKSlotsParams params{.rows = RowsOnDevice(batch),
                           .block_entries = batch.pages.block_size,
                           .logits = Upload(batch.logits),
                           .logits_stride = batch.logits_stride,
                           .slots = Upload(std::vector<int32_t>(rows * stride, 12345)),
                           .slots_stride = stride,
                           .slots_width = width,
                           .lengths = Upload(std::vector<int32_t>(rows, -9))};
    const absl::Status status = device_->TopKSlots({}, params);
    ASSERT_TRUE(status.ok()) << status;
    const std::vector<int32_t> slots = Download(params.slots, rows * stride);
    const std::vector<int32_t> lengths = Download(params.lengths, rows);
    for (int32_t row = 0; row < batch.num_rows; ++row) {
      std::vector<int32_t> expected;
      for (const int32_t key : KeptPositions(&batch.logits[row * batch.logits_stride],
                                             batch.index.Visible(row), batch.index.top_k)) {
        expected.push_back(batch.Slot(batch.row_to_seq[row], key));
      }
      EXPECT_EQ(lengths[row], static_cast<int32_t>(expected.size()));
      expected.resize(width, -1);
      expected.resize(stride, 12345);
      EXPECT_THAT(
          std::vector<int32_t>(slots.begin() + row * stride, slots.begin() + (row + 1) * stride),
          ElementsAreArray(expected))
          << "row " << row;
    }
  }
};

TEST_F(CudaTopKSlotsTest, KeepsTheLargestInPositionOrder) {
  for (const int32_t top_k : {1, 2, 24, 128}) {
    // One more key than is kept, exactly as many, one less, one, none, many.
    IndexerBatch batch(
        KvFormat::kFloat32, 1, 1, {300, 1000},
        {{0, top_k}, {0, top_k - 1}, {0, top_k - 2}, {0, 0}, {1, -1}, {1, 999}, {0, 299}}, top_k);
    batch.logits = RandomTensor(batch.logits.size(), 5);
    Check(batch);
  }
}

TEST_F(CudaTopKSlotsTest, TiesGoToTheLowerPosition) {
  IndexerBatch batch(KvFormat::kFloat32, 1, 1, {300}, {{0, 299}, {0, 299}, {0, 299}, {0, 200}}, 24);
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

TEST_F(CudaTopKSlotsTest, EveryKindOfNumberHasItsPlace) {
  IndexerBatch batch(KvFormat::kFloat32, 1, 1, {9}, {{0, 8}, {0, 8}, {0, 8}}, 3);
  const float row[] = {-1.0f, kNan, kInfinity, -kInfinity, 1e-40f, -1e-40f, 0.0f, 3e38f, -kNan};
  std::copy(std::begin(row), std::end(row), batch.logits.begin());
  // Fewer numbers than are kept: NaN fill up, the lower ones first.
  const float few[] = {kNan, kNan, -kInfinity, kNan, kNan, kNan, kNan, kNan, kNan};
  std::copy(std::begin(few), std::end(few), batch.logits.begin() + batch.logits_stride);
  Check(batch);
}

TEST_F(CudaTopKSlotsTest, KeysThatStandForSeveralTokens) {
  IndexerBatch batch(KvFormat::kFloat32, 1, 1, {200}, {{0, 799}, {0, 3}, {0, 2}, {0, 44}}, 10, 4);
  batch.logits = RandomTensor(batch.logits.size(), 6);
  Check(batch);
}

// One block, two and eight of a cluster share a row: few rows get more.
TEST_F(CudaTopKSlotsTest, LongRows) {
  std::mt19937 random(7);
  for (const int32_t num_rows : {1, 40, 140}) {
    std::vector<IndexerBatch::Row> rows;
    rows.push_back({0, 59999});
    for (int32_t r = 1; r < num_rows; ++r) {
      rows.push_back({0, static_cast<int32_t>(random() % 60000)});
    }
    IndexerBatch batch(KvFormat::kFloat32, 1, 1, {60000}, rows, 2048);
    batch.logits = RandomTensor(batch.logits.size(), 8);
    for (int64_t j = 0; num_rows > 1 && j < batch.logits_stride; ++j) {  // ties in row 1
      float& logit = batch.logits[batch.logits_stride + j];
      logit = std::round(logit * 4) / 4;
    }
    Check(batch, 2048);
  }
}

// A padded row of a recording: position 0 of a sequence without blocks.
TEST_F(CudaTopKSlotsTest, ASequenceWithoutBlocksSeesNothing) {
  IndexerBatch batch(KvFormat::kFloat32, 2, 4, {30, 30}, {{0, 29}, {1, 0}}, 40);
  std::fill(batch.table.begin() + batch.stride, batch.table.end(), -1);
  ASSERT_TRUE(device_->IndexerLogits({}, LogitsOnDevice(batch)).ok());
  batch.positions[1] = -1;  // what it amounts to
  IndexerRows rows = RowsOnDevice(batch);
  rows.positions = Upload(std::vector<int32_t>{29, 0});
  int32_t* slots = Upload(std::vector<int32_t>(2 * 128, 7));
  int32_t* lengths = Upload(std::vector<int32_t>(2, 7));
  ASSERT_TRUE(device_
                  ->TopKSlots({}, {.rows = rows,
                                   .block_entries = 8,
                                   .logits = Upload(batch.logits),
                                   .logits_stride = batch.logits_stride,
                                   .slots = slots,
                                   .slots_stride = 128,
                                   .slots_width = 128,
                                   .lengths = lengths})
                  .ok());
  EXPECT_THAT(Download(lengths, 2), ::testing::ElementsAre(30, 0));
  EXPECT_THAT(Download(slots + 128, 128), ::testing::Each(-1));
}

TEST_F(CudaTopKSlotsTest, RefusesWhatCannotBe) {
  IndexerBatch batch(KvFormat::kFloat32, 1, 1, {30}, {{0, 29}, {0, 3}}, 4);
  TopKSlotsParams params{.rows = RowsOnDevice(batch),
                         .block_entries = 8,
                         .logits = Upload(batch.logits),
                         .logits_stride = batch.logits_stride,
                         .slots = Upload(std::vector<int32_t>(2 * 128, 7)),
                         .slots_stride = 128,
                         .slots_width = 3};
  EXPECT_THAT(device_->TopKSlots({}, params).ToString(), HasSubstr("3 slots a row"));
  params.slots_width = 128;
  params.logits_stride = 29;
  ASSERT_TRUE(device_->TopKSlots({}, params).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("sequence 0 has no block for position 30"));
}

}  // namespace
}  // namespace kernels
