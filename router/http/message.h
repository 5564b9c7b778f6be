// What goes over HTTP, without the bytes' form: a request that has been read, a response to write.
//
// Values only.

#ifndef ROUTER_HTTP_MESSAGE_H_
#define ROUTER_HTTP_MESSAGE_H_

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace router::http {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct Request {
  std::string method;
  std::string path;  // of the target, without scheme, host and query
  Headers headers;   // names in lower case
  std::string body;
  bool keep_alive = true;    // as the client asks for it
  bool takes_chunks = true;  // HTTP/1.1; else the end of a stream is the end of the connection

  // "" if it is not there.
  std::string_view Header(std::string_view lower_case_name) const {
    for (const auto& [name, value] : headers) {
      if (name == lower_case_name) return value;
    }
    return {};
  }
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  Headers headers = {};  // further ones; values without line breaks
  std::string body = {};
};

}  // namespace router::http

#endif  // ROUTER_HTTP_MESSAGE_H_
