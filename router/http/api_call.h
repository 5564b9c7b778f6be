// ApiCall: one request for completions or chat completions: its prompts go through FrontDoor, each
// as a Generation of its own, and their output becomes the response.
//
//   the connection's strand: reading the request (long ones: FrontDoor's pool), all of the answer
//   the router's loop:       what the generations say (ClientStream), which is posted to the strand
//
// A failure before the first output is a response with its status; later it is the stream's last
// event.  One prompt's failure is the request's, and names the prompt: the others are cancelled; if
// it is found wrong at the door, none of them runs.

#ifndef ROUTER_HTTP_API_CALL_H_
#define ROUTER_HTTP_API_CALL_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "router/front_door.h"
#include "router/http/api_request.h"
#include "router/http/exchange.h"

namespace router::http {

// A client's name for its request, x-request-id.
absl::Status CheckRequestId(const std::string& id);

// On the exchange's strand.  `door` must outlive the exchange.  `tenant`: whose request it is.
void StartApiCall(Api api, FrontDoor* door, const std::string& tenant,
                  std::shared_ptr<Exchange> exchange);

}  // namespace router::http

#endif  // ROUTER_HTTP_API_CALL_H_
