// ReplyParser: splits the text of a reply, as it arrives, into reasoning, content and tool calls.
// However the text is cut into pieces, the pieces that come out add up to the same.
//
// The text must be decoded with special tokens in it (tool markers, <think>) and without EOS.  What
// begins like a tool call and is not one is content, and so is all that follows.
//
// Thread-compatible.

#ifndef CHAT_REPLY_PARSER_H_
#define CHAT_REPLY_PARSER_H_

#include <string>
#include <string_view>
#include <vector>

#include "chat/conversation.h"
#include "chat/format.h"
#include "chat/tool_syntax.h"

namespace chat {

// What has become certain; to be appended to what came before.  A call comes whole, without an id.
struct ReplyDelta {
  std::string reasoning_content;
  std::string content;
  std::vector<ToolCall> tool_calls;
};

// The tokens by which a reply is split: its text must show them, special tokens or not.
std::vector<std::string_view> ReplyMarkers();

class ReplyParser final {
 public:
  struct Options {
    Format format = Format::kV3;
    bool in_reasoning = false;  // ReplyBeginsInReasoning
    bool tools = false;         // the request declares some; else markers of calls are content
  };
  explicit ReplyParser(const Options& options);

  ReplyDelta Append(std::string_view text);
  // The reply has ended: what was held back.
  ReplyDelta Finish();

 private:
  enum class State { kStart, kReasoning, kContent, kCalls, kRest };

  // Takes one step on what is pending; false: it needs more text.
  bool Step(bool ended, ReplyDelta* out);
  bool StepStart(bool ended);
  bool StepReasoning(bool ended, ReplyDelta* out);
  bool StepContent(bool ended, ReplyDelta* out);
  bool StepCalls(bool ended, ReplyDelta* out);
  void Give(size_t num_bytes, std::string* out);

  const bool may_reason_;
  const bool in_reasoning_;
  const ToolSyntax* const syntax_;  // may be null: no tools
  State state_ = State::kStart;
  std::string pending_;  // not given out yet
  std::string unread_;   // since the last call: content, if what follows is none
  size_t searched_ = 0;  // bytes of pending_ in which no call ends
};

}  // namespace chat

#endif  // CHAT_REPLY_PARSER_H_
