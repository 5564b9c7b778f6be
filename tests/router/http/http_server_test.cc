// The server's own matters: bytes, limits, times, connections, TLS.

#include "router/http/http_server.h"

#include <sys/socket.h>
#include <sys/wait.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/http/http_client.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router::http {
namespace {

using testing::HasSubstr;

// Answers "/echo" with the request's body, "/wait" when the test says so.
class HttpServerTest : public testing::Test, public Exchange::Watcher {
 protected:
  HttpServerTest() {
    options_.listen = "127.0.0.1:0";
    options_.error_body = [](int status, const std::string& message) {
      return absl::StrCat(status, " ", message);
    };
  }
  ~HttpServerTest() override {
    waiting_.clear();
    server_.reset();
  }

  void Start() {
    auto server = HttpServer::Start(options_, [this](std::shared_ptr<Exchange> exchange) {
      if (exchange->request().path == "/wait") {
        exchange->Watch(std::shared_ptr<Exchange::Watcher>(this, [](auto*) {}));
        const std::lock_guard lock(mutex_);
        waiting_.push_back(std::move(exchange));
        changed_.notify_all();
      } else {
        exchange->Respond({.content_type = "text/plain", .body = exchange->TakeBody()});
      }
    });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = std::move(*server);
  }
  int port() const { return server_->port(); }

  void OnClientGone() override {
    const std::lock_guard lock(mutex_);
    ++num_gone_;
    changed_.notify_all();
  }
  void OnTaken() override {
    const std::lock_guard lock(mutex_);
    ++num_taken_;
    changed_.notify_all();
  }
  template <typename Condition>
  bool WaitFor(Condition condition) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30), condition);
  }
  std::shared_ptr<Exchange> TakeWaiting() {
    EXPECT_TRUE(WaitFor([this] { return !waiting_.empty(); }));
    const std::lock_guard lock(mutex_);
    auto exchange = std::move(waiting_.front());
    waiting_.erase(waiting_.begin());
    return exchange;
  }

  ServerOptions options_;
  std::mutex mutex_;  // guards what follows, up to the server
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Exchange>> waiting_;
  int num_gone_ = 0;
  int num_taken_ = 0;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AConnectionServesOneRequestAfterTheOther) {
  Start();
  HttpClient client(port());
  for (const char* const body : {"one", "two"}) {
    client.Ask("/echo", body);
    const Reply reply = client.Read();
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body, body);
    EXPECT_EQ(reply.headers.at("connection"), "keep-alive");
  }
  EXPECT_EQ(server_->num_connections(), 1);
  client.Ask("/echo", "three", "Connection: close\r\n");
  EXPECT_EQ(client.Read().headers.at("connection"), "close");
  EXPECT_TRUE(client.AtEnd());
}

TEST_F(HttpServerTest, RequestsSentAheadAreAnsweredInTheirOrder) {
  Start();
  HttpClient client(port());
  client.Ask("/wait");
  client.Ask("/echo", "a");
  client.Ask("/echo", std::string(300000, 'b'));
  const auto first = TakeWaiting();
  first->Post([first] { first->Respond({.body = "first"}); });
  EXPECT_EQ(client.Read().body, "first");
  EXPECT_EQ(client.Read().body, "a");
  EXPECT_EQ(client.Read().body, std::string(300000, 'b')) << "more than is read ahead";
  EXPECT_EQ(num_gone_, 0);
}

TEST_F(HttpServerTest, AClientThatWaitsBeforeItsBodyIsToldToGoOn) {
  Start();
  HttpClient client(port());
  client.Send(
      "POST /echo HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n");
  EXPECT_EQ(client.Read().status, 100);
  client.Send("abc");
  EXPECT_EQ(client.Read().body, "abc");
}

