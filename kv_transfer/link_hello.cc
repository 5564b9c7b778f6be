#include "kv_transfer/link_hello.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kv_transfer/little_endian.h"

namespace kv_transfer {
namespace {

constexpr uint32_t kMagic = 0x4c564b46;  // "FKVL" in memory order
constexpr uint16_t kVersion = 1;

}  // namespace

std::array<std::byte, kLinkHelloBytes> EncodeLinkHello(const LinkHello& hello) {
  std::array<std::byte, kLinkHelloBytes> raw{};
  StoreLittleEndian<uint32_t>(kMagic, raw.data());
  StoreLittleEndian<uint16_t>(kVersion, raw.data() + 4);
  StoreLittleEndian<uint16_t>(static_cast<uint16_t>(hello.kind), raw.data() + 6);
  std::memcpy(raw.data() + 8, hello.from.bytes.data(), 16);
  std::memcpy(raw.data() + 24, hello.to.bytes.data(), 16);
  StoreLittleEndian<uint64_t>(hello.session, raw.data() + 40);
  StoreLittleEndian<uint64_t>(hello.peer_session, raw.data() + 48);
  return raw;
}

absl::StatusOr<LinkHello> DecodeLinkHello(absl::Span<const std::byte> raw) {
  if (raw.size() != kLinkHelloBytes || LoadLittleEndian<uint32_t>(raw.data()) != kMagic) {
    return absl::InvalidArgumentError(absl::StrCat("not a hello: ", raw.size(), " bytes"));
  }
  const auto version = LoadLittleEndian<uint16_t>(raw.data() + 4);
  const auto kind = LoadLittleEndian<uint16_t>(raw.data() + 6);
  if (version != kVersion || kind < 1 || kind > 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("hello of version ", version, " and kind ", kind));
  }
  LinkHello hello;
  hello.kind = static_cast<LinkHello::Kind>(kind);
  std::memcpy(hello.from.bytes.data(), raw.data() + 8, 16);
  std::memcpy(hello.to.bytes.data(), raw.data() + 24, 16);
  hello.session = LoadLittleEndian<uint64_t>(raw.data() + 40);
  hello.peer_session = LoadLittleEndian<uint64_t>(raw.data() + 48);
  return hello;
}

}  // namespace kv_transfer
