// OpenAI's API against fake workers: what is refused, what fails, and clients that leave.

#include <atomic>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/router/http/http_fixture.h"

namespace router::http {
namespace {

using fakes::FakeWorker;
using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;

TEST_F(HttpFixture, RefusalsAreInOpenAisForm) {
  Decode();
  StartHttp();
  const auto expect = [&](const std::string& body, int status, const std::string& message,
                          const json& param) {
    const Reply reply = Post(kCompletions, body);
    EXPECT_EQ(reply.status, status) << body;
    EXPECT_EQ(ErrorOf(reply), message);
    EXPECT_EQ(reply.Json()["error"]["param"], param) << message;
    EXPECT_EQ(reply.headers.count("x-request-id"), 1u);
  };
  expect(R"({"prompt": "x", "temperature": -1})", 400,
         "temperature is -1: must be a finite number >= 0", "temperature");
  expect(R"({"prompt": "x", "top_p": 1.5})", 400, "top_p is 1.5: must be in (0, 1]", "top_p");
  expect(R"({"prompt": "x", "n": 17})", 400, "n is 17: must be an integer of 1 to 16", "n");
  expect(R"({"prompt": "x", "max_tokens": 0})", 400,
         "max_tokens is 0: must be an integer of 1 to 2147483647", "max_tokens");
  expect(R"({"prompt": "x", "stop": ["a", ""]})", 400,
         "stop[1] is \"\": must be a string of at least one character", "stop[1]");
  expect(R"({"prompt": [5, 300]})", 400, "prompt[1] is 300: must be below the vocabulary size, 300",
         "prompt[1]");
  expect(R"({"prompt": ""})", 400, "prompt text is empty", "prompt");
  expect(R"({"prompt": "x", "max_tokens": 4096})", 400,
         "max_tokens is 4096: with a prompt of 1 tokens the context of 4096 is passed",
         "max_tokens");
  expect(R"({"prompt": "x", "model": "other"})", 404,
         "model \"other\" is not served here; served: m", "model");
  EXPECT_EQ(Post(kCompletions, R"({"prompt": "x", "model": "other"})").Json()["error"]["code"],
            "model_not_found");
  for (const auto& [id, why] :
       {std::pair{
            std::string("two words"),
            "x-request-id \"two words\" has a character that is not printable ASCII, or a space"},
        std::pair{std::string("caf\xc3\xa9"),
                  "x-request-id \"caf\\xc3\\xa9\" has a character that is not printable ASCII, or "
                  "a space"},
        std::pair{std::string(124, 'i'), "x-request-id has 124 characters: at most 123"}}) {
    const Reply bad_id = Post(kCompletions, kHi, absl::StrCat("X-Request-Id: ", id, "\r\n"));
    EXPECT_EQ(bad_id.status, 400);
    EXPECT_EQ(ErrorOf(bad_id), why);
    EXPECT_THAT(bad_id.headers.at("x-request-id"), testing::MatchesRegex("[0-9a-f]{32}"))
        << "a name that the logs have, not what was sent";
  }
  const Reply longest = Post(kCompletions, R"({"prompt": ["a", "b"]})",
                             absl::StrCat("X-Request-Id: ", std::string(123, 'i'), "\r\n"));
  EXPECT_EQ(longest.status, 200) << longest.body;
  const Reply chat =
      Post("/v1/chat/completions", R"({"messages": [{"role": "user", "content": "x"}]})");
  EXPECT_EQ(chat.status, 400);
  EXPECT_EQ(ErrorOf(chat), "model m: chat is not available, only completions are");
  const Reply nowhere = Get("/v2/completions");
  EXPECT_EQ(nowhere.status, 404);
  EXPECT_EQ(ErrorOf(nowhere), "there is nothing at /v2/completions");
  const Reply method = Get(kCompletions);
  EXPECT_EQ(method.status, 405);
  EXPECT_EQ(method.headers.at("allow"), "POST");
  EXPECT_EQ(Post("/health", "{}").status, 405);
}

TEST_F(HttpFixture, ARequestsNameComesBackWithEveryAnswer) {
  Decode();
  http_options_.server.limits = {.header_bytes = 1000, .body_bytes = 2000};
  StartHttp();
  const auto post = [](const std::string& path, const std::string& more) {
    return absl::StrCat("POST ", path, " HTTP/1.1\r\nhost: a\r\n", more);
  };
  const std::string much = "content-length: 100000\r\n";
  const std::pair<std::string, int> cases[] = {
      {"GET /health HTTP/1.1\r\nhost: a\r\n", 200},
      {"GET /v1/completions HTTP/1.1\r\nhost: a\r\n", 405},
      {post("/v2", "content-length: 3\r\n"), 404},
      {post(kCompletions, "x-ferry-tenant: a\r\ncontent-length: 3\r\n"), 403},
      {post(kCompletions, "content-length: 0\r\n"), 400},
      {post(kCompletions, "content-encoding: gzip\r\ncontent-length: 3\r\n"), 415}};
  for (const auto& [bytes, status] : cases) {
    for (const auto& [id, returned] : {std::pair{"mine", 1}, std::pair{"not mine", 0}}) {
      HttpClient client(port());
      client.Send(absl::StrCat(bytes, "x-request-id: ", id, "\r\n\r\n"));
      const Reply reply = client.Read();
      EXPECT_EQ(reply.status, status) << bytes;
      const auto it = reply.headers.find("x-request-id");
      EXPECT_EQ(it != reply.headers.end() && it->second == id, returned == 1) << bytes << id;
    }
  }
  for (const std::string& ids : {std::string("x-request-id: a\r\n"), std::string()}) {
    HttpClient client(port());
    client.Send(absl::StrCat(post(kCompletions, much), ids, "x-request-id: b\r\n\r\n"));
    const Reply reply = client.Read();
    EXPECT_EQ(reply.status, 413);
    EXPECT_EQ(reply.headers.count("x-request-id"), ids.empty() ? 1u : 0u) << "which of two?";
  }
}

TEST_F(HttpFixture, StatusesFollowTheContract) {
  FakeWorker* const decode = Decode();
  options_.max_attempts = 1;
  std::atomic<int> which{0};
  const absl::Status statuses[] = {absl::InternalError("broken"),
                                   absl::InvalidArgumentError("bad")};
  decode->on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->End(statuses[which]);
  };
  options_.default_deadline = absl::Seconds(30);
  StartHttp();
  const Reply broken = Post(kCompletions, kHiStream);
  EXPECT_EQ(broken.status, 500) << "before the first token a stream's error is a status";
  EXPECT_EQ(ErrorOf(broken), "a worker failed");
  EXPECT_EQ(broken.Json()["error"]["type"], "server_error");
  which = 1;
  EXPECT_EQ(Post(kCompletions, kHi).status, 400);
  decode->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 0));
  const Reply away = Post(kCompletions, kHi);
  EXPECT_EQ(away.status, 503) << away.body;
  EXPECT_EQ(away.headers.count("retry-after"), 1u);
  EXPECT_EQ(away.Json()["error"]["type"], "service_unavailable_error");
}

