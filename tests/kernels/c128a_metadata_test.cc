#include "kernels/cpu/c128a_metadata.h"

#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/sparse_decode.h"

namespace kernels::cpu {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int32_t kMarker = 777777;

// Several sequences with shuffled blocks, rows with chosen positions.
struct Case {
  int32_t ratio = 128;
  int32_t block_entries = 2;  // block size 256
  int32_t max_model_len = 1024;
  std::vector<int32_t> positions;
  std::vector<int32_t> seqs;  // of the rows
  std::vector<int64_t> slots;
  int32_t num_decode_rows = 0;
  int64_t extra_stride = 0;

  int32_t width() const { return C128AWidth(max_model_len, ratio); }
  int32_t blocks_per_seq() const { return max_model_len / (ratio * block_entries) + 1; }
  int32_t BlockOf(int32_t seq, int32_t i) const {
    return 3 + (i * 7 + seq * 5) % 1000 + 1000 * seq;
  }

  absl::Status Run(std::vector<int32_t>* indices, std::vector<int32_t>* lengths) const {
    ThreadPool pool(3);
    const auto rows = static_cast<int32_t>(positions.size());
    std::vector<int32_t> table;
    for (int32_t seq = 0; seq < 4; ++seq) {
      for (int32_t i = 0; i < blocks_per_seq(); ++i) table.push_back(BlockOf(seq, i));
    }
    indices->assign(static_cast<size_t>(rows * (width() + extra_stride)), kMarker);
    lengths->assign(static_cast<size_t>(rows), kMarker);
    return C128AMetadata(pool, {.num_rows = rows,
                                .num_decode_rows = num_decode_rows,
                                .tokens_per_entry = ratio,
                                .block_entries = block_entries,
                                .positions = positions.data(),
                                .slots = slots.data(),
                                .row_to_seq = seqs.data(),
                                .block_table = table.data(),
                                .block_table_stride = blocks_per_seq(),
                                .indices = indices->data(),
                                .index_stride = width() + extra_stride,
                                .width = width(),
                                .lengths = lengths->data()});
  }

