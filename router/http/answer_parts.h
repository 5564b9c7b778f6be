// What answers of both APIs are made of.
//
// AnswerFrame is thread-compatible; the rest are functions without state.

#ifndef ROUTER_HTTP_ANSWER_PARTS_H_
#define ROUTER_HTTP_ANSWER_PARTS_H_

#include <string>
#include <vector>

#include "ferry/v1/inference.pb.h"
#include "router/http/answer.h"
#include "router/http/json_body.h"

namespace router::http {

// "stop", "length", or null while it goes on.
Json FinishReasonJson(ferry::v1::FinishReason reason);
// A token's bytes as text, with U+FFFD for what is no character.
std::string TokenText(const std::string& bytes);
// JSON has no infinity: what has no probability gets OpenAI's -9999.
double LogprobJson(float logprob);

// The members around the choices, and the usage over all prompts.
class AnswerFrame final {
 public:
  AnswerFrame(const ApiRequest& request, AnswerName name);

  // Takes the numbers of a prompt's last message.
  void AddSummary(const ferry::v1::GenerateSummary& summary);
  // An event with one choice.
  std::string Event(Json choice) const;
  // Usage, if asked for, and the end of the stream.
  std::string LastEvents() const;
  std::string WholeObject(Json choices) const;

 private:
  Json Object(const char* object, Json choices) const;
  Json Chunk(Json choices) const;  // the object of an event
  Json Usage() const;

  const ApiRequest& request_;
  const AnswerName name_;
  int64_t prompt_tokens_ = 0;
  int64_t completion_tokens_ = 0;
  int64_t cached_tokens_ = 0;
};

std::unique_ptr<Answer> MakeCompletionAnswer(const ApiRequest& request, AnswerName name);
std::unique_ptr<Answer> MakeChatAnswer(const ApiRequest& request, AnswerName name);

}  // namespace router::http

#endif  // ROUTER_HTTP_ANSWER_PARTS_H_
