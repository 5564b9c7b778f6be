#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "router/http/answer_parts.h"
#include "tokenizer/utf8.h"

namespace router::http {
namespace {

using ferry::v1::GenerateResponse;
using ferry::v1::PositionLogprobs;
using ferry::v1::TokenLogprob;

// Tokens are members of an object here: those that are no text must stay apart.
std::string TokenName(const TokenLogprob& token) {
  if (tokenizer::FirstInvalidUtf8(token.token()) == token.token().size()) return token.token();
  std::string name = "bytes:";
  for (const char byte : token.token()) {
    absl::StrAppend(&name, "\\x", absl::BytesToHexString(absl::string_view(&byte, 1)));
  }
  return name;
}

// Characters that begin in `bytes`, so that parts of one are counted once.
int64_t CharactersIn(const std::string& bytes) {
  int64_t count = 0;
  for (const char byte : bytes) count += (static_cast<unsigned char>(byte) & 0xC0) != 0x80;
  return count;
}

class CompletionAnswer final : public Answer {
 public:
  CompletionAnswer(const ApiRequest& request, AnswerName name)
      : request_(request),
        frame_(request, std::move(name)),
        wants_logprobs_(request.prompts.front()->sampling().has_logprobs()),
        choices_(request.prompts.size() * request.branches) {}

  std::string Add(size_t prompt, const GenerateResponse& message) override {
    if (message.has_summary()) {
      frame_.AddSummary(message.summary());
      return "";
    }
    const size_t index = prompt * request_.branches + message.index();
    Choice& choice = choices_[index];
    Json logprobs = Logprobs(message, &choice);
    if (!request_.stream) {
      choice.text += message.text();
      choice.finish_reason = FinishReasonJson(message.finish_reason());
      for (auto& [member, values] : logprobs.items()) {
        for (Json& value : values) choice.logprobs[member].push_back(std::move(value));
      }
      return "";
    }
    const bool ended = message.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED;
    if (message.text().empty() && !ended && logprobs.is_null()) return "";
    return frame_.Event({{"index", index},
                         {"text", message.text()},
                         {"logprobs", std::move(logprobs)},
                         {"finish_reason", FinishReasonJson(message.finish_reason())}});
  }

  std::string Finish() override {
    if (request_.stream) return frame_.LastEvents();
    Json choices = Json::array();
    for (size_t index = 0; index < choices_.size(); ++index) {
      Choice& choice = choices_[index];
      choices.push_back({{"index", index},
                         {"text", std::move(choice.text)},
                         {"logprobs", std::move(choice.logprobs)},
                         {"finish_reason", choice.finish_reason}});
    }
    return frame_.WholeObject(std::move(choices));
  }

 private:
  struct Choice {
    std::string text;
    Json logprobs;
    Json finish_reason;
    int64_t offset = 0;  // characters of the tokens so far
  };

  // Null if none were asked for.
  Json Logprobs(const GenerateResponse& message, Choice* choice) const {
    if (!wants_logprobs_) return nullptr;
    Json out = {{"text_offset", Json::array()},
                {"token_logprobs", Json::array()},
                {"tokens", Json::array()},
                {"top_logprobs", Json::array()}};
    for (const PositionLogprobs& position : message.logprobs()) {
      out["text_offset"].push_back(choice->offset);
      out["tokens"].push_back(TokenName(position.chosen()));
      out["token_logprobs"].push_back(LogprobJson(position.chosen().logprob()));
      Json top = Json::object();
      for (const TokenLogprob& one : position.top()) {
        top[TokenName(one)] = LogprobJson(one.logprob());
      }
      top[TokenName(position.chosen())] = LogprobJson(position.chosen().logprob());
      out["top_logprobs"].push_back(std::move(top));
      choice->offset += CharactersIn(position.chosen().token());
    }
    return out;
  }

  const ApiRequest& request_;
  AnswerFrame frame_;
  const bool wants_logprobs_;
  std::vector<Choice> choices_;  // by prompt, then branch
};

}  // namespace

std::unique_ptr<Answer> MakeCompletionAnswer(const ApiRequest& request, AnswerName name) {
  return std::make_unique<CompletionAnswer>(request, std::move(name));
}

}  // namespace router::http
