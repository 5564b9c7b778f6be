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

// A transfer of 1000 tokens, 4 blocks: 250 entries and keys in 21 layers, 7 entries in 20
// (models.md 10.2: 3,066 + 91 + 693 bytes a token).  Padding: what is missing to 4 * 64 entries or
// 4 * 2, to a multiple of 576 (64 and 560 bytes a layer and block) and to 256 (192 and 64).
TEST(DeepseekV4LayoutTest, UsefulBytesAndPaddingOfPublishedFlash) {
  const CacheLayout blocks(DeepseekV4Layout(Flash(), KvCacheDtype::kFp8, 256).spec());
  const std::vector<GroupBytes> groups = blocks.BytesOf(0, 1000, /*state_slot=*/true);
  ASSERT_EQ(groups.size(), 4u);
  const auto expect = [&](size_t i, const char* name, uint64_t useful, uint64_t padding) {
    EXPECT_EQ(groups[i].name, name);
    EXPECT_EQ(groups[i].useful, useful) << name;
    EXPECT_EQ(groups[i].padding, padding) << name;
  };
  expect(0, "csa", 3'066'000, 21 * (6 * 584 + 4 * (64 + 192)));
  expect(1, "hca", 81'760, 20 * (1 * 584 + 4 * (560 + 64)));
  expect(2, "csa_index_key", 693'000, 21 * 6 * 132);
  expect(3, "state", 3'659'776, 0);
  uint64_t sum = 0;
  for (const GroupBytes& group : groups) sum += group.useful + group.padding;
  EXPECT_EQ(sum, 4u * 1'003'520 + 3'659'776);
  // The rest of a prompt whose first block is there: entries 64 to 249, and 2 to 6.
  const std::vector<GroupBytes> rest = blocks.BytesOf(256, 1000, /*state_slot=*/false);
  ASSERT_EQ(rest.size(), 3u);
  EXPECT_EQ(rest[0].useful, 21u * 186 * 584);
  EXPECT_EQ(rest[1].useful, 20u * 5 * 584);
  EXPECT_EQ(rest[1].padding, 20u * (1 * 584 + 3 * (560 + 64)));
  EXPECT_EQ(rest[2].useful, 21u * 186 * 132);
}

// What models.md 10.2 says of an fp8 cache, part by part:
//   3,850 (Flash), 5,511 (Pro)  bytes of entries and keys a token, without padding
//   3.21, 4.56 MB               the window, layers * 128 * 584
//   255.5, 365.8 MB             "total at 64k": those two, and not the next
//   12.2, 18.7 MB               the compressors' state in the official form, every token of the
//                               open windows kept in float32 (7.7), per CSA layer
//                               8 * 2 * (1024 + 256) floats, per HCA layer 128 * 2 * 512
// Ours keeps sums of the same tokens instead (kernels/compress_kv.h): 6 * (512 + 128) and 3 * 512
// floats.  So a slot is the window and 0.45 or 0.65 MB, and a sequence of 64k tokens takes 260.6
// and 373.3 MB where the official form would take 267.7 and 384.5.
TEST(DeepseekV4LayoutTest, MemoryOfASequenceIsWhatIsPublished) {
  nlohmann::json pro = PublishedV4Flash();
  pro["num_hidden_layers"] = 61;
  pro["compress_ratios"] = {128, 128};
  for (int layer = 2; layer < 61; ++layer) {
    pro["compress_ratios"].push_back(layer % 2 == 0 ? 4 : 128);
  }
  const struct {
    ModelConfig config;
    int64_t csa_layers, hca_layers, window_layers;
    double bytes_per_token, window, official_state, total_at_64k;  // models.md
  } cases[] = {
      {Flash(), 21, 20, 2, 3850, 3.21e6, 12.2e6, 255.5e6},
      {*ParseModelConfig(pro.dump(), "config.json"), 30, 31, 0, 5511, 4.56e6, 18.7e6, 365.8e6}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.total_at_64k);
    constexpr int64_t kTokens = 65536;
    const CacheSpec spec = DeepseekV4Layout(one.config, KvCacheDtype::kFp8, 256).spec();
    const CacheLayout blocks(spec);
    const auto paged = static_cast<double>(kTokens / 256 * blocks.block_bytes());
    EXPECT_NEAR(paged / kTokens, one.bytes_per_token, 0.02 * one.bytes_per_token);
    uint64_t useful = 0;
    for (const GroupBytes& group : blocks.BytesOf(0, kTokens, false)) useful += group.useful;
    EXPECT_NEAR(static_cast<double>(useful) / kTokens, one.bytes_per_token, 0.5);

    const int64_t window = (one.csa_layers + one.hca_layers + one.window_layers) * 128 * 584;
    EXPECT_NEAR(static_cast<double>(window), one.window, 0.005e6);
    EXPECT_NEAR(paged + static_cast<double>(window), one.total_at_64k, 0.02 * one.total_at_64k);

    const int64_t official = one.csa_layers * 8 * 2 * (1024 + 256) * 4 +  // floats
                             one.hca_layers * 128 * 2 * 512 * 4;
    EXPECT_NEAR(static_cast<double>(official), one.official_state, 0.05e6);
    const int64_t sums = one.csa_layers * 6 * (512 + 128) * 4 + one.hca_layers * 3 * 512 * 4;
    EXPECT_EQ(spec.state_slot_bytes, (window + sums + 255) / 256 * 256);
    // Paged groups and slot together, a token at 64k: no more than the official form.
    EXPECT_LT(paged + static_cast<double>(spec.state_slot_bytes),
              one.total_at_64k + one.official_state);
  }
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
