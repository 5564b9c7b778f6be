#include "chat/dsml_prompt.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "chat/markers.h"
#include "chat/python_json.h"
#include "chat/text.h"

namespace chat {
namespace {

using Json = nlohmann::ordered_json;

// What the two tell the model about its tools.  In these texts <: opens a DSML tag, $TOOLS stands
// for the functions, a line each.
constexpr char kV32Tools[] =
    R"(## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<:function_calls>" block like the following as part of your reply to the user:
<:function_calls>
<:invoke name="$FUNCTION_NAME">
<:parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</:parameter>
...
</:invoke>
<:invoke name="$FUNCTION_NAME2">
...
</:invoke>
</:function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<:function_calls>
...
</:function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
$TOOLS
</functions>
)";

constexpr char kV4Tools[] =
    R"(## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<:tool_calls>" block like the following:

<:tool_calls>
<:invoke name="$TOOL_NAME">
<:parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</:parameter>
...
</:invoke>
<:invoke name="$TOOL_NAME2">
...
</:invoke>
</:tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

$TOOLS

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
)";

constexpr std::string_view kV4MaxEffort =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n";

std::string ToolSection(const char* section, const std::vector<Tool>& tools) {
  if (tools.empty()) return "";
  const std::string functions = absl::StrJoin(
      tools, "\n", [](std::string* out, const Tool& tool) { out->append(tool.function); });
  const std::string tag(kDsml);
  return "\n\n" + absl::StrReplaceAll(
                      section, {{"<:", "<" + tag}, {"</:", "</" + tag}, {"$TOOLS", functions}});
}

// One line for each argument; what is no JSON object goes as one argument of that name.
std::string Parameters(const ToolCall& call) {
  Json arguments = Json::parse(call.arguments, nullptr, /*allow_exceptions=*/false);
  if (!arguments.is_object() || DeeperThan(kMaxLevels, arguments))
    arguments = Json{{"arguments", call.arguments}};
  std::vector<std::string> lines;
  for (const auto& [name, value] : arguments.items()) {
    lines.push_back(Concat("<", kDsml, "parameter name=\"", name, "\" string=\"",
                           value.is_string() ? "true" : "false", "\">",
                           value.is_string() ? value.get<std::string>() : PythonJson(value), "</",
                           kDsml, "parameter>"));
  }
  return absl::StrJoin(lines, "\n");
}

std::string Calls(std::string_view block, const std::vector<ToolCall>& calls) {
  if (calls.empty()) return "";
  std::string text = Concat("\n\n<", kDsml, block, ">\n");
  for (const ToolCall& call : calls) {
    Append(&text, "<", kDsml, "invoke name=\"", call.name, "\">\n", Parameters(call), "\n</", kDsml,
           "invoke>\n");
  }
  Append(&text, "</", kDsml, block, ">");
  return text;
}

bool IsUser(const Message& message) {
  return message.role == Role::kUser || message.role == Role::kDeveloper;
}

// -1 if there is none.
int LastUser(const std::vector<Message>& messages) {
  for (int i = static_cast<int>(messages.size()) - 1; i >= 0; --i) {
    if (IsUser(messages[i])) return i;
  }
  return -1;
}

// The messages, with the request's tools declared by the leading system or developer message.
std::vector<Message> WithTools(const Conversation& conversation) {
  std::vector<Message> messages = conversation.messages;
  if (conversation.tools.empty()) return messages;
  const Role first = messages.front().role;
  if (first != Role::kSystem && first != Role::kDeveloper) {
    Message system;
    system.role = Role::kSystem;
    system.content = "";
    messages.insert(messages.begin(), std::move(system));
  }
  messages.front().tools = conversation.tools;
  return messages;
}

// Developers instruct a search that is over once the user asks again.
void DropEarlierDevelopers(std::vector<Message>* messages) {
  const int last_user = LastUser(*messages);
  for (int i = last_user - 1; i >= 0; --i) {
    if ((*messages)[i].role == Role::kDeveloper) messages->erase(messages->begin() + i);
  }
}

// A tool's result as a part of a user's message.
struct Part {
  bool result = false;
  std::string call_id;
  std::string text;
};

// Puts the results among `parts` into the order of the calls that they answer.
void SortResults(const std::vector<ToolCall>& calls, std::vector<Part>* parts) {
  const auto place = [&](const Part& part) {
    const auto it = std::find_if(calls.begin(), calls.end(), [&](const ToolCall& call) {
      return !call.id.empty() && call.id == part.call_id;
    });
    return it == calls.end() ? 0 : it - calls.begin();
  };
  std::vector<Part> results;
  for (const Part& part : *parts) {
    if (part.result) results.push_back(part);
  }
  std::stable_sort(results.begin(), results.end(),
                   [&](const Part& a, const Part& b) { return place(a) < place(b); });
  auto next = results.begin();
  for (Part& part : *parts) {
    if (part.result) part = *next++;
  }
}

