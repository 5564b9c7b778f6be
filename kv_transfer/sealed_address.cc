#include "kv_transfer/sealed_address.h"

#include <xxhash.h>

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kv_transfer/little_endian.h"

namespace kv_transfer {
namespace {

constexpr uint64_t kSeed = 0x31415644'41565245;  // of version 1 of the seal
constexpr size_t kDigestBytes = 16;

std::string Digest(const char* data, size_t bytes) {
  const XXH128_hash_t hash = XXH3_128bits_withSeed(data, bytes, kSeed);
  std::byte raw[kDigestBytes];
  StoreLittleEndian<uint64_t>(hash.low64, raw);
  StoreLittleEndian<uint64_t>(hash.high64, raw + 8);
  return std::string(reinterpret_cast<const char*>(raw), kDigestBytes);
}

}  // namespace

std::string SealAddress(const std::string& address) {
  return Digest(address.data(), address.size()) + address;
}

absl::StatusOr<std::string> OpenAddress(const std::string& sealed) {
  if (sealed.size() <= kDigestBytes ||
      Digest(sealed.data() + kDigestBytes, sealed.size() - kDigestBytes) !=
          sealed.substr(0, kDigestBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(sealed.size(), " bytes that are no address of a worker"));
  }
  return sealed.substr(kDigestBytes);
}

}  // namespace kv_transfer
