#include "chat/python_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "chat/text.h"

namespace chat {
namespace {

// Python's repr: the shortest digits that read back; an exponent below 1e-4 and from 1e16 on.
std::string PythonFloat(double value) {
  char buffer[400];
  const auto format = value != 0 && (std::fabs(value) < 1e-4 || std::fabs(value) >= 1e16)
                          ? std::chars_format::scientific
                          : std::chars_format::fixed;
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, format).ptr;
  std::string text(buffer, end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

void Write(const nlohmann::ordered_json& value, std::string* out) {
  if (value.is_object()) {
    std::string_view separator = "{";
    for (const auto& [key, member] : value.items()) {
      Append(out, separator, nlohmann::json(key).dump(), ": ");
      Write(member, out);
      separator = ", ";
    }
    Append(out, value.empty() ? "{}" : "}");
  } else if (value.is_array()) {
    std::string_view separator = "[";
    for (const auto& element : value) {
      Append(out, separator);
      Write(element, out);
      separator = ", ";
    }
    Append(out, value.empty() ? "[]" : "]");
  } else if (value.is_number_float()) {
    Append(out, PythonFloat(value.get<double>()));
  } else {
    Append(out, value.dump());
  }
}

}  // namespace

bool DeeperThan(int levels, const nlohmann::ordered_json& value) {
  if (!value.is_structured()) return false;
  if (levels == 0) return true;
  return std::any_of(value.begin(), value.end(),
                     [&](const auto& inner) { return DeeperThan(levels - 1, inner); });
}

std::string PythonJson(const nlohmann::ordered_json& value) {
  std::string out;
  Write(value, &out);
  return out;
}

}  // namespace chat
