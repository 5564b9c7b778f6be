// Parsing a request's bytes with an error that names what is wrong.

#ifndef ROUTER_WIRE_PARSE_H_
#define ROUTER_WIRE_PARSE_H_

#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}

namespace router {

// Errors: kInvalidArgument; names the string field and the offset if a string is not UTF-8.
absl::Status ParseRequest(const std::string& bytes, google::protobuf::Message* message);

}  // namespace router

#endif  // ROUTER_WIRE_PARSE_H_