TEST_F(HttpFixture, ADeadlineIs504AndAFullQueue429) {
  Decode()->on_decode = [](std::shared_ptr<fakes::DecodeCall> call) { call->Accept(); };
  options_.default_deadline = absl::Milliseconds(500);
  options_.max_queue_bytes = 3000;  // of two small requests
  StartHttp();
  const Reply late = Post(kCompletions, kHi);
  EXPECT_EQ(late.status, 504) << late.body;
  EXPECT_EQ(late.Json()["error"]["type"], "timeout_error");
  workers_[0]->SetState(ferry::v1::WORKER_STATE_DRAINING);
  ASSERT_TRUE(WaitForWorkers(0, 0));
  std::vector<HttpClient> waiting;
  for (int i = 0; i < 5; ++i) waiting.emplace_back(port()).Ask(kCompletions, kHi);
  int refused = 0;
  for (HttpClient& client : waiting) {
    const Reply reply = client.Read();
    EXPECT_TRUE(reply.status == 429 || reply.status == 503 || reply.status == 504) << reply.body;
    if (reply.status != 429) continue;
    ++refused;
    EXPECT_EQ(reply.headers.count("retry-after"), 1u);
    EXPECT_EQ(reply.Json()["error"]["code"], "rate_limit_exceeded");
  }
  EXPECT_GE(refused, 2);
}

