// Answer: the output of a request's prompts becomes OpenAI's JSON: chunks of a stream, or one
// object at the end.
//
// Thread-compatible.

#ifndef ROUTER_HTTP_ANSWER_H_
#define ROUTER_HTTP_ANSWER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "router/http/api_request.h"

namespace ferry::v1 {
class GenerateResponse;
}

namespace router::http {

// What every object of an answer says of it.
struct AnswerName {
  std::string request_id;
  std::string model;
  int64_t created = 0;  // seconds since 1970
};

class Answer {
 public:
  // `request` must outlive the answer.
  static std::unique_ptr<Answer> Create(const ApiRequest& request, AnswerName name);
  virtual ~Answer() = default;

  // The next message of `request.prompts[prompt]`.  Returns the events that it makes; "" if there
  // is nothing to say yet, and always without a stream.
  virtual std::string Add(size_t prompt, const ferry::v1::GenerateResponse& message) = 0;
  // After the last message of every prompt: the last events, or the whole object.
  virtual std::string Finish() = 0;
};

}  // namespace router::http

#endif  // ROUTER_HTTP_ANSWER_H_
