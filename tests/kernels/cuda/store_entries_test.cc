// StoreKv of index keys and of V4's entries, CopyKvEntries, and Rope with a norm.

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/store_kv.h"
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

struct Rotation {
  Rotation(int32_t rope_dim, uint32_t seed) : rope_dim(rope_dim) {
    for (const float angle : RandomTensor(kMaxPositions * rope_dim / 2, seed)) {
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
  }
  int32_t rope_dim;
  std::vector<float> cos, sin;
};

struct Pages {
  Pages(KvFormat format, int32_t dim, int32_t rope_dim) {
    pages.format = format;
    pages.block_size = kBlockSize;
    pages.entry_bytes = KvEntryBytes(format, dim, rope_dim);
    pages.block_stride = pages.entry_bytes * kBlockSize + 32;
    memory.assign(pages.block_stride * kNumBlocks, std::byte{0xff});
  }
  KvPages At(std::byte* base) const {
    KvPages at = pages;
    at.base = base;
    return at;
  }
  KvPages pages;
  std::vector<std::byte> memory;
};

class CudaStoreEntriesTest : public DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    for (int32_t row = 0; row < kRows; ++row) {
      positions_.push_back(row * 7 % kMaxPositions);
      slots_.push_back((row * 5 + 3) % (kNumBlocks * kBlockSize));
    }
    slots_[4] = -1;
    positions_[4] = -5;  // not looked at where nothing is stored
  }
  RopeTable OnDevice(const Rotation& rotation, RopeLayout layout) {
    return {Upload(rotation.cos), Upload(rotation.sin), rotation.rope_dim, kMaxPositions, layout};
  }
  static RopeTable OnHost(const Rotation& rotation, RopeLayout layout) {
    return {rotation.cos.data(), rotation.sin.data(), rotation.rope_dim, kMaxPositions, layout};
  }

  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
};

TEST_F(CudaStoreEntriesTest, NormedEntriesAreTheBytesOfTheCpu) {
  const struct { int32_t dim, rope_dim; } sizes[] = {{448, 64}, {70, 6}, {130, 0}, {3, 2}};
  for (const KvFormat format :
       {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFp8Latent, KvFormat::kFp8SharedKv}) {
    for (const auto& size : sizes) {
      SCOPED_TRACE(size.dim);
      const int32_t entry = size.dim + size.rope_dim;
      const std::vector<float> kv = RandomTensor(kRows * (entry + 3), 1, 3);
      const std::vector<float> weight = RandomTensor(entry, 2);
      const Rotation rotation(size.rope_dim, 3);
      Pages pages(format, size.dim, size.rope_dim);
      std::byte* memory = UploadBytes(pages.memory);
      StoreKvParams params{.num_rows = kRows,
                           .kv_a = kv.data(),
                           .kv_a_row_stride = entry + 3,
                           .kv_lora_rank = size.dim,
                           .norm_weight = weight.data(),
                           .norm_rope = true,
                           .rope = OnHost(rotation, RopeLayout::kInterleaved),
                           .positions = positions_.data(),
                           .slots = slots_.data(),
                           .pages = pages.At(pages.memory.data())};
      ASSERT_TRUE(host_->StoreKv({}, params).ok());
      params.kv_a = Upload(kv);
      params.norm_weight = Upload(weight);
      params.rope = OnDevice(rotation, RopeLayout::kInterleaved);
      params.positions = Upload(positions_);
      params.slots = Upload(slots_);
      params.pages = pages.At(memory);
      const absl::Status status = device_->StoreKv({}, params);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(Download(memory, pages.memory.size()) == pages.memory)
          << "format " << static_cast<int>(format);
    }
  }
}

TEST_F(CudaStoreEntriesTest, IndexKeysAreTheBytesOfTheCpu) {
  const struct {
    int32_t rank, rope_dim, key_dim, key_rope_dim;
  } sizes[] = {{512, 64, 128, 64}, {24, 6, 40, 4}, {24, 0, 200, 0}};
  for (const KvFormat format : {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFp8IndexKey}) {
    for (const auto& size : sizes) {
      SCOPED_TRACE(size.key_dim);
      const int32_t entry = size.rank + size.rope_dim;
      const std::vector<float> kv = RandomTensor(kRows * entry, 1, 3);
      const std::vector<float> keys = RandomTensor(kRows * (size.key_dim + 1), 4, 2);
      const std::vector<float> weight = RandomTensor(size.rank, 2);
      const std::vector<float> key_weight = RandomTensor(size.key_dim, 5);
      const std::vector<float> key_bias = RandomTensor(size.key_dim, 6);
      const Rotation rotation(size.rope_dim, 3), key_rotation(size.key_rope_dim, 7);
      Pages latents(KvFormat::kFp8Latent, size.rank, size.rope_dim);
      Pages index(format, size.key_dim, 0);
      std::byte* latent_memory = UploadBytes(latents.memory);
      std::byte* index_memory = UploadBytes(index.memory);
      StoreKvParams params{.num_rows = kRows,
                           .kv_a = kv.data(),
                           .kv_a_row_stride = entry,
                           .kv_lora_rank = size.rank,
                           .norm_weight = weight.data(),
                           .rope = OnHost(rotation, RopeLayout::kInterleaved),
                           .positions = positions_.data(),
                           .slots = slots_.data(),
                           .pages = latents.At(latents.memory.data()),
                           .index_key = {.dim = size.key_dim,
                                         .key = keys.data(),
                                         .key_row_stride = size.key_dim + 1,
                                         .norm_weight = key_weight.data(),
                                         .norm_bias = key_bias.data(),
                                         .rope = OnHost(key_rotation, RopeLayout::kHalfSplit),
                                         .pages = index.At(index.memory.data())}};
      ASSERT_TRUE(host_->StoreKv({}, params).ok());
      params.kv_a = Upload(kv);
      params.norm_weight = Upload(weight);
      params.rope = OnDevice(rotation, RopeLayout::kInterleaved);
      params.positions = Upload(positions_);
      params.slots = Upload(slots_);
      params.pages = latents.At(latent_memory);
      params.index_key.key = Upload(keys);
      params.index_key.norm_weight = Upload(key_weight);
      params.index_key.norm_bias = Upload(key_bias);
      params.index_key.rope = OnDevice(key_rotation, RopeLayout::kHalfSplit);
      params.index_key.pages = index.At(index_memory);
      const absl::Status status = device_->StoreKv({}, params);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_TRUE(Download(latent_memory, latents.memory.size()) == latents.memory);
      EXPECT_TRUE(Download(index_memory, index.memory.size()) == index.memory)
          << "format " << static_cast<int>(format);
    }
  }
}

