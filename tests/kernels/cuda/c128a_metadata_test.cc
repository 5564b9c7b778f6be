#include "kernels/c128a_metadata.h"

#include <cstdint>
#include <vector>

#include "tests/kernels/cuda/device_test.h"

namespace kernels {
namespace {

using ::testing::HasSubstr;

class CudaC128AMetadataTest : public DeviceTest {
 protected:
  // Rows of two sequences, a padded one among them, in pages of two entries; one block is missing.
  CudaC128AMetadataTest() {
    for (int32_t seq = 0; seq < 2; ++seq) {
      for (int32_t i = 0; i < kBlocks; ++i)
        table_.push_back(3 + (i * 7 + seq * 5) % 100 + 100 * seq);
    }
    table_[kBlocks + 3] = -1;
  }
  C128AMetadataParams Params(const std::vector<int32_t>& positions, int32_t num_decode_rows) const {
    return {.num_rows = static_cast<int32_t>(positions.size()),
            .num_decode_rows = num_decode_rows,
            .tokens_per_entry = 4,
            .block_entries = 2,
            .block_table_stride = kBlocks,
            .index_stride = kWidth + 3,
            .width = kWidth};
  }
  C128AMetadataParams OnDevice(C128AMetadataParams p, const std::vector<int32_t>& positions) {
    const auto rows = static_cast<size_t>(p.num_rows);
    std::vector<int32_t> seqs(rows);
    for (size_t i = 0; i < rows; ++i) seqs[i] = static_cast<int32_t>(i % 2);
    std::vector<int64_t> slots(rows, 5);
    slots[2] = -1;
    host_seqs_ = seqs;
    host_slots_ = slots;
    p.positions = Upload(positions);
    p.slots = Upload(slots);
    p.row_to_seq = Upload(seqs);
    p.block_table = Upload(table_);
    p.indices = Upload(std::vector<int32_t>(rows * p.index_stride, 777));
    p.lengths = Upload(std::vector<int32_t>(rows, 777));
    return p;
  }

  static constexpr int32_t kBlocks = 80;
  static constexpr int32_t kWidth = 128;
  std::vector<int32_t> table_, host_seqs_;
  std::vector<int64_t> host_slots_;
};

TEST_F(CudaC128AMetadataTest, EqualsTheCpu) {
  const std::vector<int32_t> positions = {0, 3, 100, 255, 511, 4, 300, 301};
  for (const int32_t num_decode_rows : {0, 5, 8}) {
    C128AMetadataParams p = Params(positions, num_decode_rows);
    const C128AMetadataParams device = OnDevice(p, positions);
    const size_t size = positions.size() * p.index_stride;
    std::vector<int32_t> indices(size, 777), lengths(positions.size(), 777);
    p.positions = positions.data();
    p.slots = host_slots_.data();
    p.row_to_seq = host_seqs_.data();
    p.block_table = table_.data();
    p.indices = indices.data();
    p.lengths = lengths.data();
    ASSERT_TRUE(host_->C128AMetadata({}, p).ok());
    ASSERT_TRUE(device_->C128AMetadata({}, device).ok());
    EXPECT_EQ(Download(device.indices, size), indices);
    EXPECT_EQ(Download(device.lengths, lengths.size()), lengths);
  }
}

TEST_F(CudaC128AMetadataTest, ARowBeyondTheWidthIsReported) {
  const std::vector<int32_t> positions = {0, 3, 100, 4 * (kWidth + 1)};
  ASSERT_TRUE(device_->C128AMetadata({}, OnDevice(Params(positions, 4), positions)).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("sequence 1 has no block for position 516"));
}

}  // namespace
}  // namespace kernels
