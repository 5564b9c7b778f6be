#include "router/http/answer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/http/answer_parts.h"
#include "service/process.h"
#include "tokenizer/utf8.h"

namespace router::http {
namespace {

std::string EventOf(const Json& body) { return absl::StrCat("data: ", Dump(body), "\n\n"); }

}  // namespace

std::unique_ptr<Answer> Answer::Create(const ApiRequest& request, AnswerName name) {
  return request.api == Api::kChat ? MakeChatAnswer(request, std::move(name))
                                   : MakeCompletionAnswer(request, std::move(name));
}

Json FinishReasonJson(ferry::v1::FinishReason reason) {
  switch (reason) {
    case ferry::v1::FINISH_REASON_STOP:
      return "stop";
    case ferry::v1::FINISH_REASON_LENGTH:
      return "length";
    default:
      return nullptr;
  }
}

std::string TokenText(const std::string& bytes) {
  std::string text;
  if (tokenizer::AppendValidUtf8(bytes, &text) < bytes.size()) {
    text += tokenizer::kReplacementCharacter;
  }
  return text;
}

double LogprobJson(float logprob) { return std::max(-9999.0, static_cast<double>(logprob)); }

AnswerFrame::AnswerFrame(const ApiRequest& request, AnswerName name)
    : request_(request), name_(std::move(name)) {}

void AnswerFrame::AddSummary(const ferry::v1::GenerateSummary& summary) {
  prompt_tokens_ += summary.prompt_tokens();
  completion_tokens_ += summary.completion_tokens();
  cached_tokens_ += summary.cached_tokens();
}

Json AnswerFrame::Object(const char* object, Json choices) const {
  const bool chat = request_.api == Api::kChat;
  return {{"id", absl::StrCat(chat ? "chatcmpl-" : "cmpl-", name_.request_id)},
          {"object", object},
          {"created", name_.created},
          {"model", name_.model},
          {"system_fingerprint", absl::StrCat("ferry-", service::kVersion)},
          {"choices", std::move(choices)}};
}

Json AnswerFrame::Usage() const {
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", completion_tokens_},
          {"total_tokens", prompt_tokens_ + completion_tokens_},
          {"prompt_tokens_details", {{"cached_tokens", cached_tokens_}}}};
}

Json AnswerFrame::Chunk(Json choices) const {
  return Object(request_.api == Api::kChat ? "chat.completion.chunk" : "text_completion",
                std::move(choices));
}

std::string AnswerFrame::Event(Json choice) const {
  Json event = Chunk(Json::array({std::move(choice)}));
  if (request_.include_usage) event["usage"] = nullptr;
  return EventOf(event);
}

std::string AnswerFrame::LastEvents() const {
  std::string events;
  if (request_.include_usage) {
    Json event = Chunk(Json::array());
    event["usage"] = Usage();
    events = EventOf(event);
  }
  return events + "data: [DONE]\n\n";
}

std::string AnswerFrame::WholeObject(Json choices) const {
  Json object = Object(request_.api == Api::kChat ? "chat.completion" : "text_completion",
                       std::move(choices));
  object["usage"] = Usage();
  return Dump(object);
}

}  // namespace router::http
