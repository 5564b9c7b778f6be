#include <utility>

#include "absl/strings/str_cat.h"
#include "chat/reply_parser.h"
#include "router/http/answer_parts.h"

namespace router::http {
namespace {

using ferry::v1::GenerateResponse;
using ferry::v1::PositionLogprobs;
using ferry::v1::TokenLogprob;

Json TokenEntry(const TokenLogprob& token) {
  Json bytes = Json::array();
  for (const char byte : token.token()) bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", TokenText(token.token())},
          {"logprob", LogprobJson(token.logprob())},
          {"bytes", std::move(bytes)}};
}

Json Entries(const GenerateResponse& message) {
  Json entries = Json::array();
  for (const PositionLogprobs& position : message.logprobs()) {
    Json entry = TokenEntry(position.chosen());
    entry["top_logprobs"] = Json::array();
    for (const TokenLogprob& one : position.top()) {
      entry["top_logprobs"].push_back(TokenEntry(one));
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

class ChatAnswer final : public Answer {
 public:
  ChatAnswer(const ApiRequest& request, AnswerName name)
      : request_(request),
        frame_(request, std::move(name)),
        wants_logprobs_(request.prompts.front()->sampling().has_logprobs()) {
    for (uint32_t i = 0; i < request.branches; ++i) {
      choices_.push_back({.parser = chat::ReplyParser(request.reply)});
    }
  }

  std::string Add(size_t, const GenerateResponse& message) override {
    if (message.has_summary()) {
      frame_.AddSummary(message.summary());
      return "";
    }
    Choice& choice = choices_[message.index()];
    const bool ended = message.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED;
    chat::ReplyDelta delta = choice.parser.Append(message.text());
    if (ended) {
      chat::ReplyDelta rest = choice.parser.Finish();
      delta.reasoning_content += rest.reasoning_content;
      delta.content += rest.content;
      for (chat::ToolCall& call : rest.tool_calls) delta.tool_calls.push_back(std::move(call));
    }
    Json calls = ToolCalls(delta.tool_calls, &choice);
    choice.finish_reason = FinishReasonJson(message.finish_reason());
    if (choice.num_calls > 0 && message.finish_reason() == ferry::v1::FINISH_REASON_STOP) {
      choice.finish_reason = "tool_calls";
    }
    Json entries = wants_logprobs_ ? Entries(message) : Json();
    if (request_.stream) {
      return Event(message.index(), delta, std::move(calls), std::move(entries), &choice);
    }
    choice.reasoning += delta.reasoning_content;
    choice.content += delta.content;
    for (Json& call : calls) choice.tool_calls.push_back(std::move(call));
    for (Json& entry : entries) choice.logprobs.push_back(std::move(entry));
    return "";
  }

  std::string Finish() override {
    if (request_.stream) return frame_.LastEvents();
    Json choices = Json::array();
    for (Choice& choice : choices_) {
      const bool only_calls = choice.content.empty() && !choice.tool_calls.empty();
      Json message = {{"role", "assistant"},
                      {"content", only_calls ? Json() : Json(std::move(choice.content))},
                      {"refusal", nullptr}};
      if (!choice.reasoning.empty()) message["reasoning_content"] = std::move(choice.reasoning);
      if (!choice.tool_calls.empty()) message["tool_calls"] = std::move(choice.tool_calls);
      choices.push_back({{"index", choices.size()},
                         {"message", std::move(message)},
                         {"logprobs", LogprobsMember(std::move(choice.logprobs))},
                         {"finish_reason", choice.finish_reason}});
    }
    return frame_.WholeObject(std::move(choices));
  }

 private:
  struct Choice {
    chat::ReplyParser parser;
    bool opened = false;  // the stream has said whose message it is
    size_t num_calls = 0;
    std::string reasoning = {};
    std::string content = {};
    Json tool_calls = Json::array();
    Json logprobs = Json::array();
    Json finish_reason = nullptr;
  };

  // Names calls; in a stream each says which one it is.
  Json ToolCalls(const std::vector<chat::ToolCall>& calls, Choice* choice) const {
    Json out = Json::array();
    for (const chat::ToolCall& call : calls) {
      Json one = Json::object();
      if (request_.stream) one["index"] = choice->num_calls;
      one["id"] = absl::StrCat("call_", NewRequestId());
      one["type"] = "function";
      one["function"] = {{"name", call.name}, {"arguments", call.arguments}};
      out.push_back(std::move(one));
      ++choice->num_calls;
    }
    return out;
  }

  Json LogprobsMember(Json entries) const {
    if (!wants_logprobs_) return nullptr;
    return {{"content", std::move(entries)}, {"refusal", nullptr}};
  }

  // "" if there is nothing to say yet.
  std::string Event(uint32_t index, const chat::ReplyDelta& delta, Json calls, Json entries,
                    Choice* choice) const {
    Json members = Json::object();
    if (!std::exchange(choice->opened, true)) members = {{"role", "assistant"}, {"content", ""}};
    if (!delta.reasoning_content.empty()) members["reasoning_content"] = delta.reasoning_content;
    if (!delta.content.empty()) members["content"] = delta.content;
    if (!calls.empty()) members["tool_calls"] = std::move(calls);
    if (members.empty() && choice->finish_reason.is_null() && entries.empty()) return "";
    return frame_.Event({{"index", index},
                         {"delta", std::move(members)},
                         {"logprobs", LogprobsMember(std::move(entries))},
                         {"finish_reason", choice->finish_reason}});
  }

  const ApiRequest& request_;
  AnswerFrame frame_;
  const bool wants_logprobs_;
  std::vector<Choice> choices_;  // by branch
};

}  // namespace

std::unique_ptr<Answer> MakeChatAnswer(const ApiRequest& request, AnswerName name) {
  return std::make_unique<ChatAnswer>(request, std::move(name));
}

}  // namespace router::http
