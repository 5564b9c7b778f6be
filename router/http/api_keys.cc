#include "router/http/api_keys.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "input_file/input_file.h"
#include "router/request.h"
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
  std::map<Hash, int> lines;  // of which line a key is
  int line_number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    const absl::string_view stripped = absl::StripAsciiWhitespace(line);
    if (stripped.empty() || stripped.front() == '#') continue;
    const std::vector<absl::string_view> words =
        absl::StrSplit(stripped, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() > 2) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": line ", line_number, " has ",
                                                     words.size(),
                                                     " words: must be KEY or KEY TENANT"));
    }
    const absl::string_view key = words[0];
    const std::string tenant(words.size() == 2 ? words[1] : "");
    if (const absl::Status named = CheckName("tenant", tenant); !named.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": line ", line_number, ": ", std::string(named.message())));
    }
    for (const char c : key) {
      if (c <= 0x20 || c >= 0x7f) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": line ", line_number,
                         " is not a key: it has a character that is not printable ASCII"));
      }
    }
    if (key.size() < kMinKeyBytes) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": the key of line ", line_number,
                                                     " has ", key.size(), " characters: at least ",
                                                     kMinKeyBytes));
    }
    const Hash hash = HashOf({key.data(), key.size()});
    const auto [earlier, is_new] = lines.emplace(hash, line_number);
    if (!is_new) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": line ", line_number, " has the key of line ", earlier->second));
    }
    keys.keys_.push_back({hash, tenant});
  }
  if (keys.empty()) return absl::InvalidArgumentError(absl::StrCat(path, " holds no key"));
  return keys;
}

absl::StatusOr<std::string> ApiKeys::TenantOf(std::string_view authorization) const {
  if (empty()) return std::string();
  constexpr size_t kSchemeBytes = 7;
  absl::string_view value(authorization.data(), authorization.size());
  if (!absl::StartsWithIgnoreCase(value, "Bearer ")) {
    return absl::UnauthenticatedError("an API key is needed: authorization: Bearer KEY");
  }
  value = absl::StripAsciiWhitespace(value.substr(kSchemeBytes));
  const Hash hash = HashOf({value.data(), value.size()});
  const Key* known = nullptr;
  for (const Key& one : keys_) {
    if (CRYPTO_memcmp(one.hash.data(), hash.data(), hash.size()) == 0) known = &one;
  }
  if (known == nullptr) return absl::UnauthenticatedError("the API key is not known here");
  return known->tenant;
}

}  // namespace router::http