TEST_F(CudaStoreEntriesTest, CopiedEntriesAreTheSameBytes) {
  for (const KvFormat format : {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFp8Latent,
                                KvFormat::kFp8IndexKey, KvFormat::kFp8SharedKv}) {
    const int32_t rope_dim = format == KvFormat::kFp8IndexKey ? 0 : 6;
    Pages from(format, 70, rope_dim), to(format, 70, rope_dim);
    for (size_t i = 0; i < from.memory.size(); ++i) from.memory[i] = std::byte(i * 37 % 251);
    std::byte* memory = UploadBytes(to.memory);
    std::vector<int64_t> targets;
    for (int32_t i = 0; i < kRows; ++i) targets.push_back((i * 11 + 2) % (kNumBlocks * kBlockSize));
    targets[9] = -1;
    CopyKvEntriesParams params{.num_entries = kRows,
                               .src_slots = slots_.data(),
                               .dst_slots = targets.data(),
                               .src = from.At(from.memory.data()),
                               .dst = to.At(to.memory.data()),
                               .dim = 70,
                               .rope_dim = rope_dim};
    ASSERT_TRUE(host_->CopyKvEntries({}, params).ok());
    params.src_slots = Upload(slots_);
    params.dst_slots = Upload(targets);
    params.src.base = UploadBytes(from.memory);
    params.dst.base = memory;
    ASSERT_TRUE(device_->CopyKvEntries({}, params).ok());
    EXPECT_TRUE(Download(memory, to.memory.size()) == to.memory)
        << "format " << static_cast<int>(format);
  }
}

TEST_F(CudaStoreEntriesTest, RopeWithANormEqualsTheCpu) {
  constexpr int32_t kHeads = 5, kDim = 70, kRopeDim = 6;
  constexpr int64_t kHeadStride = kDim + 3, kRowStride = kHeads * kHeadStride + 2;
  std::vector<float> x = RandomTensor(kRows * kRowStride, 1, 2);
  const Rotation rotation(kRopeDim, 2);
  positions_[4] = 0;
  float* device_x = Upload(x);
  RopeParams params{.num_rows = kRows,
                    .num_heads = kHeads,
                    .data = x.data() + kDim - kRopeDim,
                    .row_stride = kRowStride,
                    .head_stride = kHeadStride,
                    .rope = OnHost(rotation, RopeLayout::kInterleaved),
                    .positions = positions_.data(),
                    .norm_dim = kDim};
  ASSERT_TRUE(host_->Rope({}, params).ok());
  params.data = device_x + kDim - kRopeDim;
  params.rope = OnDevice(rotation, RopeLayout::kInterleaved);
  params.positions = Upload(positions_);
  ASSERT_TRUE(device_->Rope({}, params).ok());
  EXPECT_TRUE(numerics::BitEqual(Download(device_x, x.size()), x));
}

TEST_F(CudaStoreEntriesTest, APositionOutsideTheTableIsReported) {
  const std::vector<float> kv = RandomTensor(kRows * 16, 1), weight(16, 1.0f);
  const Rotation rotation(2, 3);
  Pages pages(KvFormat::kFp8SharedKv, 14, 2);
  positions_[2] = kMaxPositions;
  std::byte* memory = UploadBytes(pages.memory);
  ASSERT_TRUE(device_
                  ->StoreKv({}, {.num_rows = kRows,
                                 .kv_a = Upload(kv),
                                 .kv_a_row_stride = 16,
                                 .kv_lora_rank = 14,
                                 .norm_weight = Upload(weight),
                                 .norm_rope = true,
                                 .rope = OnDevice(rotation, RopeLayout::kInterleaved),
                                 .positions = Upload(positions_),
                                 .slots = Upload(slots_),
                                 .pages = pages.At(memory)})
                  .ok());
  EXPECT_THAT(TakeFault(), HasSubstr("row 2: position 40 is outside the rope table"));
}

}  // namespace
}  // namespace kernels
