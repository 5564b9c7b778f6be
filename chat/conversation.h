// Conversation: what a chat request says, before a format turns it into a prompt.
//
// Values only.

#ifndef CHAT_CONVERSATION_H_
#define CHAT_CONVERSATION_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"

namespace chat {

enum class Role { kSystem, kDeveloper, kUser, kAssistant, kTool, kLatestReminder };
std::string_view RoleName(Role role);

// A function that the model may call.
struct Tool {
  std::string name;
  std::string description;
  std::string parameters;  // JSON as Python writes it
  std::string function;    // the whole `function` object, likewise
};

struct ToolCall {
  std::string id;
  std::string type = "function";
  std::string name;
  std::string arguments;  // JSON, as the model wrote it: not checked
};

struct Message {
  Role role = Role::kUser;
  std::optional<std::string> content;  // absent only beside tool_calls
  std::string reasoning_content;       // of an assistant; "" if none
  std::vector<ToolCall> tool_calls;    // of an assistant
  std::string tool_call_id;            // of a tool's result; "" if not said
  std::vector<Tool> tools;             // declared with this message (V3.2, V4)
};

struct Conversation {
  std::vector<Message> messages;
  std::vector<Tool> tools;       // declared for the request
  std::optional<bool> thinking;  // absent: as the format does by default
  bool max_effort = false;       // reasoning_effort "max"
  bool add_generation_prompt = true;
};

// Reads `messages`, `tools`, `tool_choice`, `reasoning_effort`, `chat_template_kwargs` (thinking,
// enable_thinking) and `add_generation_prompt` of a chat completion request in OpenAI's form; the
// request's other members are not looked at.  tool_choice "none" declares no tools.
// Errors: kInvalidArgument naming the member, its place, its value and what was expected.
absl::StatusOr<Conversation> ParseConversation(const nlohmann::ordered_json& request);

}  // namespace chat

#endif  // CHAT_CONVERSATION_H_
