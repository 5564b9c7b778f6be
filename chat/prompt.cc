#include "chat/prompt.h"

#include "chat/dsml_prompt.h"
#include "chat/markers.h"
#include "chat/text.h"
#include "chat/v3_prompt.h"
#include "status/status_macros.h"

namespace chat {
namespace {

bool IsDsml(Format format) { return format == Format::kV32 || format == Format::kV4; }

// Whether the reply is to begin with reasoning, where the format leaves that to the request.
bool Thinks(Format format, const Conversation& conversation) {
  return conversation.thinking.value_or(format == Format::kV4);
}

absl::Status Check(Format format, const Conversation& conversation) {
  if (conversation.messages.empty()) return absl::InvalidArgumentError("there is no message");
  const auto refuse = [&](size_t i, std::string_view what) {
    return absl::InvalidArgumentError(
        Concat("messages[", i, "]: chat format ", FormatName(format), " has no ", what));
  };
  if (format == Format::kV2 && !conversation.tools.empty()) {
    return absl::InvalidArgumentError("chat format v2 has no tools");
  }
  for (size_t i = 0; i < conversation.messages.size(); ++i) {
    const Message& message = conversation.messages[i];
    if (message.role == Role::kLatestReminder && format != Format::kV4) {
      return refuse(i, "role latest_reminder");
    }
    if (format == Format::kV2 && (message.role == Role::kTool || !message.tool_calls.empty())) {
      return refuse(i, "tools");
    }
    if (!IsDsml(format) && !message.tools.empty()) {
      return refuse(i, "tools of a message: declare them for the request");
    }
    if (!message.content.has_value() &&
        (message.role != Role::kAssistant || message.tool_calls.empty())) {
      return absl::InvalidArgumentError(Concat("messages[", i, "].content is missing"));
    }
  }
  return absl::OkStatus();
}

std::string RenderV2(const Conversation& conversation) {
  std::string text(kBos);
  for (const Message& message : conversation.messages) {
    if (message.role == Role::kUser) {
      Append(&text, "User: ", *message.content, "\n\n");
    } else if (message.role == Role::kAssistant) {
      Append(&text, "Assistant: ", *message.content, kEos);
    } else {
      Append(&text, *message.content, "\n\n");
    }
  }
  if (conversation.add_generation_prompt) Append(&text, "Assistant:");
  return text;
}

}  // namespace

absl::StatusOr<std::string> RenderPrompt(Format format, const Conversation& given) {
  RETURN_IF_ERROR(Check(format, given));
  Conversation conversation = given;
  if (!IsDsml(format)) {
    // "developer" is OpenAI's later name of "system".
    for (Message& message : conversation.messages) {
      if (message.role == Role::kDeveloper) message.role = Role::kSystem;
    }
  }
  const bool thinking = Thinks(format, conversation);
  switch (format) {
    case Format::kV2:
      return RenderV2(conversation);
    case Format::kV3:
    case Format::kR1:
      return RenderV3(conversation, /*reasons=*/format == Format::kR1);
    case Format::kV3_0324:
    case Format::kR1_0528:
      return RenderV3_0324(conversation, /*reasons=*/format == Format::kR1_0528);
    case Format::kV31:
      return RenderV31(conversation, thinking);
    case Format::kV32:
      return RenderV32(conversation, thinking);
    case Format::kV4:
      return RenderV4(conversation, thinking);
  }
  return absl::InternalError("unknown chat format");
}

bool ReplyBeginsInReasoning(Format format, const Conversation& conversation) {
  if (conversation.messages.empty()) return false;
  const Role last = conversation.messages.back().role;
  switch (format) {
    case Format::kR1:
      return conversation.add_generation_prompt && last != Role::kTool;
    case Format::kV31:
      return Thinks(format, conversation) && conversation.add_generation_prompt &&
             last == Role::kUser;
    case Format::kV32:
    case Format::kV4:
      return Thinks(format, conversation) && last != Role::kAssistant && last != Role::kSystem;
    default:
      return false;
  }
}

}  // namespace chat
