#include "model/json.h"

#include <set>
#include <utility>
#include <vector>

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
