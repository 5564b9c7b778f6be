#include "chat/tool_syntax.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "chat/markers.h"
#include "chat/text.h"

namespace chat {
namespace {

using Json = nlohmann::json;

// Takes what stands before `end` from `text`, and `end`; nothing if there is no `end`.
std::optional<std::string_view> TakeUntil(std::string_view* text, std::string_view end) {
  const size_t at = text->find(end);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view taken = text->substr(0, at);
  text->remove_prefix(at + end.size());
  return taken;
}

bool TakeStart(std::string_view* text, std::string_view start) {
  if (!text->starts_with(start)) return false;
  text->remove_prefix(start.size());
  return true;
}

// TYPE <｜tool▁sep｜> NAME, then the arguments in a block of JSON.
std::optional<ToolCall> ParseFunction(std::string_view body) {
  const auto type = TakeUntil(&body, kSep);
  const auto name = TakeUntil(&body, "\n```json\n");
  if (!type.has_value() || !name.has_value() || name->empty()) return std::nullopt;
  constexpr std::string_view kFence = "\n```";
  if (!body.ends_with(kFence)) return std::nullopt;
  body.remove_suffix(kFence.size());
  ToolCall call;
  if (!type->empty()) call.type = std::string(*type);
  call.name = std::string(*name);
  call.arguments = std::string(body);
  return call;
}

// NAME <｜tool▁sep｜> ARGUMENTS
std::optional<ToolCall> ParseNamed(std::string_view body) {
  const auto name = TakeUntil(&body, kSep);
  if (!name.has_value() || name->empty()) return std::nullopt;
  ToolCall call;
  call.name = std::string(*name);
  call.arguments = std::string(body);
  return call;
}

std::string Quoted(std::string_view text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// ' name="NAME">', then a line for each parameter; the values become one JSON object.
std::optional<ToolCall> ParseInvoke(std::string_view body) {
  const std::string begin = Concat("<", kDsml, "parameter name=\"");
  const std::string end = Concat("</", kDsml, "parameter>");
  if (!TakeStart(&body, " name=\"")) return std::nullopt;
  const auto name = TakeUntil(&body, "\">");
  if (!name.has_value() || name->empty()) return std::nullopt;
  ToolCall call;
  call.name = std::string(*name);
  call.arguments.push_back('{');
  std::string_view separator = "";
  for (body = WithoutLeadingBlanks(body); !body.empty(); body = WithoutLeadingBlanks(body)) {
    if (!TakeStart(&body, begin)) return std::nullopt;
    const auto key = TakeUntil(&body, "\" string=\"");
    const auto is_string = TakeUntil(&body, "\">");
    const auto value = TakeUntil(&body, end);
    if (!key.has_value() || !is_string.has_value() || !value.has_value()) return std::nullopt;
    // Arguments are JSON whatever the model writes: what is none goes as a string.
    const bool quoted = *is_string != "false" || !Json::accept(*value);
    Append(&call.arguments, separator, Quoted(*key), ": ");
    call.arguments += quoted ? Quoted(*value) : std::string(*value);
    separator = ", ";
  }
  call.arguments.push_back('}');
  return call;
}

ToolSyntax Tokens(std::optional<ToolCall> (*parse)(std::string_view)) {
  return {{std::string(kCallsBegin)},
          std::string(kCallBegin),
          std::string(kCallEnd),
          std::string(kCallsEnd),
          parse};
}

ToolSyntax Dsml(std::string_view block) {
  const std::string open = Concat("<", kDsml, block, ">");
  return {{"\n\n" + open, open},
          Concat("<", kDsml, "invoke"),
          Concat("</", kDsml, "invoke>"),
          Concat("</", kDsml, block, ">"),
          &ParseInvoke};
}

}  // namespace

std::string_view WithoutLeadingBlanks(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return text.substr(std::min(first, text.size()));
}

const ToolSyntax* ToolSyntaxOf(Format format) {
  static const auto* const function = new ToolSyntax(Tokens(&ParseFunction));
  static const auto* const named = new ToolSyntax(Tokens(&ParseNamed));
  static const auto* const v32 = new ToolSyntax(Dsml("function_calls"));
  static const auto* const v4 = new ToolSyntax(Dsml("tool_calls"));
  switch (format) {
    case Format::kV2:
      return nullptr;
    case Format::kV3:
    case Format::kR1:
    case Format::kV3_0324:
    case Format::kR1_0528:
      return function;
    case Format::kV31:
      return named;
    case Format::kV32:
      return v32;
    case Format::kV4:
      return v4;
  }
  return nullptr;
}

}  // namespace chat
