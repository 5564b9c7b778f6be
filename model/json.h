// JSON files of a checkpoint directory, read strictly: an object, valid UTF-8, no duplicate keys.
//
// Stateless functions.

#ifndef MODEL_JSON_H_
#define MODEL_JSON_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace model {

// `origin` is the file's name in messages.
// Errors: kInvalidArgument naming the file and what is wrong.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& origin);

// A value as messages quote it, shortened.
std::string Quoted(const nlohmann::json& value);

}  // namespace model

#endif  // MODEL_JSON_H_
