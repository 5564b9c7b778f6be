#include "block_hash/block_hash.h"

#include <iterator>
#include <numeric>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace block_hash {
namespace {

// Made by Python's xxhash 3.x (xxh3_128 with seed 0, whose secret is XXH3's default) from the
// formula in block_hash.h: model id, tokenizer hash, salt, tokens, block size, root, last hash of
// the chain.
struct Vector {
  const char* model;
  const char* tokenizer;
  const char* salt;
  std::vector<int32_t> tokens;
  int32_t block_size;
  const char* root;
  const char* last;
};

std::vector<int32_t> Iota(int32_t n) {
  std::vector<int32_t> out(n);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

std::vector<int32_t> Repeat(int32_t token, int32_t n) { return std::vector<int32_t>(n, token); }

TEST(BlockHashTest, EqualsTheTestVectors) {
  const Vector vectors[] = {
      {"", "", "", {}, 64, "16dd9d05c89e51c0de1b983b80cea150", "16dd9d05c89e51c0de1b983b80cea150"},
      {"m", "", "", Iota(64), 64, "14fb305721ed8b0ff85fd19b72d1b5ca",
       "db66323b336ba1224f9359424530b580"},
      {"deepseek-v3", "abc", "", Iota(100), 16, "d54203f36b0013595cbeb01ccdfb8e1f",
       "0d2e9bb754070ac8e96e07d0fee0fb2c"},
      {"deepseek-v3", "abc", "salt", Iota(100), 16, "2c04bec72056dec6872f7c9c6cf0f1ee",
       "42d335e028a67fea34d0e434bc4d5a7a"},
      {"a", "bc", "", Repeat(7, 64), 64, "376a7a59bb4eb6a342bca892b78b61dc",
       "52de43b488bc99ac440a66f330984462"},
      {"ab", "c", "", Repeat(7, 64), 64, "f9d470c55d643541782e69255bc48a50",
       "e8787323655f350cf30452d62c7a050c"},
      {"m", "t", "s", Repeat(129279, 128), 64, "67cce7865b274b424639e44231555b06",
       "abfd2435d6ab0e48b05fffcd4682fb5e"},
      {"m", "t", "s", Repeat(0, 256), 256, "67cce7865b274b424639e44231555b06",
       "a5e122589278ca511ec14a91774ce019"},
      {"m",
       "t",
       "s",
       {1, 2, 3, 4},
       1,
       "67cce7865b274b424639e44231555b06",
       "10874727e2c98156206705f74a8ea250"},
      {"模型",
       "t",
       "",
       {5, 4, 3, 2, 1, 0},
       3,
       "1858e0e369694c8eb35cc616838803a6",
       "af2ce16fde762a63cacbac946a4f5370"},
  };
  const BlockHasher hasher(/*hash_seed=*/0);
  for (const Vector& v : vectors) {
    SCOPED_TRACE(v.last);
    const BlockHash root = hasher.Root(MakeNamespace(v.model, v.tokenizer, v.salt, ""));
    EXPECT_EQ(ToHex(root), v.root);
    const std::vector<BlockHash> chain = hasher.Chain(root, v.tokens, v.block_size);
    EXPECT_EQ(chain.size(), v.tokens.size() / v.block_size);
    EXPECT_EQ(ToHex(chain.empty() ? root : chain.back()), v.last);
  }
}

TEST(BlockHashTest, AnotherSeedGivesOtherHashes) {
  const std::string name = MakeNamespace("m", "t", "s", "");
  EXPECT_NE(BlockHasher(0).Root(name), BlockHasher(1).Root(name));
}

// Whatever salts say, a tenant's namespace is its own.
TEST(BlockHashTest, TenantsShareNoNamespaceWithAnybody) {
  const std::string names[] = {
      MakeNamespace("m", "t", "", ""),
      MakeNamespace("m", "t", "", "a"),
      MakeNamespace("m", "t", "", "b"),
      MakeNamespace("m", "t", "a", ""),
      MakeNamespace("m", "t", "a", "b"),
      MakeNamespace("m", "t", "b", "a"),
      MakeNamespace("m", "t", "ab", ""),
      MakeNamespace("m", "t", std::string("\1\0\0\0a", 5), ""),
      MakeNamespace("m", "t", std::string("\0\0\0\0\1\0\0\0a", 9), ""),
  };
  const std::set<std::string> different(std::begin(names), std::end(names));
  EXPECT_EQ(different.size(), std::size(names));
}

TEST(BlockHashTest, APartialBlockHasNoHash) {
  const BlockHasher hasher(0);
  const BlockHash root = hasher.Root("");
  EXPECT_THAT(hasher.Chain(root, Iota(63), 64), testing::IsEmpty());
  EXPECT_THAT(hasher.Chain(root, Iota(127), 64), testing::SizeIs(1));
}

}  // namespace
}  // namespace block_hash
