// ToolSyntax: how a format's model writes its tool calls.
//
// Values and pure functions.

#ifndef CHAT_TOOL_SYNTAX_H_
#define CHAT_TOOL_SYNTAX_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chat/conversation.h"
#include "chat/format.h"

namespace chat {

// open, then calls between call_begin and call_end with blanks between them, then close.
struct ToolSyntax {
  std::vector<std::string> open;  // any of these; one that holds another comes first
  std::string call_begin;
  std::string call_end;
  std::string close;
  // What stands between call_begin and call_end; nothing if that is no call.
  std::optional<ToolCall> (*parse)(std::string_view body);
};

std::string_view WithoutLeadingBlanks(std::string_view text);

// nullptr: the format has no tools.
const ToolSyntax* ToolSyntaxOf(Format format);

}  // namespace chat

#endif  // CHAT_TOOL_SYNTAX_H_
