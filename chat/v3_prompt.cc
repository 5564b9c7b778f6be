#include "chat/v3_prompt.h"

#include <string_view>

#include "chat/markers.h"
#include "chat/text.h"

namespace chat {
namespace {

// BOS, the system messages joined by blank lines, and the section of tools if there is one.
std::string Head(const Conversation& conversation, std::string_view tools) {
  std::string text(kBos);
  bool first = true;
  for (const Message& message : conversation.messages) {
    if (message.role != Role::kSystem) continue;
    Append(&text, first ? "" : "\n\n", *message.content);
    first = false;
  }
  if (!tools.empty()) Append(&text, "\n\n", tools);
  return text;
}

// The templates of V3 and R1 write no tools; this is the section of V2.5's model card, from which
// they took the form of the calls.
std::string FunctionSection(const Conversation& conversation) {
  if (conversation.tools.empty()) return "";
  std::string text = "## Tools\n\n### Function\n\nYou have the following functions available:\n";
  for (const Tool& tool : conversation.tools) {
    Append(&text, "\n- `", tool.name, "`:\n```json\n", tool.function, "\n```\n");
  }
  return text;
}

// As V3.1's model card describes it.
std::string ToolSection(const Conversation& conversation) {
  if (conversation.tools.empty()) return "";
  std::string text = "## Tools\nYou have access to the following tools:\n";
  for (const Tool& tool : conversation.tools) {
    Append(&text, "\n### ", tool.name, "\nDescription: ", tool.description,
           "\n\nParameters: ", tool.parameters, "\n");
  }
  Append(&text, "\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\n", kCallsBegin,
         kCallBegin, "tool_call_name", kSep, "tool_call_arguments", kCallEnd,
         "{{additional_tool_calls}}", kCallsEnd,
         "\n\nWhere:\n\n"
         "- `tool_call_name` must be an exact match to one of the available tools\n"
         "- `tool_call_arguments` must be valid JSON that strictly follows the tool's "
         "Parameters Schema\n"
         "- For multiple tool calls, chain them directly without separators or spaces\n");
  return text;
}

std::string FunctionCall(const ToolCall& call) {
  return Concat(kCallBegin, call.type, kSep, call.name, "\n```json\n", call.arguments, "\n```",
                kCallEnd);
}

std::string_view AfterReasoning(std::string_view content, bool reasons) {
  const size_t end = reasons ? content.rfind(kEndThink) : std::string_view::npos;
  return end == std::string_view::npos ? content : content.substr(end + kEndThink.size());
}

}  // namespace

std::string RenderV3(const Conversation& conversation, bool reasons) {
  std::string text = Head(conversation, FunctionSection(conversation));
  bool in_results = false;
  bool any_call = false, any_result = false;
  for (const Message& message : conversation.messages) {
    if (message.role == Role::kUser) {
      in_results = false;
      Append(&text, kUser, *message.content);
    } else if (message.role == Role::kAssistant && message.content.has_value()) {
      if (in_results) {
        Append(&text, kOutputsEnd, *message.content, kEos);
        in_results = false;
      } else {
        Append(&text, kAssistant, AfterReasoning(*message.content, reasons), kEos);
      }
    } else if (message.role == Role::kAssistant) {
      in_results = false;
      for (const ToolCall& call : message.tool_calls) {
        if (!any_call) {
          Append(&text, kAssistant, kCallsBegin, FunctionCall(call));
        } else {
          Append(&text, "\n", FunctionCall(call), kCallsEnd, kEos);
        }
        any_call = true;
      }
    } else if (message.role == Role::kTool) {
      in_results = true;
      Append(&text, any_result ? "\n" : kOutputsBegin, kOutputBegin, *message.content, kOutputEnd);
      any_result = true;
    }
  }
  if (in_results) {
    Append(&text, kOutputsEnd);
  } else if (conversation.add_generation_prompt) {
    Append(&text, kAssistant, reasons ? "<think>\n" : "");
  }
  return text;
}

std::string RenderV3_0324(const Conversation& conversation, bool reasons) {
  std::string text = Head(conversation, FunctionSection(conversation));
  bool in_results = false, any_result = false, after_user = false;
  for (const Message& message : conversation.messages) {
    if (message.role == Role::kSystem) continue;
    if (message.role == Role::kUser) {
      in_results = false;
      Append(&text, kUser, *message.content, kAssistant);
    } else if (message.role == Role::kTool) {
      in_results = true;
      Append(&text, any_result ? "\n" : kOutputsBegin, kOutputBegin, *message.content, kOutputEnd);
      any_result = true;
    } else {
      const std::string content = message.content.value_or("");
      Append(&text, in_results ? kOutputsEnd : "", AfterReasoning(content, reasons));
      in_results = false;
      if (!message.tool_calls.empty()) {
        any_result = false;
        std::string_view before = kCallsBegin;
        for (const ToolCall& call : message.tool_calls) {
          Append(&text, before, FunctionCall(call));
          before = "\n";
        }
        Append(&text, kCallsEnd);
      }
      Append(&text, kEos);
    }
    after_user = message.role == Role::kUser;
  }
  if (in_results) {
    Append(&text, kOutputsEnd);
  } else if (conversation.add_generation_prompt && !after_user) {
    Append(&text, kAssistant);
  }
  return text;
}

std::string RenderV31(const Conversation& conversation, bool thinking) {
  std::string text = Head(conversation, ToolSection(conversation));
  bool after_results = false, after_user = false;
  for (const Message& message : conversation.messages) {
    if (message.role == Role::kSystem) continue;
    if (message.role == Role::kUser) {
      after_results = false;
      Append(&text, kUser, *message.content);
    } else if (message.role == Role::kTool) {
      after_results = true;
      Append(&text, kOutputBegin, *message.content, kOutputEnd);
    } else {
      if (after_user) Append(&text, kAssistant, kEndThink);
      const std::string whole = message.content.value_or("");
      std::string_view content = whole;
      if (message.tool_calls.empty()) {
        const size_t end = after_results ? std::string_view::npos : content.find(kEndThink);
        if (end != std::string_view::npos) content.remove_prefix(end + kEndThink.size());
        Append(&text, content);
      } else {
        Append(&text, content, kCallsBegin);
        for (const ToolCall& call : message.tool_calls) {
          Append(&text, kCallBegin, call.name, kSep, call.arguments, kCallEnd);
        }
        Append(&text, kCallsEnd);
      }
      Append(&text, kEos);
      after_results = false;
    }
    after_user = message.role == Role::kUser;
  }
  if (conversation.add_generation_prompt && after_user) {
    Append(&text, kAssistant, thinking ? kThink : kEndThink);
  }
  return text;
}

}  // namespace chat
