// A router over fake workers, as RouterFixture has it, with its HTTP front on port 0.

#ifndef TESTS_ROUTER_HTTP_HTTP_FIXTURE_H_
#define TESTS_ROUTER_HTTP_HTTP_FIXTURE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "router/http/http_front.h"
#include "steady_time/steady_time.h"
#include "tests/router/http/http_client.h"
#include "tests/router/router_fixture.h"

namespace router::http {

inline constexpr char kCompletions[] = "/v1/completions";
inline constexpr char kHi[] = R"({"prompt": "say hi", "seed": 7})";
inline constexpr char kHiStream[] = R"({"prompt": "say hi", "stream": true})";

class HttpFixture : public RouterFixture {
 protected:
  HttpFixture() { http_options_.server.listen = "127.0.0.1:0"; }
  ~HttpFixture() override { front_.reset(); }

  // After all workers have been added.
  void StartHttp() {
    StartRouter();
    auto front = HttpFront::Start(http_options_, door_.get(), metrics_);
    ASSERT_TRUE(front.ok()) << front.status();
    front_ = std::move(*front);
  }
  int port() const { return front_->port(); }
  Reply Post(const std::string& path, const std::string& body, const std::string& headers = "") {
    return http::Post(port(), path, body, headers);
  }
  Reply Get(const std::string& path, const std::string& headers = "") {
    return http::Get(port(), path, headers);
  }
  // The first reply that `condition` holds for; the last one, if none does for 20 s.
  Reply GetUntil(const std::string& path, const std::function<bool(const Reply&)>& condition) {
    const absl::Time deadline = steady_time::Now() + absl::Seconds(20);
    for (;;) {
      Reply reply = Get(path);
      if (condition(reply) || steady_time::Now() > deadline) return reply;
    }
  }
  // The error's message; "" unless the reply is an error in OpenAI's form.  Wherever a worker is,
  // no client is told.
  std::string ErrorOf(const Reply& reply) const {
    ExpectNoAddressIn(reply.body);
    const nlohmann::json body = reply.Json();
    if (body.is_discarded() || !body.contains("error")) return "";
    return body["error"].value("message", "");
  }

  void ExpectNoAddressIn(const std::string& body) const {
    for (const auto& worker : workers_) {
      EXPECT_EQ(body.find(worker->address()), std::string::npos) << body;
      EXPECT_EQ(body.find(absl::StrCat(":", worker->port())), std::string::npos) << body;
    }
  }

  HttpFront::Options http_options_;
  std::unique_ptr<HttpFront> front_;
};

}  // namespace router::http

#endif  // TESTS_ROUTER_HTTP_HTTP_FIXTURE_H_
