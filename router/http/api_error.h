// Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}.
//
// Stateless functions.

#ifndef ROUTER_HTTP_API_ERROR_H_
#define ROUTER_HTTP_API_ERROR_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "router/http/message.h"

namespace router::http {

// serving.md 3.5: what a client can do about it decides.  Workers that are there but do not fit
// each other are as good as away (its edge E18): 503, so that whoever stands before several routers
// asks another one, and a client comes back after the upgrade that brought them together.
int HttpStatusOf(const absl::Status& status);

// The JSON of `message` under an HTTP status.  What the message is about ("temperature is ...")
// becomes `param`.
std::string ErrorBody(int http_status, const std::string& message);

// `status` of one of several prompts, in words that name it: "prompt[1] has ...".  What any of
// them, or all together, would have met stays as it is: a full queue, a tenant's limit, no worker.
absl::Status OfPrompt(size_t index, const absl::Status& status);

// What a log may say of an error in a request's body: which member it is about.  Its value, which
// the client is told, may be a prompt.
absl::Status ForLog(const absl::Status& status);

// The whole response for a request that failed with `status`, in the words that are for the public:
// 429 and 503 with Retry-After, whole seconds.
Response ErrorResponse(const absl::Status& status);
// The same as the last event of a stream.
std::string ErrorEvent(const absl::Status& status);

}  // namespace router::http

#endif  // ROUTER_HTTP_API_ERROR_H_
