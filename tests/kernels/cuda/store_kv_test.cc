#include "kernels/store_kv.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/kernels/cuda/device_test.h"
#include "tests/kernels/random_tensor.h"
#include "tests/numerics/compare.h"

namespace kernels {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kMaxPositions = 40;
constexpr int32_t kBlockSize = 4;
constexpr int32_t kNumBlocks = 12;
constexpr int32_t kRows = 29;

class CudaStoreKvTest : public DeviceTest, public ::testing::WithParamInterface<KvFormat> {
 protected:
  // `gap`: bytes behind an entry.
  void Make(int32_t rank, int32_t rope_dim, RopeLayout layout, int32_t gap = 4) {
    rank_ = rank;
    rope_dim_ = rope_dim;
    row_stride_ = rank + rope_dim + 3;
    kv_a_ = RandomTensor(kRows * row_stride_, 1, 3);
    weight_ = RandomTensor(rank, 2);
    const std::vector<float> angles = RandomTensor(kMaxPositions * rope_dim / 2, 3);
    cos_.clear();
    sin_.clear();
    for (const float angle : angles) {
      cos_.push_back(std::cos(angle));
      sin_.push_back(std::sin(angle));
    }
    positions_.resize(kRows);
    slots_.resize(kRows);
    for (int32_t row = 0; row < kRows; ++row) {
      positions_[row] = row * 7 % kMaxPositions;
      slots_[row] = (row * 5 + 3) % (kNumBlocks * kBlockSize);
    }
    slots_[4] = -1;
    slots_[17] = std::numeric_limits<int64_t>::min();
    positions_[4] = -5;  // not looked at where nothing is stored
    pages_.block_size = kBlockSize;
    pages_.format = GetParam();
    pages_.entry_bytes = KvEntryBytes(GetParam(), rank, rope_dim) + gap;
    pages_.block_stride = pages_.entry_bytes * kBlockSize + 3 * gap;
    memory_.assign(pages_.block_stride * kNumBlocks, std::byte{0xff});
    rope_layout_ = layout;
  }

  StoreKvParams Params(std::byte* pages, const float* kv_a, const float* weight, const float* cos,
                       const float* sin, const int32_t* positions, const int64_t* slots) const {
    StoreKvParams params;
    params.num_rows = kRows;
    params.kv_a = kv_a;
    params.kv_a_row_stride = row_stride_;
    params.kv_lora_rank = rank_;
    params.norm_weight = weight;
    params.rope = {cos, sin, rope_dim_, kMaxPositions, rope_layout_};
    params.positions = positions;
    params.slots = slots;
    params.pages = pages_;
    params.pages.base = pages;
    return params;
  }

  // Gathers all rows in float32 and in bf16, and compares them.
  void ExpectRoundedRows(int64_t latent_stride, int64_t k_rope_stride) {
    ASSERT_TRUE(host_
                    ->StoreKv({}, Params(memory_.data(), kv_a_.data(), weight_.data(), cos_.data(),
                                         sin_.data(), positions_.data(), slots_.data()))
                    .ok());
    GatherKvParams params;
    params.num_rows = kRows;
    params.slots = Upload(slots_);
    params.pages = pages_;
    params.pages.base = UploadBytes(memory_);
    params.kv_lora_rank = rank_;
    params.rope_dim = rope_dim_;
    params.latent_row_stride = latent_stride;
    params.k_rope_row_stride = k_rope_stride;
    const std::vector<float> latent(kRows * latent_stride, kNan),
        k_rope(kRows * k_rope_stride, kNan);
    params.latent = Upload(latent);
    params.k_rope = Upload(k_rope);
    ASSERT_TRUE(device_->GatherKv({}, params).ok());
    const std::vector<float> expected_latent =
        Download(static_cast<const float*>(params.latent), latent.size());
    const std::vector<float> expected_k_rope =
        Download(static_cast<const float*>(params.k_rope), k_rope.size());
    params.dtype = DType::kBfloat16;
    params.latent = Upload(std::vector<uint16_t>(latent.size(), 0xffff));
    params.k_rope = Upload(std::vector<uint16_t>(k_rope.size(), 0xffff));
    ASSERT_TRUE(device_->GatherKv({}, params).ok());
    const auto expect_rounded = [&](const void* device, const std::vector<float>& expected) {
      const auto rounded = Download(static_cast<const uint16_t*>(device), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        const uint32_t bits = uint32_t{rounded[i]} << 16;
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        if (std::isnan(expected[i])) {
          EXPECT_EQ(rounded[i], 0xffff);  // nobody's
        } else {
          EXPECT_NEAR(value, expected[i], 0x1p-8 * std::abs(expected[i]));
        }
      }
    };
    expect_rounded(params.latent, expected_latent);
    expect_rounded(params.k_rope, expected_k_rope);
  }

