// Prompts of the formats whose templates keep state from message to message: V3, V3-0324, R1,
// R1-0528 and V3.1.  Each follows its template to the letter, where that is odd too.
//
// Stateless functions.  REQUIRES, all: RenderPrompt has checked the conversation.

#ifndef CHAT_V3_PROMPT_H_
#define CHAT_V3_PROMPT_H_

#include <string>

#include "chat/conversation.h"

namespace chat {

// V3 and, with `reasons`, R1: what stands before the last </think> of an answer is cut, and the
// reply begins after "<think>\n".  Odd: of all calls of a conversation only the first opens a
// section, and a section is closed behind every call but the first; the text of a message hides its
// calls.
std::string RenderV3(const Conversation& conversation, bool reasons);

// V3-0324 and, with `reasons`, R1-0528: as above without the oddities; the marker of the reply
// belongs to the user's message.
std::string RenderV3_0324(const Conversation& conversation, bool reasons);

// V3.1.  Odd: behind results of tools no reply is opened.
std::string RenderV31(const Conversation& conversation, bool thinking);

}  // namespace chat

#endif  // CHAT_V3_PROMPT_H_
