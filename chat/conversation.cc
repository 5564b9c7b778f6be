#include "chat/conversation.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_join.h"
#include "chat/python_json.h"
#include "chat/text.h"
#include "status/status_macros.h"

namespace chat {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::pair<std::string_view, Role>, 6> kRoles = {{
    {"system", Role::kSystem},
    {"developer", Role::kDeveloper},
    {"user", Role::kUser},
    {"assistant", Role::kAssistant},
    {"tool", Role::kTool},
    {"latest_reminder", Role::kLatestReminder},
}};

// A value in an error: enough to find it, not a whole prompt.
std::string Shown(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= 80 ? text : Concat("a string of ", text.size() - 2, " bytes");
}

absl::Status Expected(std::string_view place, std::string_view expected, const Json& value) {
  return absl::InvalidArgumentError(Concat(place, " is ", Shown(value), ", expected ", expected));
}

// nullptr: absent or null.
const Json* Find(const Json& object, const char* member) {
  const auto it = object.find(member);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// "" if absent and not required.
absl::StatusOr<std::string> ReadString(const std::string& place, const Json& object,
                                       const char* member, bool required) {
  const Json* value = Find(object, member);
  const std::string name = Concat(place, ".", member);
  if (value == nullptr) {
    if (required) return absl::InvalidArgumentError(Concat(name, " is missing"));
    return std::string();
  }
  if (!value->is_string()) return Expected(name, "a string", *value);
  return value->get<std::string>();
}

absl::StatusOr<std::optional<bool>> ReadBool(const Json& object, const char* member,
                                             std::string_view name) {
  const Json* value = Find(object, member);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) return Expected(name, "true or false", *value);
  return value->get<bool>();
}

// Errors: a member that nobody reads, unless it is null.
absl::Status OnlyMembers(std::string_view place, const Json& object,
                         std::initializer_list<std::string_view> known) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string shown =
        name.size() <= 80 ? name : Concat("(a name of ", name.size(), " bytes)");
    return absl::InvalidArgumentError(
        Concat(place, ".", shown, " is ", Shown(value), ": there is no such member here"));
  }
  return absl::OkStatus();
}

// Of a tool and of a call of one; nothing else than functions is known.
absl::StatusOr<const Json*> FindFunction(const std::string& place, const Json& object) {
  if (const Json* type = Find(object, "type"); type != nullptr && *type != "function") {
    return Expected(Concat(place, ".type"), "\"function\"", *type);
  }
  const Json* const function = Find(object, "function");
  const std::string name = Concat(place, ".function");
  if (function == nullptr) return absl::InvalidArgumentError(Concat(name, " is missing"));
  if (!function->is_object()) return Expected(name, "an object", *function);
  return function;
}

absl::StatusOr<std::string> ReadFunctionName(const std::string& place, const Json& function) {
  ASSIGN_OR_RETURN(std::string name, ReadString(place, function, "name", true));
  if (name.empty()) return absl::InvalidArgumentError(Concat(place, ".name is empty"));
  return name;
}

// A string, or parts of type "text", which make lines.
absl::StatusOr<std::string> ReadText(const std::string& place, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return Expected(place, "a string or an array of text parts", value);
  std::vector<std::string> lines;
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string part = Concat(place, "[", i, "]");
    if (!value[i].is_object()) return Expected(part, "an object", value[i]);
    ASSIGN_OR_RETURN(const std::string type, ReadString(part, value[i], "type", true));
    if (type != "text") {
      return absl::InvalidArgumentError(
          Concat(part, ".type is ", Shown(type), ": only text can be served"));
    }
    ASSIGN_OR_RETURN(lines.emplace_back(), ReadString(part, value[i], "text", true));
    RETURN_IF_ERROR(OnlyMembers(part, value[i], {"type", "text"}));
  }
  return absl::StrJoin(lines, "\n");
}