TEST_F(HttpFixture, AFailureAfterTheFirstTokenIsTheStreamsLastEvent) {
  options_.max_migrations = 0;
  Decode()->on_decode = [](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "ab");
    call->End(absl::InternalError("the device is gone"));
  };
  StartHttp();
  HttpClient client(port());
  client.Ask(kCompletions, kHiStream);
  const Reply reply = client.Read();
  EXPECT_EQ(reply.status, 200);
  const auto events = reply.Events();
  ASSERT_EQ(events.size(), 2u) << reply.body;
  EXPECT_EQ(events[0]["choices"][0]["text"], "ab");
  EXPECT_EQ(events[1]["error"]["message"], "a worker failed");
  EXPECT_FALSE(reply.done());
  EXPECT_TRUE(client.AtEnd());
  const Reply whole = Post(kCompletions, kHi);
  EXPECT_EQ(whole.status, 500) << "an answer that is not whole is none: " << whole.body;
}

TEST_F(HttpFixture, ClientsThatLeaveAreCancelledAtBothWorkers) {
  FakeWorker* const prefill = Prefill();
  FakeWorker* const decode = Decode();
  prefill->on_prefill = [](std::shared_ptr<fakes::PrefillCall> call) {
    call->Accept();
    call->Started();
  };
  StartHttp();
  const std::string ids = json{{"prompt", std::vector<int>(200, 5)}}.dump();
  for (const std::string& body : {ids, std::string(R"({"stream": true, )" + ids.substr(1))}) {
    const size_t before = decode->cancels().size();
    const size_t open = prefill->prefills().size();
    HttpClient client(port());
    client.Ask(kCompletions, body);
    ASSERT_TRUE(prefill->WaitFor([&] { return prefill->prefills().size() == open + 1; }));
    client.Close();
    EXPECT_TRUE(decode->WaitFor([&] { return decode->cancels().size() > before; }));
    EXPECT_TRUE(prefill->WaitFor([&] { return prefill->cancels().size() > before; }));
    EXPECT_TRUE(IsIdle());
  }
}

TEST_F(HttpFixture, ASlowReaderHoldsItsWorkerBackAndIsCutOff) {
  http_options_.server.write_stall = absl::Seconds(1);
  FakeWorker* const decode = Decode();
  decode->on_decode = [](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    // Some megabytes of events: more than the sockets take.
    for (int i = 0; i < 16000; ++i) call->Tokens(i % 4, "x");
  };
  StartHttp();
  HttpClient client(port());
  client.LimitReceiveBuffer(4096);
  client.Ask(kCompletions, R"({"prompt": "x", "max_tokens": 4000, "n": 4, "stream": true})");
  EXPECT_TRUE(decode->WaitFor([&] { return !decode->cancels().empty(); }));
  EXPECT_TRUE(IsIdle());
}

// What the log has of it is not for clients, nor where workers are (ErrorOf).
TEST_F(HttpFixture, WhatGoesWrongAtWorkersIsForTheLog) {
  options_.max_attempts = 2;
  options_.heartbeat = absl::Milliseconds(100);
  options_.worker_wait = absl::Milliseconds(300);
  options_.default_deadline = absl::Seconds(5);
  FakeWorker* const decode = Decode();
  std::atomic<int> which{0};
  const std::string secret = absl::StrCat("peer ", decode->address(), " has lost its device");
  const absl::Status statuses[] = {absl::InternalError(secret),
                                   absl::UnavailableError(secret),
                                   absl::AbortedError(secret),
                                   absl::DataLossError(secret),
                                   absl::FailedPreconditionError(secret),
                                   absl::PermissionDeniedError(secret),
                                   absl::ResourceExhaustedError(secret)};
  decode->on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->End(statuses[which]);
  };
  StartHttp();
  for (; which < 7; ++which) {
    const Reply reply = Post(kCompletions, kHi);
    EXPECT_NE(reply.status, 200);
    EXPECT_THAT(ErrorOf(reply),
                testing::AnyOf(HasSubstr("no worker could answer"), HasSubstr("a worker failed"),
                               StartsWith("deadline passed")))
        << statuses[which];
    EXPECT_EQ(reply.body.find("device"), std::string::npos) << reply.body;
  }
  decode->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 0));
  const Reply away = Post(kCompletions, kHi);
  EXPECT_EQ(away.status, 503);
  EXPECT_EQ(ErrorOf(away), "no decode worker serves model m now; models served now: none");
}

