#include "kernels/window_slots.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/kernels/cuda/device_test.h"

namespace kernels {
namespace {

using ::testing::HasSubstr;

// Rows of four sequences, the second of which is a padded one.
class CudaWindowSlotsTest : public DeviceTest {
 protected:
  static constexpr int32_t kWindow = 150, kWidth = 256;

  void Fill(const std::vector<int32_t>& positions) {
    positions_ = positions;
    for (size_t row = 0; row < positions.size(); ++row) {
      starts_.push_back(std::max(0, positions[row] - kWindow + 1));
      seqs_.push_back(static_cast<int32_t>(row % 4));
    }
  }
  WindowSlotsParams Params(int32_t num_ring_rows) const {
    return {.num_rows = static_cast<int32_t>(positions_.size()),
            .num_ring_rows = num_ring_rows,
            .window = kWindow,
            .width = kWidth};
  }
  WindowSlotsParams OnDevice(WindowSlotsParams p) {
    p.positions = Upload(positions_);
    p.window_start = Upload(starts_);
    p.row_to_seq = Upload(seqs_);
    p.state_slots = Upload(state_slots_);
    p.buffer_begin = Upload(buffer_begin_);
    p.own = Upload(std::vector<int64_t>(positions_.size(), 777));
    p.indices = Upload(std::vector<int32_t>(positions_.size() * kWidth, 777));
    p.lengths = Upload(std::vector<int32_t>(positions_.size(), 777));
    return p;
  }

  std::vector<int32_t> positions_, starts_, seqs_;
  const std::vector<int32_t> state_slots_ = {3, -1, 0, 1000000};
  const std::vector<int32_t> buffer_begin_ = {0, 7, -100, 400};
};

TEST_F(CudaWindowSlotsTest, EqualsTheCpu) {
  Fill({0, 0, 1, 149, 150, 0, 151, 299, 300, 5000, 1048575, 17});
  for (const int32_t num_ring_rows : {0, 5, 12}) {
    WindowSlotsParams p = Params(num_ring_rows);
    const WindowSlotsParams device = OnDevice(p);
    std::vector<int64_t> own(positions_.size());
    std::vector<int32_t> indices(positions_.size() * kWidth), lengths(positions_.size());
    p.positions = positions_.data();
    p.window_start = starts_.data();
    p.row_to_seq = seqs_.data();
    p.state_slots = state_slots_.data();
    p.buffer_begin = buffer_begin_.data();
    p.own = own.data();
    p.indices = indices.data();
    p.lengths = lengths.data();
    ASSERT_TRUE(host_->WindowSlots({}, p).ok());
    ASSERT_TRUE(device_->WindowSlots({}, device).ok());
    EXPECT_EQ(Download(device.own, own.size()), own);
    EXPECT_EQ(Download(device.indices, indices.size()), indices);
    EXPECT_EQ(Download(device.lengths, lengths.size()), lengths);
  }
}

TEST_F(CudaWindowSlotsTest, ARowBeyondTheWindowIsReported) {
  Fill({0, 0, 200});
  starts_[2] = 50;
  ASSERT_TRUE(device_->WindowSlots({}, OnDevice(Params(3))).ok());
  EXPECT_THAT(TakeFault(), HasSubstr("sequence 2 has no block for position 200"));
}

}  // namespace
}  // namespace kernels
