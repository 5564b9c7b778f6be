// The prompt of a conversation in a checkpoint's own format, byte for byte as the published
// template or encoder writes it.
//
// Stateless functions.

#ifndef CHAT_PROMPT_H_
#define CHAT_PROMPT_H_

#include <string>

#include "absl/status/statusor.h"
#include "chat/conversation.h"
#include "chat/format.h"

namespace chat {

// The text, BOS included: to be encoded without adding special tokens.  Without
// add_generation_prompt it ends after the last message (in V3.2 and V4, as in V3-0324 and R1-0528
// after a user, the marker of the reply belongs to the message and is always there).
// Errors: kInvalidArgument: the format cannot say this; it names the message and why.
absl::StatusOr<std::string> RenderPrompt(Format format, const Conversation& conversation);

// Whether the model answers such a prompt with reasoning first, up to </think>: the argument of
// ReplyParser.
bool ReplyBeginsInReasoning(Format format, const Conversation& conversation);

}  // namespace chat

#endif  // CHAT_PROMPT_H_
