// The backends over real connections to servers of this process.  Server and load run share a clock
// that only the server's delays move, and the server waits until each message has been seen: so
// what is measured is known to the microsecond.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cli/grpc_backend.h"
#include "cli/load_report.h"
#include "cli/load_run.h"
#include "cli/openai_backend.h"
#include "cli/sse_reader.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "service/grpc_server.h"
#include "status/check.h"
#include "tests/fakes/silent_server.h"

namespace cli {
namespace {

using testing::HasSubstr;

constexpr int kRequests = 20;
constexpr int kPromptTokens = 6;

class SharedClock final : public LoadClock {
 public:
  absl::Duration Now() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++num_reads_;
    read_.notify_all();
    return now_;
  }
  void SleepUntil(absl::Duration) override {}
  // Lets `ms` pass, sends a message, and waits until the other side has looked at the clock.
  void SendAfter(double ms, const std::function<void()>& send) {
    std::unique_lock<std::mutex> lock(mutex_);
    now_ += absl::Milliseconds(ms);
    const int64_t before = num_reads_;
    lock.unlock();
    send();
    lock.lock();
    read_.wait_for(lock, std::chrono::seconds(60), [&] { return num_reads_ > before; });
  }

 private:
  std::mutex mutex_;  // guards the fields below
  std::condition_variable read_;
  absl::Duration now_;
  int64_t num_reads_ = 0;
};

// The delays of the n-th request, and how many tokens come with each message.
std::vector<double> Delays(int number) {
  std::vector<double> delays = {200.0 + 10 * (number * 7 % 20)};
  for (int i = 0; i < 4; ++i) delays.push_back(5 + (number * 3 + i) % 11);
  return delays;
}
constexpr int kTokensOfMessage = 2;

struct Expected {
  double ttft = 0, tpot = 0, itl = 0, e2e = 0;  // means
};
Expected Means(int tokens_of_message) {
  Expected all;
  for (int number = 0; number < kRequests; ++number) {
    const std::vector<double> delays = Delays(number);
    double rest = 0;
    for (size_t i = 1; i < delays.size(); ++i) rest += delays[i];
    all.ttft += delays[0] / kRequests;
    all.e2e += (delays[0] + rest) / kRequests;
    all.itl += rest / 4 / kRequests;
    all.tpot += rest / (static_cast<double>(delays.size()) * tokens_of_message - 1) / kRequests;
  }
  return all;
}

LoadReport Measure(LoadBackend& backend, SharedClock& clock) {
  LoadProgress progress;
  const auto trace = MakeTrace({.num_conversations = kRequests,
                                .input = {kPromptTokens, kPromptTokens},
                                .output = {10, 10},
                                .vocab_size = 50});
  LoadResult result = RunLoad(*trace, {.seed = 1}, backend, clock, progress);
  LoadReport report;
  report.seconds = result.seconds;
  report.good = std::move(result.good);
  report.failures = std::move(result.failures);
  return report;
}

void ExpectMeans(const LoadReport& report, const Expected& expected) {
  ASSERT_EQ(report.good.size(), size_t{kRequests}) << report.Text();
  EXPECT_NEAR(report.Stats(&MeasuredRequest::ttft_ms).mean, expected.ttft, 1e-3);
  EXPECT_NEAR(report.Stats(&MeasuredRequest::tpot_ms).mean, expected.tpot, 1e-3);
  EXPECT_NEAR(report.InterTokenStats().mean, expected.itl, 1e-3);
  EXPECT_NEAR(report.Stats(&MeasuredRequest::e2e_ms).mean, expected.e2e, 1e-3);
  EXPECT_NEAR(report.seconds, expected.e2e * kRequests / 1e3, 1e-6);
}

class FakeRouter : public ferry::v1::Inference::Service {
 public:
  explicit FakeRouter(SharedClock& clock) : clock_(clock) {}
  grpc::Status Generate(grpc::ServerContext*, const ferry::v1::GenerateRequest* request,
                        grpc::ServerWriter<ferry::v1::GenerateResponse>* writer) override {
    EXPECT_EQ(request->tokens().ids_size(), kPromptTokens);
    EXPECT_TRUE(request->sampling().ignore_eos());
    for (const double ms : Delays(number_++)) {
      clock_.SendAfter(ms, [&] {
        ferry::v1::GenerateResponse response;
        for (int i = 0; i < kTokensOfMessage; ++i) response.add_token_ids(i);
        writer->Write(response);
      });
    }
    ferry::v1::GenerateResponse last;
    last.mutable_summary()->set_prompt_tokens(kPromptTokens);
    last.mutable_summary()->set_cached_tokens(3);
    last.mutable_summary()->set_kv_bytes(1000);
    writer->Write(last);
    return grpc::Status::OK;
  }
  grpc::Status ListModels(grpc::ServerContext*, const ferry::v1::ListModelsRequest*,
                          ferry::v1::ListModelsResponse* response) override {
    ferry::v1::ModelCard* card = response->add_models();
    card->set_name("m");
    card->set_vocab_size(50);
    card->set_ready_prefill_workers(1);
    card->set_ready_decode_workers(1);
    card->set_ready(true);
    return grpc::Status::OK;
  }

