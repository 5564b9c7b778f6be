// Prompts of V3.2 and V4: markers of the reply belong to the message before it, tool calls are
// tagged with ｜DSML｜, earlier reasoning is dropped.
//
// Stateless functions.  REQUIRES, all: RenderPrompt has checked the conversation.

#ifndef CHAT_DSML_PROMPT_H_
#define CHAT_DSML_PROMPT_H_

#include <string>

#include "absl/status/statusor.h"
#include "chat/conversation.h"

namespace chat {

// Errors: kInvalidArgument: results of tools that answer no call, or not all of them.
absl::StatusOr<std::string> RenderV32(const Conversation& conversation, bool thinking);

std::string RenderV4(const Conversation& conversation, bool thinking);

}  // namespace chat

#endif  // CHAT_DSML_PROMPT_H_