TEST_F(HttpServerTest, AHeadIsAnsweredWithoutABody) {
  Start();
  HttpClient client(port());
  client.Send(
      "HEAD /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabcGET /echo HTTP/1.1\r\nhost: "
      "a\r\n"
      "connection: close\r\n\r\n");
  std::string all;
  char buffer[1000];
  for (ssize_t n; (n = recv(client.fd(), buffer, sizeof(buffer), 0)) > 0;) all.append(buffer, n);
  EXPECT_THAT(all, HasSubstr("content-length: 3\r\n"));
  EXPECT_EQ(all.find("abc"), std::string::npos);
}

TEST_F(HttpServerTest, ARefusedHeadGetsNoBodyEither) {
  options_.limits.body_bytes = 2000;
  options_.refuse = [](const Request& header) -> std::optional<Response> {
    if (header.path != "/refused") return std::nullopt;
    return Response{.status = 404, .body = "no such thing"};
  };
  Start();
  for (const auto& [head, status] :
       {std::pair{"/refused HTTP/1.1\r\nhost: a\r\ncontent-length: 3", "404"},
        std::pair{"/echo HTTP/1.1", "400"},
        std::pair{"/echo HTTP/1.1\r\nhost: a\r\ncontent-length: 9999", "413"}}) {
    HttpClient client(port());
    client.Send(absl::StrCat("HEAD ", head, "\r\n\r\n"));
    std::string all;
    char buffer[1000];
    for (ssize_t n; (n = recv(client.fd(), buffer, sizeof(buffer), 0)) > 0;) all.append(buffer, n);
    EXPECT_THAT(all, testing::StartsWith(absl::StrCat("HTTP/1.1 ", status)));
    EXPECT_THAT(all, testing::EndsWith("connection: close\r\n\r\n")) << all;
  }
}

TEST_F(HttpServerTest, EveryConnectionIsToldOfWhenItOpensAndWhenItCloses) {
  int open = 0;
  options_.on_connection = [&](int change) {
    const std::lock_guard lock(mutex_);
    open += change;
    changed_.notify_all();
  };
  Start();
  {
    HttpClient first(port());
    HttpClient second(port());
    EXPECT_TRUE(WaitFor([&] { return open == 2; }));
  }
  EXPECT_TRUE(WaitFor([&] { return open == 0; }));
}

TEST_F(HttpServerTest, BadBytesGetAnErrorAndTheEnd) {
  options_.limits = {.header_bytes = 1000, .body_bytes = 2000};
  Start();
  const std::pair<std::string, int> cases[] = {
      {"hello there\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\n\r\n", 400},
      {absl::StrCat("GET / HTTP/1.1\r\nhost: a\r\nx: ", std::string(100000, 'x')), 431},
      {"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n", 413},
      {absl::StrCat("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n",
                    std::string(100000, 'x')),
       413}};
  for (const auto& [bytes, status] : cases) {
    HttpClient client(port());
    client.Send(bytes);
    const Reply reply = client.Read();
    EXPECT_EQ(reply.status, status) << bytes.substr(0, 60);
    EXPECT_EQ(reply.body.substr(0, 4), absl::StrCat(status, " ")) << reply.body;
    EXPECT_EQ(reply.headers.at("connection"), "close");
    EXPECT_TRUE(client.AtEnd());
  }
}

TEST_F(HttpServerTest, SlowRequestsGet408) {
  options_.header_time = options_.body_time = absl::Milliseconds(300);
  Start();
  HttpClient silent(port());
  HttpClient header(port());
  HttpClient body(port());
  header.Send("GET / HTTP/1.1\r\nhost: ");
  body.Send("POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\na");
  EXPECT_EQ(header.Read().status, 408);
  EXPECT_EQ(body.Read().status, 408);
  EXPECT_TRUE(silent.AtEnd()) << "who asks nothing is told nothing";
  // Slow bytes do not buy time (a byte each tenth of the limit, until it is over).
  HttpClient drip(port());
  bool over = false;  // under mutex_
  drip.Send("GET / HTTP/1.1\r\nhost: ");
  std::thread dripping([&] {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(30), [&] { return over; })) {
      drip.Send("x");
    }
  });
  EXPECT_EQ(drip.Read().status, 408);
  {
    const std::lock_guard lock(mutex_);
    over = true;
  }
  changed_.notify_all();
  dripping.join();
}

