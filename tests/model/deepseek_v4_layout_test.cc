#include "model/deepseek_v4_layout.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/published_v4.h"

namespace model {
namespace {

ModelConfig Flash() {
  const auto config = ParseModelConfig(PublishedV4Flash().dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(ModelConfig());
}

// models.md 9.3: entries of 584 bytes, blocks padded to a multiple of 576; 9.4: keys of 132.
TEST(DeepseekV4LayoutTest, PublishedFlashInFp8) {
  const ModelConfig config = Flash();
  ASSERT_EQ(DefaultBlockSize(config), 256);
  const DeepseekV4Layout layout(config, KvCacheDtype::kFp8, 256);
  ASSERT_TRUE(layout.spec().Validate().ok());
  const CacheLayout blocks(layout.spec());
  ASSERT_EQ(layout.spec().groups.size(), 3u);
  const auto expect_group = [&](int32_t group, const char* name, int32_t layers, int64_t used,
                                int64_t padded) {
    EXPECT_EQ(layout.spec().groups[group].name, name);
    EXPECT_EQ(layout.spec().groups[group].layers, layers);
    EXPECT_EQ(blocks.used_bytes(group), used);
    // And aligned to 256.
    EXPECT_EQ(blocks.layer_stride_bytes(group), (padded + 255) / 256 * 256);
  };
  expect_group(0, "csa", 21, 64 * 584, 37440);
  expect_group(1, "hca", 20, 2 * 584, 1728);
  expect_group(2, "csa_index_key", 21, 64 * 132, 64 * 132);
  // Entries of a layer: block 0 begins where its group does.
  EXPECT_EQ(layout.Entries(blocks, nullptr, 3).base - layout.Entries(blocks, nullptr, 5).base,
            -blocks.layer_stride_bytes(1));
  EXPECT_EQ(layout.Entries(blocks, nullptr, 2).block_size, 64);
  EXPECT_EQ(layout.Entries(blocks, nullptr, 3).block_size, 2);
  EXPECT_EQ(layout.IndexKeys(blocks, nullptr, 4).base - layout.IndexKeys(blocks, nullptr, 2).base,
            blocks.layer_stride_bytes(2));
}

// models.md 10.2: 255.5 MB at 64k, 19.0 MB at 4k.  (Its 12.2 MB of compressor states, which it
// counts apart, are sums here: kernels/compress_kv.h.)
TEST(DeepseekV4LayoutTest, MemoryOfASequenceIsWhatIsPublished) {
  const DeepseekV4Layout layout(Flash(), KvCacheDtype::kFp8, 256);
  const CacheLayout blocks(layout.spec());
  const auto bytes = [&](int64_t tokens) {
    return static_cast<double>(tokens / 256 * blocks.block_bytes() +
                               layout.spec().state_slot_bytes);
  };
  EXPECT_NEAR(bytes(65536) / 65536, 255.5e6 / 65536, 0.02 * 255.5e6 / 65536);
  // Window: 43 layers of 128 entries; sums: 21 of 6 * (512 + 128) floats, 20 of 3 * 512.
  EXPECT_EQ(layout.spec().state_slot_bytes, 43 * 128 * 584 + 21 * 6 * 640 * 4 + 20 * 3 * 512 * 4);
}

// A slot, piece by piece, in float32.
TEST(DeepseekV4LayoutTest, StateSlotPiecesLieBehindEachOther) {
  ModelConfig config = Flash();
  config.layer_types = {LayerType::kSlidingAttention, LayerType::kCompressedSparseAttention,
                        LayerType::kHeavilyCompressedAttention};
  config.num_hidden_layers = 3;
  config.sliding_window = 7;
  config.qk_nope_head_dim = 3;
  config.qk_rope_head_dim = 2;
  config.index_head_dim = 3;
  const DeepseekV4Layout layout(config, KvCacheDtype::kFloat32, 256);
  std::byte* const base = nullptr;
  EXPECT_EQ(layout.Window(base, 0).base - base, 0);
  EXPECT_EQ(layout.Window(base, 0).entry_bytes, 20);
  EXPECT_EQ(layout.Window(base, 0).block_size, 7);
  // 140 bytes of window, to a multiple of 64: 192.
  EXPECT_EQ(layout.Window(base, 1).base - base, 192);
  EXPECT_EQ(layout.compressor_offset(1), 384);        // 6 * 5 floats: 120, padded 128
  EXPECT_EQ(layout.index_compressor_offset(1), 512);  // 6 * 3 floats: 72, padded 128
  EXPECT_EQ(layout.Window(base, 2).base - base, 640);
  EXPECT_EQ(layout.compressor_offset(2), 832);      // 3 * 5 floats: 60, padded 64
  EXPECT_EQ(layout.spec().state_slot_bytes, 1024);  // 896, to a multiple of 256
  EXPECT_EQ(layout.Window(base, 2).block_stride, 1024);
}

TEST(DeepseekV4LayoutTest, ModelsWithoutAKindOfLayerHaveNoGroupOfIt) {
  ModelConfig config = Flash();
  std::replace(config.layer_types.begin(), config.layer_types.end(),
               LayerType::kCompressedSparseAttention, LayerType::kHeavilyCompressedAttention);
  const DeepseekV4Layout layout(config, KvCacheDtype::kBfloat16, 256);
  ASSERT_EQ(layout.spec().groups.size(), 1u);
  EXPECT_EQ(layout.spec().groups[0].name, "hca");
  EXPECT_EQ(layout.spec().groups[0].layers, 41);
  EXPECT_EQ(layout.spec().groups[0].entry_bytes, 1024);
}

TEST(DeepseekV4LayoutTest, BlocksHoldWholeEntries) {
  ModelConfig config = Flash();
  EXPECT_FALSE(DeepseekV4Layout(config, KvCacheDtype::kFp8, 64).spec().Validate().ok());
  config.csa_ratio = 3;
  config.hca_ratio = 80;
  EXPECT_EQ(DefaultBlockSize(config), 960);
  EXPECT_TRUE(DeepseekV4Layout(config, KvCacheDtype::kFp8, 960).spec().Validate().ok());
}

}  // namespace
}  // namespace model
