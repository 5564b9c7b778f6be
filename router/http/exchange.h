// Exchange: one request and its response, as the code that answers sees it.  What answers lives on
// the connection's strand: every call is made there, except where it says otherwise, and so are the
// calls that it gets.  After the client has gone, or the response has ended, all calls do nothing.

#ifndef ROUTER_HTTP_EXCHANGE_H_
#define ROUTER_HTTP_EXCHANGE_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "router/http/message.h"

namespace router::http {

class Exchange {
 public:
  // Who wants to know what becomes of the response.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    // Before the response was taken.  Nothing is told after it.
    virtual void OnClientGone() = 0;
    // The client's side of the connection has taken all that was written.
    virtual void OnTaken() = 0;
  };

  virtual ~Exchange() = default;

  const Request& request() const { return request_; }
  // Once: a body may be large, and a response take long.  Any thread.
  std::string TakeBody() { return std::exchange(request_.body, {}); }
  // Kept until the response has been taken or the client has gone.
  virtual void Watch(std::shared_ptr<Watcher> watcher) = 0;

  // Runs `task` on the strand.  Any thread.
  virtual void Post(absl::AnyInvocable<void()> task) = 0;
  // The whole response.
  virtual void Respond(const Response& response) = 0;
  // A response whose body comes in parts (`head.body` is not used).  With `complete` false the body
  // ends because of a failure, and the connection with it.
  virtual void BeginStream(const Response& head) = 0;
  virtual void Write(std::string_view part) = 0;
  virtual void EndStream(bool complete) = 0;
  // Bytes written that the client has not taken.  Any thread.
  virtual size_t unsent_bytes() const = 0;

 protected:
  explicit Exchange(Request request) : request_(std::move(request)) {}

 private:
  Request request_;
};

// Answers requests: at once, or later on the exchange's strand.
using Handler = std::function<void(std::shared_ptr<Exchange>)>;

}  // namespace router::http

#endif  // ROUTER_HTTP_EXCHANGE_H_
