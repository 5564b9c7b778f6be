#include "model/cache_spec.h"

#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace model {
namespace {

ModelConfig V32() {
  // The published shapes are transformers' defaults.
  const auto config = ParseModelConfig(R"({"model_type": "deepseek_v32"})", "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(ModelConfig());
}

// models.md 10.2: bytes a token and layer.
TEST(CacheSpecTest, V32KeepsIndexKeysBesideLatents) {
  const struct {
    KvCacheDtype dtype;
    int32_t latent, index_key;
  } cases[] = {{KvCacheDtype::kFloat32, 2304, 512},
               {KvCacheDtype::kBfloat16, 1152, 256},
               {KvCacheDtype::kFp8, 656, 132}};
  for (const auto& one : cases) {
    const CacheLayout layout(MakeCacheSpec(V32(), one.dtype, /*block_size=*/64));
    const std::vector<CacheGroup>& groups = layout.spec().groups;
    ASSERT_EQ(groups.size(), 2u);
    EXPECT_EQ(groups[0].name, "latent");
    EXPECT_EQ(groups[0].entry_bytes, one.latent);
    EXPECT_EQ(groups[1].name, "index_key");
    EXPECT_EQ(groups[1].entry_bytes, one.index_key);
    EXPECT_EQ(groups[1].layers, 61);
    // At these sizes nothing is padded.
    EXPECT_EQ(layout.block_bytes(), 64 * 61 * (one.latent + one.index_key));
    EXPECT_EQ(layout.bytes_per_token(), 61 * (one.latent + one.index_key));
    EXPECT_EQ(layout.offset(1, 2), 61 * 64 * one.latent + 2 * 64 * one.index_key);
  }
}

// A transfer of 1000 tokens, 16 blocks of 64 (models.md 10.2: 40,016 + 8,052 bytes a token): the
// only padding is the 24 tokens that are not there yet.
TEST(CacheSpecTest, UsefulBytesAndPaddingOfPublishedV32) {
  const CacheLayout layout(MakeCacheSpec(V32(), KvCacheDtype::kFp8, 64));
  const std::vector<GroupBytes> groups = layout.BytesOf(0, 1000, /*state_slot=*/false);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].useful, 40'016'000u);
  EXPECT_EQ(groups[0].padding, 24u * 61 * 656);
  EXPECT_EQ(groups[1].useful, 8'052'000u);
  EXPECT_EQ(groups[1].padding, 24u * 61 * 132);
}

TEST(CacheSpecTest, DenseModelsKeepLatentsOnly) {
  ModelConfig config = V32();
  config.family = ModelFamily::kDeepseekV3;
  const CacheSpec spec = MakeCacheSpec(config, KvCacheDtype::kFp8, 64);
  ASSERT_EQ(spec.groups.size(), 1u);
  EXPECT_EQ(spec.groups[0].entry_bytes, 656);
}

TEST(CacheSpecTest, EveryDtypeAndFamilyHasItsOwnFingerprint) {
  ModelConfig dense = V32();
  dense.family = ModelFamily::kDeepseekV3;
  std::set<std::string> fingerprints;
  for (const ModelConfig& config : {V32(), dense}) {
    for (const KvCacheDtype dtype :
         {KvCacheDtype::kFloat32, KvCacheDtype::kBfloat16, KvCacheDtype::kFp8}) {
      const CacheLayout layout(MakeCacheSpec(config, dtype, 64));
      fingerprints.insert(LayoutFingerprint(layout, "model", "digest"));
    }
  }
  EXPECT_EQ(fingerprints.size(), 6u);
}

// models.md 9.3: a block of 64 entries of 584 bytes is padded to a multiple of 576, and then, as
// every layer, to 256.
TEST(CacheSpecTest, EntriesOfSeveralTokensAndPaddedBlocks) {
  CacheSpec spec;
  spec.block_size = 256;
  spec.groups.push_back({.name = "csa",
                         .layers = 2,
                         .entry_bytes = 584,
                         .tokens_per_entry = 4,
                         .format = kernels::KvFormat::kFp8SharedKv,
                         .block_multiple = 576});
  spec.groups.push_back({.name = "hca",
                         .layers = 1,
                         .entry_bytes = 584,
                         .tokens_per_entry = 128,
                         .format = kernels::KvFormat::kFp8SharedKv,
                         .block_multiple = 576});
  ASSERT_TRUE(spec.Validate().ok());
  const CacheLayout layout(spec);
  EXPECT_EQ(layout.used_bytes(0), 64 * 584);
  EXPECT_EQ(layout.layer_stride_bytes(0), 37632);  // 37376, 37440, 37632
  EXPECT_EQ(layout.used_bytes(1), 2 * 584);
  EXPECT_EQ(layout.layer_stride_bytes(1), 1792);  // 1168, 1728, 1792
  EXPECT_EQ(layout.block_bytes(), 2 * 37632 + 1792);
  std::byte memory[1];
  const kernels::KvPages pages = layout.Pages(memory, 1, 0);
  EXPECT_EQ(pages.block_size, 2);
  EXPECT_EQ(pages.base - memory, 2 * 37632);
  EXPECT_EQ(pages.block_stride, layout.block_bytes());
  spec.groups[0].block_multiple = 0;
  EXPECT_FALSE(spec.Validate().ok());
}

}  // namespace
}  // namespace model
