#include "kernels/cuda/cuda_backend.h"

#include <vector>

#include "tests/kernels/cuda/device_test.h"

namespace kernels {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CudaBackendTest : public DeviceTest {};

TEST_F(CudaBackendTest, BuffersAreZeroedAndAligned) {
  EXPECT_EQ(device_->name(), "cuda");
  for (const int64_t size : {0, 1, 63, 64, 1000}) {
    const auto buffer = device_->Allocate(size);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ((*buffer)->size_bytes(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % 256, 0u);
    EXPECT_THAT(Download((*buffer)->data(), size), Each(std::byte{0}));
  }
  EXPECT_EQ(device_->Allocate(-1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->Allocate(int64_t{1} << 50).status().code(),
            absl::StatusCode::kResourceExhausted);
  // A refusal leaves nothing behind.
  EXPECT_TRUE(device_->Allocate(64).ok());
  EXPECT_TRUE(device_->Synchronize({}).ok());
}

TEST_F(CudaBackendTest, CopyBlocksCopiesWholeBlocksInOrder) {
  std::vector<uint8_t> cache;
  for (uint8_t block = 0; block < 5; ++block) cache.insert(cache.end(), 3, block);
  uint8_t* device = Upload(cache);
  // 1 -> 3, then what is in 3 -> 4; negative ids are skipped.
  ASSERT_TRUE(
      device_->CopyBlocks({}, reinterpret_cast<std::byte*>(device), 3, {1, 3, -1, 2}, {3, 4, 0, -1})
          .ok());
  EXPECT_THAT(Download(device, 15), ElementsAre(0, 0, 0, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1));
  EXPECT_THAT(std::string(device_->CopyBlocks({}, nullptr, 3, {1, 2}, {3}).message()),
              HasSubstr("2 blocks to 1"));
}

}  // namespace
}  // namespace kernels