// In the middle of an upgrade, say: another router may have a pair, and this one soon.
TEST_F(HttpFixture, WorkersThatDoNotFitEachOtherAreAsGoodAsAway) {
  options_.heartbeat = absl::Milliseconds(100);
  Add({.role = ferry::v1::WORKER_ROLE_PREFILL, .block_size = 64});
  Add({.role = ferry::v1::WORKER_ROLE_DECODE, .block_size = 128});
  StartHttp();
  const std::string two = json{{"prompt", {"a", std::string(200, 'x')}}}.dump();
  const std::string one = json{{"prompt", std::string(200, 'x')}}.dump();
  for (const std::string& body : {one, two}) {
    const Reply reply = Post(kCompletions, body);
    EXPECT_EQ(reply.status, 503) << reply.body;
    EXPECT_EQ(reply.headers.at("retry-after"), "1");
    EXPECT_EQ(reply.Json()["error"]["type"], "service_unavailable_error");
    EXPECT_THAT(ErrorOf(reply), HasSubstr("workers that prefill are there, but fit none that"));
  }
}

TEST_F(HttpFixture, ACallOfMorePromptsThanMayEverWaitIsWrong) {
  options_.max_queue = 3;
  options_.tenant_limits = {"acme=0:2"};
  http_options_.trust_tenant_header = true;
  FakeWorker* const decode = Decode();
  StartHttp();
  const auto expect = [&](const std::string& prompts, const std::string& headers,
                          const std::string& message) {
    const Reply reply = Post(kCompletions, absl::StrCat(R"({"prompt": )", prompts, "}"), headers);
    EXPECT_EQ(reply.status, 400) << reply.body;
    EXPECT_EQ(ErrorOf(reply), message);
    EXPECT_EQ(reply.Json()["error"]["param"], "prompt");
  };
  expect(R"(["a", "b", "c", "d"])", "",
         "prompt has 4 entries: at most 3 requests may wait at a time, and each entry is one");
  expect(R"(["a", "b", "c"])", "X-Ferry-Tenant: acme\r\n",
         "prompt has 3 entries: at most 2 requests of tenant acme may wait at a time, and each "
         "entry is one");
  EXPECT_TRUE(decode->decodes().empty());
  EXPECT_EQ(Metric("ferry_router_rejected_total{reason=\"call_too_large\"}"), "2")
      << "a call is refused once, however many prompts it has";
  EXPECT_EQ(Metric("ferry_router_rejected_total{reason=\"cancelled\"}"), "");
  EXPECT_EQ(Post(kCompletions, R"({"prompt": ["a", "b"]})", "X-Ferry-Tenant: acme\r\n").status,
            200);
}

TEST_F(HttpFixture, WorkersThatDoNotFitAreForTheLog) {
  options_.heartbeat = absl::Milliseconds(100);
  options_.worker_wait = absl::Milliseconds(300);
  Add({.role = ferry::v1::WORKER_ROLE_PREFILL, .links = {"shm"}});
  Add({.role = ferry::v1::WORKER_ROLE_DECODE, .links = {"tcp"}});
  options_.local_prefill_tokens = 0;
  StartRouterAlone();
  auto front = HttpFront::Start(http_options_, door_.get(), metrics_);
  ASSERT_TRUE(front.ok()) << front.status();
  front_ = std::move(*front);
  const Reply reply = Post(kCompletions, kHi);
  EXPECT_GE(reply.status, 500);
  EXPECT_THAT(ErrorOf(reply), testing::AnyOf(StartsWith("no pair of workers can serve"),
                                             StartsWith("no decode worker serves")));
}

}  // namespace
}  // namespace router::http