absl::StatusOr<Tool> ReadTool(const std::string& place, const Json& value) {
  if (!value.is_object()) return Expected(place, "an object", value);
  ASSIGN_OR_RETURN(const Json* function, FindFunction(place, value));
  RETURN_IF_ERROR(OnlyMembers(place, value, {"type", "function"}));
  Tool tool;
  const std::string member = Concat(place, ".function");
  RETURN_IF_ERROR(OnlyMembers(member, *function, {"name", "description", "parameters", "strict"}));
  RETURN_IF_ERROR(ReadBool(*function, "strict", Concat(member, ".strict")).status());
  ASSIGN_OR_RETURN(tool.name, ReadFunctionName(member, *function));
  ASSIGN_OR_RETURN(tool.description, ReadString(member, *function, "description", false));
  const Json* parameters = Find(*function, "parameters");
  if (parameters != nullptr && !parameters->is_object()) {
    return Expected(Concat(member, ".parameters"), "an object", *parameters);
  }
  tool.parameters = parameters == nullptr ? "{}" : PythonJson(*parameters);
  tool.function = PythonJson(*function);
  return tool;
}

absl::StatusOr<std::vector<Tool>> ReadTools(const std::string& place, const Json& object) {
  std::vector<Tool> tools;
  const Json* value = Find(object, "tools");
  if (value == nullptr) return tools;
  const std::string name = Concat(place, "tools");
  if (!value->is_array()) return Expected(name, "an array", *value);
  for (size_t i = 0; i < value->size(); ++i) {
    ASSIGN_OR_RETURN(tools.emplace_back(), ReadTool(Concat(name, "[", i, "]"), (*value)[i]));
  }
  return tools;
}

absl::StatusOr<ToolCall> ReadToolCall(const std::string& place, const Json& value) {
  if (!value.is_object()) return Expected(place, "an object", value);
  ASSIGN_OR_RETURN(const Json* function, FindFunction(place, value));
  ToolCall call;
  ASSIGN_OR_RETURN(call.id, ReadString(place, value, "id", false));
  // A call that was put together from a stream has its index.
  RETURN_IF_ERROR(OnlyMembers(place, value, {"id", "type", "function", "index"}));
  if (const Json* index = Find(value, "index"); index != nullptr && !index->is_number_integer()) {
    return Expected(Concat(place, ".index"), "an integer", *index);
  }
  const std::string member = Concat(place, ".function");
  RETURN_IF_ERROR(OnlyMembers(member, *function, {"name", "arguments"}));
  ASSIGN_OR_RETURN(call.name, ReadFunctionName(member, *function));
  ASSIGN_OR_RETURN(call.arguments, ReadString(member, *function, "arguments", true));
  return call;
}

absl::Status CheckMessageMembers(const std::string& place, Role role, const Json& value) {
  switch (role) {
    case Role::kAssistant:
      // Clients send back what they have got, empty members included.
      if (const Json* annotations = Find(value, "annotations");
          annotations != nullptr && *annotations != Json::array()) {
        return Expected(Concat(place, ".annotations"), "an empty array", *annotations);
      }
      return OnlyMembers(
          place, value,
          {"role", "content", "name", "tools", "reasoning_content", "tool_calls", "annotations"});
    case Role::kTool:
      return OnlyMembers(place, value, {"role", "content", "name", "tools", "tool_call_id"});
    default:
      return OnlyMembers(place, value, {"role", "content", "name", "tools"});
  }
}

