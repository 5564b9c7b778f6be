#include <sys/random.h>

#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kv_transfer/transport.h"
#include "status/check.h"

namespace kv_transfer {

Epoch Epoch::Random() {
  Epoch epoch;
  const ssize_t got = getrandom(epoch.bytes.data(), epoch.bytes.size(), 0);
  FERRY_CHECK(got == static_cast<ssize_t>(epoch.bytes.size())) << "getrandom gave " << got;
  return epoch;
}

absl::StatusOr<Epoch> Epoch::FromBytes(std::string_view raw) {
  Epoch epoch;
  if (raw.size() != epoch.bytes.size()) {
    return absl::InvalidArgumentError(absl::StrCat("an epoch has 16 bytes, not ", raw.size()));
  }
  std::memcpy(epoch.bytes.data(), raw.data(), raw.size());
  return epoch;
}

std::string Epoch::ToBytes() const { return std::string(bytes.begin(), bytes.end()); }

std::string Epoch::ToHex() const { return absl::BytesToHexString(ToBytes()); }

}  // namespace kv_transfer
