// Small JSON files that a user has named, of which single members are read.
//
// Stateless functions.

#ifndef INPUT_FILE_JSON_FILE_H_
#define INPUT_FILE_JSON_FILE_H_

#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace input_file {

// Errors: as of Read, for at most 16 MiB; kInvalidArgument "PATH is not a JSON object".
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path);

}  // namespace input_file

#endif  // INPUT_FILE_JSON_FILE_H_
