// A plain HTTP client for tests: one blocking connection, every byte under the test's control.
//
// Thread-compatible.

#ifndef TESTS_ROUTER_HTTP_HTTP_CLIENT_H_
#define TESTS_ROUTER_HTTP_HTTP_CLIENT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace router::http {

struct Reply {
  int status = 0;                              // 0: the connection ended before
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  bool complete = false;  // the body came to its own end

  nlohmann::json Json() const;  // discarded if it is none
  // The data of every server-sent event, and whether the last one is [DONE], which is not among
  // them.
  std::vector<nlohmann::json> Events() const;
  bool done() const;
};

class HttpClient final {
 public:
  explicit HttpClient(int port);
  HttpClient(HttpClient&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)),
        unread_(std::move(other.unread_)),
        ended_(other.ended_) {}
  ~HttpClient() { Close(); }

  void Send(const std::string& bytes);
  // POST (with a body) or GET.
  void Ask(const std::string& path, const std::string& body = "", const std::string& headers = "");
  // The next response; waits for all of it, a minute at most.
  Reply Read();
  // The response's head and its body until it holds `words`.
  Reply ReadUntil(const std::string& words);
  // Whether the server has closed the connection; waits for it or for more bytes.
  bool AtEnd();
  void Close();
  void LimitReceiveBuffer(int num_bytes);
  int fd() const { return fd_; }

 private:
  bool ReadMore();
  // False: more bytes are needed.
  bool Parse(Reply* reply, size_t* used) const;

  int fd_ = -1;
  std::string unread_;
  bool ended_ = false;
};

// One request on a connection of its own.
Reply Post(int port, const std::string& path, const std::string& body,
           const std::string& headers = "");
Reply Get(int port, const std::string& path, const std::string& headers = "");

}  // namespace router::http

#endif  // TESTS_ROUTER_HTTP_HTTP_CLIENT_H_
