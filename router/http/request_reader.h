// RequestReader: the bytes of a connection, as they arrive, become requests (HTTP/1.0 and 1.1).
// Limits hold for what is kept, not for what is claimed.
//
// Thread-compatible.

#ifndef ROUTER_HTTP_REQUEST_READER_H_
#define ROUTER_HTTP_REQUEST_READER_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "router/http/message.h"

namespace router::http {

// A request that cannot be read: the connection cannot be read any further.
struct BadRequest {
  int status = 400;
  std::string message;
};

class RequestReader final {
 public:
  struct Limits {
    size_t header_bytes = size_t{32} << 10;  // request line included
    size_t body_bytes = size_t{32} << 20;
  };
  enum class Stage {
    kIdle,      // nothing of the next request has come
    kHeader,    // its header is not complete
    kBody,      // its body is not complete
    kComplete,  // Take() it
  };

  explicit RequestReader(const Limits& limits);
  ~RequestReader();

  // Keeps bytes for Read.
  void Append(std::string_view bytes) { unread_.append(bytes); }
  size_t unread_bytes() const { return unread_.size(); }
  // Reads on as far as the bytes go, at most to the end of one request.
  std::optional<BadRequest> Read();
  Stage stage() const { return stage_; }
  // True once, when the client waits for "100 Continue" before it sends the body.
  bool TakeExpectation();
  // Whether the request under way, as far as it was read, asks for the head of a response only.
  bool is_head() const;
  // Of the request under way, as far as it was read.  "" if it is not there once.
  std::string_view HeaderSoFar(std::string_view lower_case_name) const;
  // What is known before the body.  REQUIRES: stage() is kBody or kComplete.
  Request Header() const;
  // REQUIRES: stage() is kComplete.  Then the next request begins.
  Request Take();

 private:
  class Parser;
  std::optional<BadRequest> CheckHeader();

  const Limits limits_;
  std::string unread_;
  std::unique_ptr<Parser> parser_;
  Stage stage_ = Stage::kIdle;
  bool expects_continue_ = false;
};

}  // namespace router::http

#endif  // ROUTER_HTTP_REQUEST_READER_H_