TEST_F(HttpServerTest, IdleConnectionsEnd) {
  options_.idle = absl::Milliseconds(200);
  Start();
  HttpClient client(port());
  client.Ask("/echo", "a");
  EXPECT_EQ(client.Read().body, "a");
  EXPECT_TRUE(client.AtEnd());
}

TEST_F(HttpServerTest, AResponseThatNobodyTakesEnds) {
  options_.write_stall = absl::Milliseconds(300);
  Start();
  HttpClient client(port());
  client.LimitReceiveBuffer(4096);
  client.Ask("/wait");
  const auto exchange = TakeWaiting();
  exchange->Post([exchange] {
    exchange->BeginStream({.content_type = "text/plain"});
    exchange->Write(std::string(16 << 20, 'x'));
  });
  EXPECT_TRUE(WaitFor([this] { return num_gone_ == 1; }));
}

TEST_F(HttpServerTest, AClientThatLeavesIsNoticedAndCallsDoNothingThen) {
  Start();
  {
    HttpClient client(port());
    client.Ask("/wait");
    const auto exchange = TakeWaiting();
    client.Close();
    ASSERT_TRUE(WaitFor([this] { return num_gone_ == 1; }));
    std::atomic<bool> ran{false};
    exchange->Post([exchange, &ran] {
      exchange->BeginStream({});
      exchange->Write("x");
      exchange->EndStream(true);
      exchange->Respond({});
      ran = true;
      ran.notify_all();
    });
    ran.wait(false);
    EXPECT_EQ(exchange->unsent_bytes(), 0u);
  }
  EXPECT_EQ(num_gone_, 1);
}

TEST_F(HttpServerTest, PartsOfAStreamComeAsTheyAreWritten) {
  Start();
  HttpClient client(port());
  client.Ask("/wait");
  const auto exchange = TakeWaiting();
  exchange->Post([exchange] {
    exchange->BeginStream({.content_type = "text/plain"});
    exchange->Write("one");
    exchange->Write("");  // no chunk: it would be the last one
  });
  EXPECT_EQ(client.ReadUntil("one").body, "one");
  EXPECT_TRUE(WaitFor([this] { return num_taken_ > 0; }));
  exchange->Post([exchange] {
    exchange->Write(" two");
    exchange->EndStream(/*complete=*/true);
  });
  const Reply reply = client.Read();
  EXPECT_EQ(reply.body, "one two");
  EXPECT_TRUE(reply.complete);
  client.Ask("/echo", "again");
  EXPECT_EQ(client.Read().body, "again");
  client.Ask("/wait");
  const auto failing = TakeWaiting();
  failing->Post([failing] {
    failing->BeginStream({});
    failing->EndStream(/*complete=*/false);
  });
  client.Read();
  EXPECT_TRUE(client.AtEnd()) << "a stream that has failed ends its connection";
}

TEST_F(HttpServerTest, ConnectionsAboveTheLimitGet503) {
  options_.max_connections = 2;
  Start();
  HttpClient first(port());
  HttpClient second(port());
  for (HttpClient* const client : {&first, &second}) {
    client->Ask("/echo", "a");
    EXPECT_EQ(client->Read().body, "a");
  }
  HttpClient third(port());
  const Reply reply = third.Read();
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.body, "503 2 connections are open, no more");
  first.Ask("/echo", "b");
  EXPECT_EQ(first.Read().body, "b");
}

