#include "router/http/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "input_file/input_file.h"
#include "status/status_macros.h"

namespace router::http {
namespace {

constexpr int64_t kMaxFileBytes = 16 << 20;
constexpr size_t kMinKeyBytes = 16;  // shorter ones are guessed

}  // namespace

ApiKeys::Hash ApiKeys::HashOf(std::string_view key) {
  Hash hash;
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), hash.data());
  return hash;
}

absl::StatusOr<ApiKeys> ApiKeys::Load(const std::string& path) {
  ApiKeys keys;
  if (path.empty()) return keys;
  ASSIGN_OR_RETURN(const std::string text, input_file::Read(path, kMaxFileBytes));
  int line_number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    const absl::string_view key = absl::StripAsciiWhitespace(line);
    if (key.empty() || key.front() == '#') continue;
    for (const char c : key) {
      if (c <= 0x20 || c >= 0x7f) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": line ", line_number,
                         " is not a key: it has a space or a character that is not ASCII"));
      }
    }
    if (key.size() < kMinKeyBytes) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": the key of line ", line_number,
                                                     " has ", key.size(), " characters: at least ",
                                                     kMinKeyBytes));
    }
    keys.hashes_.push_back(HashOf({key.data(), key.size()}));
  }
  if (keys.empty()) return absl::InvalidArgumentError(absl::StrCat(path, " holds no key"));
  return keys;
}

absl::Status ApiKeys::Check(std::string_view authorization) const {
  if (empty()) return absl::OkStatus();
  constexpr size_t kSchemeBytes = 7;
  absl::string_view value(authorization.data(), authorization.size());
  if (!absl::StartsWithIgnoreCase(value, "Bearer ")) {
    return absl::UnauthenticatedError("an API key is needed: authorization: Bearer KEY");
  }
  value = absl::StripAsciiWhitespace(value.substr(kSchemeBytes));
  const Hash hash = HashOf({value.data(), value.size()});
  bool known = false;
  for (const Hash& one : hashes_) {
    known |= CRYPTO_memcmp(one.data(), hash.data(), hash.size()) == 0;
  }
  return known ? absl::OkStatus() : absl::UnauthenticatedError("the API key is not known here");
}

}  // namespace router::http
