#include "model/json.h"

#include <fstream>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include <filesystem>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace model {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 32;
constexpr size_t kMaxQuoted = 60;  // characters

}  // namespace

absl::StatusOr<json> ParseJsonObject(std::string_view text, const std::string& origin) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  std::string duplicate;
  bool too_deep = false;
  const json::parser_callback_t watch = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
        keys.emplace_back();
        break;
      case json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case json::parse_event_t::key:
        if (!keys.back().insert(parsed.get<std::string>()).second) {
          duplicate = parsed.get<std::string>();
        }
        break;
      default:
        break;
    }
    if (depth > kMaxDepth) too_deep = true;
    return depth <= kMaxDepth;  // what is deeper is dropped, not built
  };
  try {
    json value = json::parse(text.begin(), text.end(), watch);
    if (too_deep) {
      return absl::InvalidArgumentError(
          absl::StrCat(origin, ": values are nested deeper than ", kMaxDepth, " levels"));
    }
    if (!duplicate.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(origin, ": key \"", duplicate, "\" is duplicate"));
    }
    if (!value.is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(origin, ": expected a JSON object, found ", Quoted(value)));
    }
    return value;
  } catch (const json::parse_error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": not valid JSON at byte ", error.byte, " of ", text.size()));
  } catch (const json::out_of_range&) {
    return absl::InvalidArgumentError(
        absl::StrCat(origin, ": a number is too large for a 64-bit float"));
  }
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t max_bytes) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    return absl::NotFoundError(absl::StrCat("no such file: ", path));
  }
  if (!std::filesystem::is_regular_file(status)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error || size > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected at most ", max_bytes, " bytes, found ", error ? -1 : size));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(static_cast<size_t>(size), '\0');
  file.read(text.data(), size);
  if (!file || file.gcount() != size) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": cannot be read"));
  }
  return text;
}

std::string Quoted(const json& value) {
  if (value.is_array() || value.is_object()) {
    return absl::StrCat(value.is_array() ? "an array of " : "an object of ", value.size(),
                        value.size() == 1 ? " element" : " elements");
  }
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kMaxQuoted) text = text.substr(0, kMaxQuoted) + "...";
  return text;
}

}  // namespace model
