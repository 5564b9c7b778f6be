// Values of JSON files, taken with one sentence for what is wrong: `where` names the place.

#ifndef TOKENIZER_JSON_VALUE_H_
#define TOKENIZER_JSON_VALUE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace tokenizer {

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// At most 80 bytes of a value, for messages.
std::string Shown(const nlohmann::json& value);

// The whole of a file, which is an object nested at most 64 levels deep.
absl::StatusOr<nlohmann::json> ParseObject(std::string_view text, const char* file);

// Null: absent, or null itself.
const nlohmann::json* Member(const nlohmann::json& object, const char* name);

absl::StatusOr<bool> Bool(const nlohmann::json& object, const char* name, const std::string& where,
                          bool otherwise);
absl::StatusOr<std::string> String(const nlohmann::json& object, const char* name,
                                   const std::string& where);
// A token's, below kMaxTokenId.
absl::StatusOr<int32_t> Id(const nlohmann::json& value, const std::string& where);
// The object's "type", after checking that it is an object.
absl::StatusOr<std::string> Type(const nlohmann::json& value, const std::string& where);

}  // namespace tokenizer

#endif  // TOKENIZER_JSON_VALUE_H_