 private:
  SharedClock& clock_;
  int number_ = 0;  // one request at a time
};

TEST(LoadBackendTest, OverGrpc) {
  SharedClock clock;
  FakeRouter router(clock);
  const auto server = service::GrpcServer::Start("127.0.0.1:0", {}, {&router});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto backend =
      GrpcBackend::Connect({.client = {.address = absl::StrCat("127.0.0.1:", (*server)->port())},
                            .ready_timeout = absl::Seconds(60)});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ((*backend)->model().name(), "m");
  const LoadReport report = Measure(**backend, clock);
  ExpectMeans(report, Means(kTokensOfMessage));
  EXPECT_EQ(report.good[0].num_tokens, 10u);
  EXPECT_THAT(report.Text(),
              HasSubstr("prompt tokens from cache: measured 50.0 %, attainable 0.0 %\n"
                        "cache moved: 0.0 MB, for 20 of 20 requests\n"));
  EXPECT_EQ((*backend)->Send({.prompt = {.messages = "[]"}}, [](uint32_t) {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Sends one message and no more until the test is over.
class StallingRouter final : public FakeRouter {
 public:
  explicit StallingRouter(SharedClock& clock) : FakeRouter(clock) {}
  grpc::Status Generate(grpc::ServerContext*, const ferry::v1::GenerateRequest*,
                        grpc::ServerWriter<ferry::v1::GenerateResponse>* writer) override {
    ferry::v1::GenerateResponse response;
    response.add_token_ids(1);
    writer->Write(response);
    over.get_future().wait();
    return grpc::Status::OK;
  }
  std::promise<void> over;
};

TEST(LoadBackendTest, OverGrpcAnAnswerThatStallsIsGivenUp) {
  SharedClock clock;
  StallingRouter router(clock);
  const auto server = service::GrpcServer::Start("127.0.0.1:0", {}, {&router});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto backend =
      GrpcBackend::Connect({.client = {.address = absl::StrCat("127.0.0.1:", (*server)->port())},
                            .request_timeout = absl::Milliseconds(300)});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ(
      (*backend)->Send({.prompt = {.ids = {1}}, .output_tokens = 2}, [](uint32_t) {}).status(),
      absl::DeadlineExceededError("no end of the answer within 300ms (--request_timeout_s)"));
  router.over.set_value();
}

// An HTTP server of one connection at a time, each of one request; `answer` writes all of what
// comes back.
class FakeHttp final {
 public:
  using Send = std::function<void(const std::string&)>;
  using Answer = std::function<void(const std::string& head, const std::string& body, const Send&)>;

  explicit FakeHttp(Answer answer)
      : answer_(std::move(answer)), listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    FERRY_CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    FERRY_CHECK(listen(listener_, 16) == 0);
    FERRY_CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    url_ = absl::StrCat("http://127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeHttp() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  const std::string& url() const { return url_; }

 private:
  void Serve() {
    for (int connection; (connection = accept(listener_, nullptr, nullptr)) >= 0;
         close(connection)) {
      std::string text;
      size_t head = std::string::npos, length = 0;
      char piece[4096];
      while (head == std::string::npos || text.size() < head + 4 + length) {
        const ssize_t got = recv(connection, piece, sizeof(piece), 0);
        if (got <= 0) break;
        text.append(piece, static_cast<size_t>(got));
        head = text.find("\r\n\r\n");
        const size_t field = text.find("Content-Length: ");
        if (field < head) length = std::strtoul(text.c_str() + field + 16, nullptr, 10);
      }
      if (head == std::string::npos) continue;
      answer_(text.substr(0, head), text.substr(head + 4), [connection](const std::string& bytes) {
        send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      });
    }
  }

  const Answer answer_;
  const int listener_;
  std::string url_;
  std::thread thread_;
};

std::string Head(const std::string& status, const std::string& type) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                      "\r\nConnection: close\r\n\r\n");
}
const std::string kStream = Head("200 OK", "text/event-stream");
const std::string kModels = Head("200 OK", "application/json") + "{\"data\": [{\"id\": \"m\"}]}";

std::string Chunk(const std::string& choice) {
  return absl::StrCat("data: {\"choices\": [", choice, "]}\n\n");
}

TEST(LoadBackendTest, OverOpenAiHttp) {
  for (const bool tells_usage : {true, false}) {
    SharedClock clock;
    int number = 0;
    FakeHttp http([&](const std::string& head, const std::string& body,
                      const FakeHttp::Send& send) {
      if (head.rfind("GET /v1/models", 0) == 0) return send(kModels);
      EXPECT_EQ(head.rfind("POST /v1/completions", 0), 0u) << head;
      EXPECT_THAT(head, HasSubstr("Authorization: Bearer secret"));
      EXPECT_THAT(body, HasSubstr("\"ignore_eos\":true"));
      EXPECT_THAT(body, HasSubstr("\"max_tokens\":10"));
      send(kStream);
      for (const double ms : Delays(number++)) {
        clock.SendAfter(ms, [&] { send(": ping\n\n" + Chunk("{\"text\": \"a b\"}")); });
      }
      send(Chunk("{\"text\": \"\", \"finish_reason\": \"length\"}"));
      if (tells_usage) {
        send(
            "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 6, \"completion_tokens\": 10, "
            "\"prompt_tokens_details\": {\"cached_tokens\": 3}}}\n\n");
      }
      send("data: [DONE]\n\n");
    });
    const auto backend =
        OpenAiBackend::Connect({.base_url = http.url() + "/", .api_key = "secret"});
    ASSERT_TRUE(backend.ok()) << backend.status();
    const LoadReport report = Measure(**backend, clock);
    ExpectMeans(report, Means(tells_usage ? kTokensOfMessage : 1));
    EXPECT_THAT(report.Text(),
                HasSubstr(tells_usage ? "from cache: measured 50.0 %, attainable 0.0 %"
                                      : "does not count tokens: a message counts as one"));
  }
}

class OpenAiFailureTest : public testing::Test {
 protected:
  // What one request comes to when the server answers with `bytes`.
  static absl::Status Said(const std::string& bytes, const Prompt& prompt = {.ids = {1}}) {
    FakeHttp http([&](const std::string& head, const std::string&, const FakeHttp::Send& send) {
      send(head.rfind("GET ", 0) == 0 ? kModels : bytes);
    });
    const auto backend = OpenAiBackend::Connect({.base_url = http.url()});
    if (!backend.ok()) return backend.status();
    return (*backend)->Send({.prompt = prompt, .output_tokens = 2}, [](uint32_t) {}).status();
  }
};

TEST_F(OpenAiFailureTest, WhatTheServerSaysIsTheError) {
  EXPECT_EQ(Said(Head("429 Too Many Requests", "application/json") +
                 "{\"error\": {\"message\": \"queue full\"}}"),
            absl::ResourceExhaustedError("HTTP 429: queue full"));
  EXPECT_EQ(Said(Head("502 Bad Gateway", "text/html") + "<p>no</p>"),
            absl::InternalError("HTTP 502: <p>no</p>"));
  EXPECT_EQ(Said(kStream + Chunk("{\"text\": \"a\"}")),
            absl::DataLossError("the stream ended without [DONE]"));
  EXPECT_EQ(Said(kStream + "data: {\"error\": {\"message\": \"worker died\"}}\n\n"),
            absl::InternalError("in the stream: worker died"));
  EXPECT_EQ(Said(kStream + "data: x\n\n"), absl::DataLossError("an event is no JSON object: x"));
  EXPECT_EQ(Said("").code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Said(kStream + "data: " + std::string(SseReader::kMaxEventBytes, 'x')),
            absl::DataLossError("an event has more than 16777216 bytes"));
}

// The connection stays open: only the client's patience ends the request.
TEST_F(OpenAiFailureTest, AnAnswerThatStallsIsGivenUp) {
  for (const bool begun : {true, false}) {
    std::promise<void> given_up;
    FakeHttp http([&, over = given_up.get_future().share()](
                      const std::string& head, const std::string&, const FakeHttp::Send& send) {
      if (head.rfind("GET ", 0) == 0) return send(kModels);
      send(begun ? kStream + Chunk("{\"text\": \"a\"}") : kStream);
      over.wait();
    });
    const auto backend =
        OpenAiBackend::Connect({.base_url = http.url(),
                                .request_timeout = absl::Seconds(begun ? 600 : 1),
                                .stall_timeout = absl::Milliseconds(begun ? 10 : 1)});
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_EQ(
        (*backend)->Send({.prompt = {.ids = {1}}, .output_tokens = 2}, [](uint32_t) {}).status(),
        absl::DeadlineExceededError(
            begun ? "the answer stalled: no output for 10ms (--stall_timeout_s)"
                  : "no end of the answer within 1s (--request_timeout_s)"));
    given_up.set_value();
  }
}

TEST_F(OpenAiFailureTest, NumbersThatAreNoCountsOfTokensAreNotTold) {
  for (const std::string number :
       {"-5", "1e99", "0.5", "\"3\"", "null", "4294967297", "18446744073709551615"}) {
    const std::string usage =
        absl::StrCat("{\"prompt_tokens\": ", number, ", \"completion_tokens\": ", number, "}");
    FakeHttp http([&](const std::string& head, const std::string&, const FakeHttp::Send& send) {
      if (head.rfind("GET ", 0) == 0) return send(kModels);
      send(kStream + Chunk("{\"text\": \"a\"}") + "data: {\"choices\": [], \"usage\": " + usage +
           "}\n\ndata: [DONE]\n\n");
    });
    const auto backend = OpenAiBackend::Connect({.base_url = http.url()});
    ASSERT_TRUE(backend.ok()) << backend.status();
    const auto answer =
        (*backend)->Send({.prompt = {.ids = {1}}, .output_tokens = 2}, [](uint32_t) {});
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_FALSE(answer->prompt_tokens.has_value()) << number;
    EXPECT_FALSE(answer->output_tokens.has_value()) << number;
  }
}

TEST_F(OpenAiFailureTest, ChatGoesToItsOwnPath) {
  std::string path, sent;
  int outputs = 0;
  FakeHttp http([&](const std::string& head, const std::string& body, const FakeHttp::Send& send) {
    if (head.rfind("GET ", 0) == 0) return send(kModels);
    path = head.substr(0, head.find(" HTTP"));
    sent = body;
    send(kStream + Chunk("{\"delta\": {\"role\": \"assistant\", \"content\": \"\"}}") +
         Chunk("{\"delta\": {\"reasoning_content\": \"hm\"}}") +
         Chunk("{\"delta\": {\"content\": \"a\"}}") +
         Chunk("{\"delta\": {\"content\": null, \"tool_calls\": [{}]}}") + "data: [DONE]\n\n");
  });
  const auto backend = OpenAiBackend::Connect({.base_url = http.url() + "/v1", .model = "m"});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto answer =
      (*backend)->Send({.prompt = {.messages = "[{\"role\":\"user\"}]"}, .output_tokens = 2},
                       [&](uint32_t) { ++outputs; });
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(path, "POST /v1/chat/completions");
  EXPECT_THAT(sent, HasSubstr("\"messages\":[{\"role\":\"user\"}]"));
  EXPECT_EQ(outputs, 3);
  EXPECT_FALSE(answer->output_tokens.has_value());
}

TEST_F(OpenAiFailureTest, TheVocabularyIsTheModelsWhereItIsTold) {
  FakeHttp http([&](const std::string&, const std::string&, const FakeHttp::Send& send) {
    send(Head("200 OK", "application/json") +
         R"({"data": [{"id": "a", "vocab_size": 7}, {"id": "b", "vocab_size": 512}, {"id": "c"},
                      {"id": "d", "vocab_size": 0}, {"id": "e", "vocab_size": "512"}]})");
  });
  const auto vocab_size = [&](const std::string& model) -> std::optional<uint32_t> {
    const auto backend = OpenAiBackend::Connect({.base_url = http.url(), .model = model});
    EXPECT_TRUE(backend.ok()) << backend.status();
    return backend.ok() ? (*backend)->vocab_size() : std::nullopt;
  };
  EXPECT_EQ(vocab_size("a"), 7u);
  EXPECT_EQ(vocab_size("b"), 512u);
  for (const char* const model : {"c", "d", "e"}) EXPECT_EQ(vocab_size(model), std::nullopt);
}

// A server that starts: its proxy, then no model, then its own.
TEST_F(OpenAiFailureTest, AServerThatIsNotUpYetIsWaitedFor) {
  int asked = 0;
  FakeHttp http([&](const std::string&, const std::string&, const FakeHttp::Send& send) {
    const std::string answers[] = {"", Head("502 Bad Gateway", "text/html") + "no",
                                   Head("503 Service Unavailable", "application/json") + "{}",
                                   Head("200 OK", "application/json") + "{\"data\": []}"};
    send(asked < 4 ? answers[asked] : kModels);
    ++asked;
  });
  const auto backend =
      OpenAiBackend::Connect({.base_url = http.url(), .ready_timeout = absl::Seconds(60)});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ(asked, 5);
}

TEST_F(OpenAiFailureTest, WhatWaitingDoesNotMendIsToldAtOnce) {
  int asked = 0;
  FakeHttp http([&](const std::string&, const std::string&, const FakeHttp::Send& send) {
    ++asked;
    send(Head("401 Unauthorized", "application/json") + "{}");
  });
  EXPECT_EQ(OpenAiBackend::Connect({.base_url = http.url(), .ready_timeout = absl::Hours(1)})
                .status()
                .code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(asked, 1);
}

// The stream's end is [DONE], whatever the server does with the connection.
TEST_F(OpenAiFailureTest, AnAnswerIsWholeThoughItsBodyIsHeldOpen) {
  std::promise<void> answered;
  FakeHttp http([&, over = answered.get_future().share()](
                    const std::string& head, const std::string&, const FakeHttp::Send& send) {
    if (head.rfind("GET ", 0) == 0) return send(kModels);
    send(kStream + Chunk("{\"text\": \"a\"}") + "data: [DONE]\n\n");
    over.wait();
  });
  const auto backend = OpenAiBackend::Connect(
      {.base_url = http.url(), .request_timeout = absl::Hours(1), .stall_timeout = absl::Hours(1)});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto answer =
      (*backend)->Send({.prompt = {.ids = {1}}, .output_tokens = 2}, [](uint32_t) {});
  EXPECT_TRUE(answer.ok()) << answer.status();
  answered.set_value();
}

TEST_F(OpenAiFailureTest, ConnectingNamesWhatIsWrong) {
  const absl::Status nobody = OpenAiBackend::Connect({.base_url = "http://127.0.0.1:1",
                                                      .ready_timeout = absl::Milliseconds(10)})
                                  .status();
  EXPECT_EQ(nobody.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(nobody.message()), testing::StartsWith("http://127.0.0.1:1/v1/models: "));
  EXPECT_EQ(OpenAiBackend::Connect({.base_url = "file:///etc/passwd"}).status().code(),
            absl::StatusCode::kInvalidArgument);
  FakeHttp http(
      [&](const std::string&, const std::string&, const FakeHttp::Send& send) { send(kModels); });
  EXPECT_EQ(OpenAiBackend::Connect({.base_url = http.url(), .model = "x"}).status(),
            absl::NotFoundError(http.url() + "/v1 serves m: not x"));
  const fakes::SilentServer silent;
  EXPECT_EQ(OpenAiBackend::Connect(
                {.base_url = "http://" + silent.address(), .ready_timeout = absl::Milliseconds(50)})
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace cli