// Joins runs of users' messages and results of tools into one user's message each.
std::vector<Message> MergeUsers(const std::vector<Message>& messages) {
  std::vector<Message> merged;
  std::vector<ToolCall> calls;
  for (size_t i = 0; i < messages.size();) {
    const Message& message = messages[i];
    if (message.role != Role::kUser && message.role != Role::kTool) {
      if (!message.tool_calls.empty()) calls = message.tool_calls;
      merged.push_back(message);
      ++i;
      continue;
    }
    std::vector<Part> parts;
    for (; i < messages.size(); ++i) {
      const Message& one = messages[i];
      if (one.role != Role::kUser && one.role != Role::kTool) break;
      const bool result = one.role == Role::kTool;
      parts.push_back(
          {result, one.tool_call_id,
           result ? Concat("<tool_result>", *one.content, "</tool_result>") : *one.content});
    }
    SortResults(calls, &parts);
    Message user;
    user.role = Role::kUser;
    user.content = absl::StrJoin(
        parts, "\n\n", [](std::string* out, const Part& part) { out->append(part.text); });
    merged.push_back(std::move(user));
  }
  return merged;
}

}  // namespace

absl::StatusOr<std::string> RenderV32(const Conversation& conversation, bool thinking) {
  std::vector<Message> messages = WithTools(conversation);
  if (thinking) DropEarlierDevelopers(&messages);
  const int last_user = LastUser(messages);
  std::string text(kBos);
  size_t calls = 0, results = 0;  // of the last assistant's message that is not over
  for (int i = 0; i < static_cast<int>(messages.size()); ++i) {
    const Message& message = messages[i];
    const std::string content = message.content.value_or("");
    const std::string_view reply = thinking && i >= last_user ? kThink : kEndThink;
    switch (message.role) {
      case Role::kSystem:
        Append(&text, content, ToolSection(kV32Tools, message.tools));
        break;
      case Role::kDeveloper:
        Append(&text, kUser, ToolSection(kV32Tools, message.tools),
               "\n\n# The user's message is: ", content, kAssistant, reply);
        break;
      case Role::kUser:
        Append(&text, kUser, content, kAssistant, reply);
        break;
      case Role::kTool: {
        if (results == calls) {
          return absl::InvalidArgumentError(Concat("a message of role tool answers none of the ",
                                                   calls, " tool_calls before it"));
        }
        Append(&text, results == 0 ? "\n\n<function_results>" : "", "\n<result>", content,
               "</result>");
        if (++results == calls) {
          Append(&text, "\n</function_results>\n\n", reply);
        } else if (i + 1 == static_cast<int>(messages.size()) ||
                   messages[i + 1].role != Role::kTool) {
          return absl::InvalidArgumentError(
              Concat(results, " messages of role tool answer ", calls, " tool_calls"));
        }
        break;
      }
      case Role::kAssistant:
        if (thinking && i > last_user) {
          Append(&text, message.reasoning_content, kEndThink);
        }
        Append(&text, content, Calls("function_calls", message.tool_calls), kEos);
        break;
      case Role::kLatestReminder:
        break;
    }
    if (message.role != Role::kTool) {
      calls = message.tool_calls.size();
      results = 0;
    }
  }
  return text;
}

std::string RenderV4(const Conversation& conversation, bool thinking) {
  std::vector<Message> messages = MergeUsers(WithTools(conversation));
  const bool keep_all = std::any_of(messages.begin(), messages.end(),
                                    [](const Message& message) { return !message.tools.empty(); });
  if (thinking && !keep_all) DropEarlierDevelopers(&messages);
  const int last_user = LastUser(messages);
  std::string text(kBos);
  if (thinking && conversation.max_effort) Append(&text, kV4MaxEffort);
  for (int i = 0; i < static_cast<int>(messages.size()); ++i) {
    const Message& message = messages[i];
    const std::string content = message.content.value_or("");
    switch (message.role) {
      case Role::kDeveloper:
      case Role::kUser:
        Append(&text, kUser);
        [[fallthrough]];
      case Role::kSystem:
        Append(&text, content, ToolSection(kV4Tools, message.tools));
        break;
      case Role::kLatestReminder:
        Append(&text, kLatestReminder, content);
        break;
      case Role::kAssistant:
        if (thinking && (keep_all || i > last_user)) {
          Append(&text, message.reasoning_content, kEndThink);
        }
        Append(&text, content, Calls("tool_calls", message.tool_calls), kEos);
        break;
      case Role::kTool:  // merged away
        break;
    }
    const bool last = i + 1 == static_cast<int>(messages.size());
    const bool answered = last || messages[i + 1].role == Role::kAssistant ||
                          messages[i + 1].role == Role::kLatestReminder;
    if (answered && IsUser(message)) {
      Append(&text, kAssistant, thinking && (keep_all || i >= last_user) ? kThink : kEndThink);
    }
  }
  return text;
}

}  // namespace chat
