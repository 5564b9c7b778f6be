#include "input_file/json_file.h"

#include "absl/strings/str_cat.h"
#include "input_file/input_file.h"
#include "nlohmann/json.hpp"
#include "status/status_macros.h"

namespace input_file {
namespace {

constexpr int64_t kMaxBytes = int64_t{16} << 20;

}  // namespace

absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, Read(path, kMaxBytes));
  nlohmann::json value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a JSON object"));
  }
  return value;
}

}  // namespace input_file