  int32_t rank_ = 0, rope_dim_ = 0;
  int64_t row_stride_ = 0;
  RopeLayout rope_layout_ = RopeLayout::kInterleaved;
  std::vector<float> kv_a_, weight_, cos_, sin_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  std::vector<std::byte> memory_;
  KvPages pages_;
};

TEST_P(CudaStoreKvTest, WritesTheBytesOfTheCpu) {
  const struct { int32_t rank, rope_dim; } sizes[] = {{512, 64}, {24, 6}, {130, 2}, {300, 0}};
  for (const auto& size : sizes) {
    for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
      SCOPED_TRACE(size.rank);
      Make(size.rank, size.rope_dim, layout);
      std::byte* device_memory = UploadBytes(memory_);
      ASSERT_TRUE(
          device_
              ->StoreKv({}, Params(device_memory, Upload(kv_a_), Upload(weight_), Upload(cos_),
                                   Upload(sin_), Upload(positions_), Upload(slots_)))
              .ok());
      ASSERT_TRUE(
          host_
              ->StoreKv({}, Params(memory_.data(), kv_a_.data(), weight_.data(), cos_.data(),
                                   sin_.data(), positions_.data(), slots_.data()))
              .ok());
      EXPECT_TRUE(Download(device_memory, memory_.size()) == memory_);
    }
  }
}

TEST_P(CudaStoreKvTest, GathersWhatTheCpuGathers) {
  Make(130, 6, RopeLayout::kInterleaved);
  ASSERT_TRUE(host_
                  ->StoreKv({}, Params(memory_.data(), kv_a_.data(), weight_.data(), cos_.data(),
                                       sin_.data(), positions_.data(), slots_.data()))
                  .ok());
  std::vector<float> latent(kRows * 131, kNan), k_rope(kRows * 8, kNan);
  GatherKvParams params;
  params.num_rows = kRows;
  params.slots = slots_.data();
  params.pages = pages_;
  params.pages.base = memory_.data();
  params.kv_lora_rank = 130;
  params.rope_dim = 6;
  params.latent = latent.data();
  params.latent_row_stride = 131;
  params.k_rope = k_rope.data();
  params.k_rope_row_stride = 8;
  float *device_latent = Upload(latent), *device_k_rope = Upload(k_rope);
  ASSERT_TRUE(host_->GatherKv({}, params).ok());
  params.slots = Upload(slots_);
  params.pages.base = UploadBytes(memory_);
  params.latent = device_latent;
  params.k_rope = device_k_rope;
  ASSERT_TRUE(device_->GatherKv({}, params).ok());
  EXPECT_TRUE(numerics::BitEqual(Download(device_latent, latent.size()), latent));
  EXPECT_TRUE(numerics::BitEqual(Download(device_k_rope, k_rope.size()), k_rope));
}

TEST_P(CudaStoreKvTest, GathersRoundedRows) {
  Make(130, 6, RopeLayout::kInterleaved);
  ExpectRoundedRows(/*latent_stride=*/131, /*k_rope_stride=*/8);
}

TEST_P(CudaStoreKvTest, GathersRoundedRowsInPieces) {
  Make(264, 64, RopeLayout::kInterleaved, /*gap=*/16);
  ExpectRoundedRows(/*latent_stride=*/272, /*k_rope_stride=*/64);
}

TEST_P(CudaStoreKvTest, APositionOutsideTheTableIsReported) {
  Make(24, 6, RopeLayout::kInterleaved);
  positions_[2] = kMaxPositions;
  std::byte* device_memory = UploadBytes(memory_);
  ASSERT_TRUE(device_
                  ->StoreKv({}, Params(device_memory, Upload(kv_a_), Upload(weight_), Upload(cos_),
                                       Upload(sin_), Upload(positions_), Upload(slots_)))
                  .ok());
  EXPECT_THAT(TakeFault(), HasSubstr("row 2: position 40 is outside the rope table"));
  const std::vector<std::byte> after = Download(device_memory, memory_.size());
  const int64_t entry =
      slots_[2] / kBlockSize * pages_.block_stride + slots_[2] % kBlockSize * pages_.entry_bytes;
  EXPECT_EQ(after[entry], std::byte{0xff});
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaStoreKvTest,
                         ::testing::Values(KvFormat::kFloat32, KvFormat::kBfloat16,
                                           KvFormat::kFp8Latent));

class CudaRopeTest : public DeviceTest, public ::testing::WithParamInterface<RopeLayout> {};

TEST_P(CudaRopeTest, EqualsTheCpuBitForBit) {
  constexpr int32_t kHeads = 5, kRopeDim = 64;
  constexpr int64_t kHeadStride = kRopeDim + 5, kRowStride = kHeads * kHeadStride + 2;
  std::vector<float> x = RandomTensor(kRows * kRowStride, 1);
  const std::vector<float> cos = RandomTensor(50 * kRopeDim / 2, 2);
  const std::vector<float> sin = RandomTensor(50 * kRopeDim / 2, 3);
  std::vector<int32_t> positions(kRows);
  for (int32_t t = 0; t < kRows; ++t) positions[t] = t * 13 % 50;
  float* device_x = Upload(x);
  RopeParams params;
  params.num_rows = kRows;
  params.num_heads = kHeads;
  params.data = x.data();
  params.row_stride = kRowStride;
  params.head_stride = kHeadStride;
  params.rope = {cos.data(), sin.data(), kRopeDim, 50, GetParam()};
  params.positions = positions.data();
  ASSERT_TRUE(host_->Rope({}, params).ok());
  params.data = device_x;
  params.rope.cos = Upload(cos);
  params.rope.sin = Upload(sin);
  params.positions = Upload(positions);
  ASSERT_TRUE(device_->Rope({}, params).ok());
  EXPECT_TRUE(numerics::BitEqual(Download(device_x, x.size()), x));
}

INSTANTIATE_TEST_SUITE_P(Layouts, CudaRopeTest,
                         ::testing::Values(RopeLayout::kInterleaved, RopeLayout::kHalfSplit));

}  // namespace
}  // namespace kernels
