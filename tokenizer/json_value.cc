#include "tokenizer/json_value.h"

#include "status/status_macros.h"
#include "tokenizer/tokenizer_file.h"

namespace tokenizer {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 64;

}  // namespace

std::string Shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

absl::StatusOr<json> ParseObject(std::string_view text, const char* file) {
  // What is deeper is dropped, not built: values are walked recursively.
  bool too_deep = false;
  const json::parser_callback_t watch = [&](int depth, json::parse_event_t, json&) {
    too_deep = too_deep || depth > kMaxDepth;
    return depth <= kMaxDepth;
  };
  try {
    json value = json::parse(text.begin(), text.end(), watch);
    if (too_deep) return Bad(file, ": values are nested deeper than ", kMaxDepth, " levels");
    if (!value.is_object()) return Bad(file, ": need an object, found ", value.type_name());
    return value;
  } catch (const json::parse_error& error) {
    return Bad(file, ": not JSON: ", error.what());
  } catch (const json::out_of_range&) {
    return Bad(file, ": a number is too large for a 64-bit float");
  }
}

const json* Member(const json& object, const char* name) {
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

absl::StatusOr<bool> Bool(const json& object, const char* name, const std::string& where,
                          bool otherwise) {
  const json* value = Member(object, name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean())
    return Bad(where, ".", name, ": need true or false, found ", Shown(*value));
  return value->get<bool>();
}

absl::StatusOr<std::string> String(const json& object, const char* name, const std::string& where) {
  const json* value = Member(object, name);
  if (value == nullptr) return Bad(where, ".", name, ": missing");
  if (!value->is_string()) return Bad(where, ".", name, ": need a string, found ", Shown(*value));
  return value->get<std::string>();
}

absl::StatusOr<int32_t> Id(const json& value, const std::string& where) {
  const bool in_range = value.is_number_unsigned() && value.get<uint64_t>() < uint64_t{kMaxTokenId};
  if (!in_range) return Bad(where, ": need an id in [0, ", kMaxTokenId, "), found ", Shown(value));
  return static_cast<int32_t>(value.get<uint64_t>());
}

absl::StatusOr<std::string> Type(const json& value, const std::string& where) {
  if (!value.is_object()) return Bad(where, ": need an object, found ", Shown(value));
  return String(value, "type", where);
}

}  // namespace tokenizer
