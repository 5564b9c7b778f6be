#include "block_hash/block_hash.h"

#include <cstring>

#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

namespace block_hash {
namespace {

constexpr std::string_view kRootTag = "ferry-kv/1";

void AppendLe32(uint32_t value, std::string* out) {
  for (int shift = 0; shift < 32; shift += 8) out->push_back(static_cast<char>(value >> shift));
}

BlockHash Digest(std::string_view data, const std::array<uint8_t, 192>& secret) {
  const XXH128_hash_t value =
      XXH3_128bits_withSecret(data.data(), data.size(), secret.data(), secret.size());
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, value);
  BlockHash hash;
  std::memcpy(hash.bytes.data(), canonical.digest, hash.bytes.size());
  return hash;
}

}  // namespace

BlockHash BlockHash::FromBytes(std::string_view raw) {
  BlockHash hash;
  std::memcpy(hash.bytes.data(), raw.data(), hash.bytes.size());
  return hash;
}

std::string ToHex(const BlockHash& hash) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const uint8_t byte : hash.bytes) {
    out.push_back(kDigits[byte >> 4]);
    out.push_back(kDigits[byte & 15]);
  }
  return out;
}

std::string MakeNamespace(std::string_view model_id, std::string_view tokenizer_hash,
                          std::string_view cache_salt, std::string_view tenant) {
  std::string out;
  const auto append = [&out](std::string_view part) {
    AppendLe32(static_cast<uint32_t>(part.size()), &out);
    out.append(part);
  };
  append(model_id);
  append(tokenizer_hash);
  append(cache_salt);
  if (!tenant.empty()) append(tenant);
  return out;
}

BlockHasher::BlockHasher(uint64_t hash_seed) {
  XXH3_generateSecret_fromSeed(secret_.data(), hash_seed);
}

BlockHash BlockHasher::Root(std::string_view cache_namespace) const {
  std::string data(kRootTag);
  data.append(cache_namespace);
  return Digest(data, secret_);
}

BlockHash BlockHasher::Next(const BlockHash& parent, absl::Span<const int32_t> block_tokens) const {
  std::string data(parent.view());
  data.reserve(data.size() + 4 * (block_tokens.size() + 1));
  AppendLe32(static_cast<uint32_t>(block_tokens.size()), &data);
  for (const int32_t token : block_tokens) AppendLe32(static_cast<uint32_t>(token), &data);
  return Digest(data, secret_);
}

std::vector<BlockHash> BlockHasher::Chain(const BlockHash& root, absl::Span<const int32_t> tokens,
                                          int32_t block_size) const {
  std::vector<BlockHash> chain;
  chain.reserve(tokens.size() / block_size);
  BlockHash parent = root;
  for (size_t begin = 0; begin + block_size <= tokens.size(); begin += block_size) {
    parent = Next(parent, tokens.subspan(begin, block_size));
    chain.push_back(parent);
  }
  return chain;
}

}  // namespace block_hash