absl::StatusOr<Message> ReadMessage(const std::string& place, const Json& value) {
  if (!value.is_object()) return Expected(place, "an object", value);
  ASSIGN_OR_RETURN(const std::string role_name, ReadString(place, value, "role", true));
  Message message;
  bool known = false;
  for (const auto& [name, role] : kRoles) {
    if (name != role_name) continue;
    message.role = role;
    known = true;
  }
  if (!known) {
    return absl::InvalidArgumentError(
        Concat(place, ".role is ", Shown(role_name),
               ", expected system, developer, user, assistant or tool"));
  }
  RETURN_IF_ERROR(CheckMessageMembers(place, message.role, value));
  if (const Json* content = Find(value, "content")) {
    ASSIGN_OR_RETURN(message.content, ReadText(Concat(place, ".content"), *content));
  }
  ASSIGN_OR_RETURN(message.tools, ReadTools(Concat(place, "."), value));
  ASSIGN_OR_RETURN(message.tool_call_id, ReadString(place, value, "tool_call_id", false));
  RETURN_IF_ERROR(ReadString(place, value, "name", false).status());  // no format says it
  if (message.role == Role::kAssistant) {
    ASSIGN_OR_RETURN(message.reasoning_content,
                     ReadString(place, value, "reasoning_content", false));
    if (const Json* calls = Find(value, "tool_calls")) {
      const std::string name = Concat(place, ".tool_calls");
      if (!calls->is_array()) return Expected(name, "an array", *calls);
      for (size_t i = 0; i < calls->size(); ++i) {
        ASSIGN_OR_RETURN(message.tool_calls.emplace_back(),
                         ReadToolCall(Concat(name, "[", i, "]"), (*calls)[i]));
      }
    }
  }
  if (!message.content.has_value() && message.tool_calls.empty()) {
    return absl::InvalidArgumentError(Concat(place, ".content is missing"));
  }
  return message;
}

absl::Status ReadThinking(const Json& request, Conversation* conversation) {
  if (const Json* kwargs = Find(request, "chat_template_kwargs")) {
    if (!kwargs->is_object()) return Expected("chat_template_kwargs", "an object", *kwargs);
    RETURN_IF_ERROR(OnlyMembers("chat_template_kwargs", *kwargs, {"enable_thinking", "thinking"}));
    for (const char* member : {"enable_thinking", "thinking"}) {
      ASSIGN_OR_RETURN(const std::optional<bool> value,
                       ReadBool(*kwargs, member, Concat("chat_template_kwargs.", member)));
      if (value.has_value()) conversation->thinking = value;
    }
  }
  const Json* effort = Find(request, "reasoning_effort");
  if (effort == nullptr) return absl::OkStatus();
  if (!effort->is_string()) return Expected("reasoning_effort", "a string", *effort);
  // "none" is no reasoning; of the others only "max" is written into a prompt.
  if (*effort == "none") conversation->thinking = false;
  conversation->max_effort = *effort == "max";
  return absl::OkStatus();
}

}  // namespace

std::string_view RoleName(Role role) {
  for (const auto& [name, known] : kRoles) {
    if (known == role) return name;
  }
  return "";
}

absl::StatusOr<Conversation> ParseConversation(const Json& request) {
  if (!request.is_object()) return Expected("the request", "an object", request);
  if (DeeperThan(kMaxLevels, request)) {
    return absl::InvalidArgumentError(
        Concat("the request is nested more than ", kMaxLevels, " levels deep"));
  }
  const Json* messages = Find(request, "messages");
  if (messages == nullptr) return absl::InvalidArgumentError("messages is missing");
  if (!messages->is_array()) return Expected("messages", "an array", *messages);
  if (messages->empty()) return absl::InvalidArgumentError("messages is empty");
  Conversation conversation;
  for (size_t i = 0; i < messages->size(); ++i) {
    ASSIGN_OR_RETURN(conversation.messages.emplace_back(),
                     ReadMessage(Concat("messages[", i, "]"), (*messages)[i]));
  }
  ASSIGN_OR_RETURN(conversation.tools, ReadTools("", request));
  if (const Json* choice = Find(request, "tool_choice"); choice != nullptr && *choice == "none") {
    conversation.tools.clear();
  }
  RETURN_IF_ERROR(ReadThinking(request, &conversation));
  ASSIGN_OR_RETURN(const std::optional<bool> generate,
                   ReadBool(request, "add_generation_prompt", "add_generation_prompt"));
  conversation.add_generation_prompt = generate.value_or(true);
  return conversation;
}

}  // namespace chat