TEST_F(HttpServerTest, ShutdownLetsResponsesEnd) {
  Start();
  HttpClient busy(port());
  busy.Ask("/wait");
  HttpClient stuck(port());
  auto exchange = TakeWaiting();
  HttpClient idle(port());
  idle.Ask("/echo", "a");
  EXPECT_EQ(idle.Read().body, "a");
  std::thread shutdown([this] { server_->Shutdown(absl::Seconds(30)); });
  // Connections are told in their order: when this one has ended the busy one knows.
  EXPECT_TRUE(idle.AtEnd());
  exchange->Post([exchange] { exchange->Respond({.body = "done"}); });
  exchange.reset();
  const Reply reply = busy.Read();
  EXPECT_EQ(reply.body, "done");
  EXPECT_EQ(reply.headers.at("connection"), "close");
  busy.Close();
  shutdown.join();
  EXPECT_EQ(server_->num_connections(), 0);
}

TEST_F(HttpServerTest, ShutdownEndsWhatDoesNotEnd) {
  Start();
  HttpClient busy(port());
  busy.Ask("/wait");
  TakeWaiting();  // and lets go of it
  server_->Shutdown(absl::Milliseconds(10));
  EXPECT_EQ(busy.Read().status, 0);
  EXPECT_EQ(num_gone_, 1);
}

// The server waits for an exchange that somebody still holds: letting go of it must not touch the
// server that ends with it.
TEST_F(HttpServerTest, AnExchangeMayBeLetGoOfWhileTheServerEnds) {
  for (int round = 1; round <= 500; ++round) {
    Start();
    HttpClient client(port());
    client.Ask("/wait");
    std::shared_ptr<Exchange> held = TakeWaiting();
    std::thread holder([&] {
      EXPECT_TRUE(WaitFor([&] { return num_gone_ == round; }));
      for (int i = 0; i < round; ++i) std::this_thread::yield();  // every time a little later
      held.reset();
    });
    server_.reset();
    holder.join();
  }
}

TEST_F(HttpServerTest, WhatCannotBeListenedOnIsNamed) {
  Start();
  ServerOptions same = options_;
  same.listen = absl::StrCat("127.0.0.1:", port());
  EXPECT_THAT(std::string(HttpServer::Start(same, {}).status().message()),
              HasSubstr(absl::StrCat("cannot listen on ", same.listen)));
  same.listen = "127.0.0.1:0";
  same.tls = {.cert_file = "/nowhere/cert.pem", .key_file = "/nowhere/key.pem", .ca_file = ""};
  EXPECT_THAT(std::string(HttpServer::Start(same, {}).status().message()),
              HasSubstr("/nowhere/cert.pem"));
}

// Exit code and output of a shell command.
std::pair<int, std::string> Shell(const std::string& command) {
  FILE* const pipe = popen((command + " 2>&1").c_str(), "r");
  std::string output;
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) output.append(buffer, n);
  return {WEXITSTATUS(pclose(pipe)), output};
}

TEST_F(HttpServerTest, TlsWithAndWithoutClientCertificates) {
  const tokenizer::TempDir dir;
  const std::string path = dir.path();
  const auto made = Shell(absl::StrCat(
      "cd ", path,
      " && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
      "/CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"));
  ASSERT_EQ(made.first, 0) << made.second;
  options_.tls = {.cert_file = path + "/cert.pem", .key_file = path + "/key.pem", .ca_file = ""};
  Start();
  const auto curl = [&](const std::string& flags) {
    return Shell(absl::StrCat("curl -sS --max-time 30 --cacert ", path, "/cert.pem ", flags,
                              " https://127.0.0.1:", port(), "/echo -d hello"));
  };
  EXPECT_EQ(curl(""), (std::pair<int, std::string>{0, "hello"}));
  EXPECT_EQ(curl("--http1.0"), (std::pair<int, std::string>{0, "hello"}));
  EXPECT_EQ(Post(port(), "/echo", "plain").status, 0) << "a client without TLS";

  server_.reset();
  options_.tls.ca_file = path + "/cert.pem";
  Start();
  EXPECT_NE(curl("").first, 0) << "a certificate is demanded";
  EXPECT_EQ(curl(absl::StrCat("--cert ", path, "/cert.pem --key ", path, "/key.pem")),
            (std::pair<int, std::string>{0, "hello"}));
}

}  // namespace
}  // namespace router::http