  void ExpectRight() const {
    std::vector<int32_t> indices, lengths;
    const absl::Status status = Run(&indices, &lengths);
    ASSERT_TRUE(status.ok()) << status;
    for (size_t row = 0; row < positions.size(); ++row) {
      const int32_t visible = slots[row] < 0 ? 0 : (positions[row] + 1) / ratio;
      ASSERT_EQ(lengths[row], visible) << "row " << row;
      const int32_t* list = &indices[row * static_cast<size_t>(width() + extra_stride)];
      for (int32_t j = 0; j < width() + extra_stride; ++j) {
        const bool decode = static_cast<int32_t>(row) < num_decode_rows;
        int32_t expected = kMarker;
        if (j < visible) {
          expected = decode
                         ? BlockOf(seqs[row], j / block_entries) * block_entries + j % block_entries
                         : j;
        } else if (j < width()) {
          expected = -1;
        }
        ASSERT_EQ(list[j], expected) << "row " << row << " entry " << j;
      }
    }
  }
};

TEST(C128AMetadataTest, EveryPositionOfThreeWindows) {
  Case decode;
  for (int32_t position = 0; position <= 3 * 128; ++position) {
    decode.positions.push_back(position);
    decode.seqs.push_back(position % 4);
    decode.slots.push_back(position);
  }
  decode.num_decode_rows = 3 * 128 + 1;
  decode.ExpectRight();
  decode.num_decode_rows = 0;
  decode.ExpectRight();
}

// The token that completes a window sees its entry.
TEST(C128AMetadataTest, LengthsAtTheBorders) {
  Case borders;
  borders.positions = {0, 126, 127, 128, 254, 255, 256, 383, 384};
  borders.seqs.assign(9, 0);
  borders.slots.assign(9, 5);
  std::vector<int32_t> indices, lengths;
  ASSERT_TRUE(borders.Run(&indices, &lengths).ok());
  EXPECT_THAT(lengths, ::testing::ElementsAre(0, 0, 1, 1, 1, 2, 2, 3, 3));
}

TEST(C128AMetadataTest, DecodesFirstThenChunksOfSeveralRequestsAndPaddedRows) {
  Case mixed;
  mixed.positions = {300, 0, 511, 200, 250, 251, 252, 900, 901, 0, 1000};
  mixed.seqs = {2, 0, 1, 3, 0, 0, 0, 1, 1, 2, 3};
  mixed.slots = {9, 1, 4, -1, 7, 8, 9, 1, 2, -1, 3};
  mixed.num_decode_rows = 4;
  mixed.ExpectRight();
}

// kernels.md 7.3: rows of a default width overwrote their neighbours.
TEST(C128AMetadataTest, WritesTheWidthWhateverTheStride) {
  Case strided;
  strided.positions = {1023, 0, 700};
  strided.seqs = {0, 1, 2};
  strided.slots = {1, 2, 3};
  strided.num_decode_rows = 2;
  strided.extra_stride = 8192;
  strided.ExpectRight();
}

TEST(C128AMetadataTest, BeyondEightThousandEntries) {
  Case far;
  far.max_model_len = 1 << 20;
  ASSERT_EQ(far.width(), 8192);
  far.max_model_len = 8300 * 128;
  ASSERT_EQ(far.width(), 8320);
  far.positions = {8300 * 128 - 1, 8193 * 128 - 2, 1000000};
  far.seqs = {0, 1, 2};
  far.slots = {0, 0, 0};
  far.num_decode_rows = 2;
  far.ExpectRight();
}

TEST(C128AMetadataTest, OtherRatiosAndBlocks) {
  Case small;
  small.ratio = 32;
  small.block_entries = 8;
  for (int32_t position = 0; position < 300; position += 13) {
    small.positions.push_back(position);
    small.seqs.push_back(1);
    small.slots.push_back(0);
  }
  small.num_decode_rows = 12;
  small.ExpectRight();
}

TEST(C128AMetadataTest, WidthIsPaddedToTheMultipleOfSparseAttention) {
  EXPECT_EQ(C128AWidth(127, 128), 0);
  EXPECT_EQ(C128AWidth(128, 128), kSparseIndexMultiple);
  EXPECT_EQ(C128AWidth(128 * 128, 128), 128);
  EXPECT_EQ(C128AWidth(128 * 129, 128), 256);
}

// An index that no block stands behind is never a slot.
TEST(C128AMetadataTest, EntriesWithoutABlockAreInvalid) {
  ThreadPool pool(1);
  const std::vector<int32_t> positions = {400}, seqs = {0}, table = {4, -1};
  const std::vector<int64_t> slots = {0};
  std::vector<int32_t> indices(128), lengths(1);
  ASSERT_TRUE(C128AMetadata(pool, {.num_rows = 1,
                                   .num_decode_rows = 1,
                                   .block_entries = 2,
                                   .positions = positions.data(),
                                   .slots = slots.data(),
                                   .row_to_seq = seqs.data(),
                                   .block_table = table.data(),
                                   .block_table_stride = 2,
                                   .indices = indices.data(),
                                   .index_stride = 128,
                                   .width = 128,
                                   .lengths = lengths.data()})
                  .ok());
  EXPECT_EQ(lengths[0], 3);
  EXPECT_EQ(indices[0], 8);
  EXPECT_EQ(indices[1], 9);
  EXPECT_THAT(absl::MakeConstSpan(indices).subspan(2), Each(-1));
}

TEST(C128AMetadataTest, NamesWhatDoesNotFit) {
  Case narrow;
  narrow.max_model_len = 128;  // width 128
  narrow.positions = {0, 129 * 128 - 1};
  narrow.seqs = {0, 0};
  narrow.slots = {0, 0};
  std::vector<int32_t> indices, lengths;
  absl::Status status = narrow.Run(&indices, &lengths);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("row 1 sees 129 entries, the width is 128"));
  EXPECT_THAT(indices, Each(kMarker));
  narrow.positions = {0, 1};
  narrow.num_decode_rows = 3;
  status = narrow.Run(&indices, &lengths);
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 rows, 3 of them decodes"));
}

}  // namespace
}  // namespace kernels::cpu
