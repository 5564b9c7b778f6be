// The members that requests for completions and for chat completions have alike.
//
// Stateless functions.

#ifndef ROUTER_HTTP_SAMPLING_MEMBERS_H_
#define ROUTER_HTTP_SAMPLING_MEMBERS_H_

#include "ferry/v1/inference.pb.h"
#include "router/http/api_request.h"
#include "router/http/json_body.h"

namespace router::http {

// Reads everything but the prompt and the log-probabilities; errors stay in `members`.
void ReadCommonMembers(Members* members, ApiRequest* api, ferry::v1::GenerateRequest* request);

}  // namespace router::http

#endif  // ROUTER_HTTP_SAMPLING_MEMBERS_H_
