// ApiRequest: a request of OpenAI's API for completions or chat completions, as Ferry's own
// requests (ferry.v1.GenerateRequest) and what the form of the answer depends on.
//
// Stateless functions; values.

#ifndef ROUTER_HTTP_API_REQUEST_H_
#define ROUTER_HTTP_API_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "chat/reply_parser.h"
#include "router/request.h"

namespace router::http {

enum class Api { kCompletions, kChat };

struct ApiRequest {
  ApiRequest();
  ApiRequest(ApiRequest&&) noexcept;
  ApiRequest& operator=(ApiRequest&&) noexcept;
  ~ApiRequest();

  Api api = Api::kCompletions;
  // One for each prompt, alike in everything else; without request_id.
  std::vector<std::shared_ptr<ferry::v1::GenerateRequest>> prompts;
  TextRules text;
  uint32_t branches = 1;  // of each prompt
  bool stream = false;
  bool include_usage = false;             // in a stream
  chat::ReplyParser::Options reply = {};  // of chat
};

// What both APIs have alike is checked where it is for every front (CheckRequest); here the form
// is: JSON, types, members that there are not, values that cannot be served. Errors:
// kInvalidArgument naming the member and its value; kNotFound for the model of a chat.
absl::StatusOr<ApiRequest> ParseCompletionRequest(std::string_view body);
absl::StatusOr<ApiRequest> ParseChatRequest(std::string_view body, const ServedModels& models);

}  // namespace router::http

#endif  // ROUTER_HTTP_API_REQUEST_H_
