// The identity of a block of tokens: the same in the router and in every worker.
//
//   h[-1] = H("ferry-kv/1" || namespace)                       the chain's root
//   h[i]  = H(h[i-1] || le32 count || le32 token ...)          full blocks only
//
// H is XXH3-128 with the 192-byte secret that XXH3_generateSecret_fromSeed makes of `hash_seed`;
// its bytes are in XXH128's canonical (big-endian) order.  A namespace is model id, tokenizer hash,
// cache salt and, of a tenant, its name, each preceded by its length as le32.  What identity does
// *not* say is whether bytes are interchangeable: that is the layout fingerprint
// (model/cache_spec.h).
//
// Test vectors: tests/block_hash/block_hash_test.cc, made by an independent implementation.
// Thread-safe: values and const objects only.

#ifndef BLOCK_HASH_BLOCK_HASH_H_
#define BLOCK_HASH_BLOCK_HASH_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace block_hash {

struct BlockHash {
  std::array<uint8_t, 16> bytes{};  // canonical order

  friend bool operator==(const BlockHash&, const BlockHash&) = default;
  friend auto operator<=>(const BlockHash&, const BlockHash&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockHash& hash) {
    return H::combine(std::move(h), hash.bytes);
  }
  std::string_view view() const {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  // REQUIRES: raw.size() == 16.
  static BlockHash FromBytes(std::string_view raw);
};

// Lower-case hex.
std::string ToHex(const BlockHash& hash);

// Joins the parts with length prefixes, so that no two requests of different parts have the same
// namespace: no salt reaches the blocks of a tenant.  `tenant` "" is no part.
std::string MakeNamespace(std::string_view model_id, std::string_view tokenizer_hash,
                          std::string_view cache_salt, std::string_view tenant);

class BlockHasher final {
 public:
  explicit BlockHasher(uint64_t hash_seed);

  BlockHash Root(std::string_view cache_namespace) const;
  BlockHash Next(const BlockHash& parent, absl::Span<const int32_t> block_tokens) const;

  // Hashes of the full blocks of `tokens`; a partial last block has none.
  // REQUIRES: block_size > 0.
  std::vector<BlockHash> Chain(const BlockHash& root, absl::Span<const int32_t> tokens,
                               int32_t block_size) const;

 private:
  std::array<uint8_t, 192> secret_;
};

}  // namespace block_hash

#endif  // BLOCK_HASH_BLOCK_HASH_H_
