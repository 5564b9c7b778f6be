// OpenAI's API against fake workers: answers, streams, failures, and what supervisors ask.

#include <atomic>
#include <future>
#include <thread>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "tests/router/http/http_fixture.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router::http {
namespace {

using fakes::FakeWorker;
using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

constexpr char kCompletions[] = "/v1/completions";
constexpr char kHi[] = R"({"prompt": "say hi", "seed": 7})";
constexpr char kHiStream[] = R"({"prompt": "say hi", "stream": true})";

TEST_F(HttpFixture, ACompletionIsWhatGrpcSays) {
  FakeWorker* const decode = Decode();
  StartHttp();
  const Reply reply = Post(kCompletions, kHi,
                           "X-Request-Id: mine-1\r\nTraceparent: "
                           "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01\r\n");
  EXPECT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.headers.at("content-type"), "application/json");
  EXPECT_EQ(reply.headers.at("x-request-id"), "mine-1");
  EXPECT_THAT(reply.headers.at("traceparent"), StartsWith("00-0123456789abcdef0123456789abcdef-"));
  json body = reply.Json();
  EXPECT_GT(body["created"], 1700000000);
  body.erase("created");
  EXPECT_EQ(body, json::parse(R"({"id": "cmpl-mine-1", "object": "text_completion", "model": "m",
    "system_fingerprint": "ferry-0.1.0", "choices": [{"index": 0, "text": "hello",
    "logprobs": null, "finish_reason": "length"}], "usage": {"prompt_tokens": 6,
    "completion_tokens": 5, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0}}})"));
  const Answer same = Generate(Text("say hi"));
  EXPECT_EQ(same.texts.at(0), "hello");
  ASSERT_EQ(decode->decodes().size(), 2u);
  const ferry::v1::RequestSpec sent = decode->decodes()[0].spec();
  EXPECT_THAT(sent.key().request_id(), StartsWith("mine-1#"));
  EXPECT_EQ(sent.sampling().seed(), 7u);
  EXPECT_EQ(sent.sampling().max_tokens(), 16u);
  EXPECT_EQ(sent.token_ids_size(), decode->decodes()[1].spec().token_ids_size());
  EXPECT_TRUE(IsIdle());
}

TEST_F(HttpFixture, AStreamIsEventsThatAddUp) {
  Decode();
  StartHttp();
  HttpClient client(port());
  for (int i = 0; i < 2; ++i) {  // on one connection
    client.Ask(kCompletions,
               R"({"prompt": "x", "stream": true, "stream_options": {"include_usage": true}})");
    const Reply reply = client.Read();
    EXPECT_EQ(reply.status, 200);
    EXPECT_TRUE(reply.complete);
    EXPECT_EQ(reply.headers.at("content-type"), "text/event-stream; charset=utf-8");
    EXPECT_TRUE(reply.done());
    std::string text;
    const auto events = reply.Events();
    ASSERT_GE(events.size(), 2u);
    for (const json& event : events) {
      for (const json& choice : event["choices"]) text += choice["text"];
    }
    EXPECT_EQ(text, "hello");
    EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "length");
    EXPECT_TRUE(events[0]["usage"].is_null());
    EXPECT_EQ(events.back()["choices"], json::array());
    EXPECT_EQ(events.back()["usage"]["completion_tokens"], 5);
  }
}

TEST_F(HttpFixture, AnOldClientGetsAStreamThatEndsWithItsConnection) {
  Decode();
  StartHttp();
  HttpClient client(port());
  client.Send(absl::StrCat("POST /v1/completions HTTP/1.0\r\nContent-Length: ",
                           std::string(kHiStream).size(), "\r\n\r\n", kHiStream));
  const Reply reply = client.Read();
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.headers.count("transfer-encoding"), 0u);
  EXPECT_EQ(reply.headers.at("connection"), "close");
  EXPECT_TRUE(reply.done()) << reply.body;
}

TEST_F(HttpFixture, EveryPromptOfABatchIsAnsweredInItsPlace) {
  FakeWorker* const decode = Decode();
  decode->on_decode = [](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    // Its prompt is its answer.
    std::string bytes;
    for (const uint32_t id : call->request.spec().token_ids())
      bytes.push_back(static_cast<char>(id));
    call->Answer(bytes);
  };
  StartHttp();
  const Reply reply =
      Post(kCompletions, R"({"prompt": ["one", [116, 119, 111], "three"], "n": 2})");
  ASSERT_EQ(reply.status, 200) << reply.body;
  std::vector<std::string> texts;
  const json object = reply.Json();
  for (const json& choice : object["choices"]) {
    EXPECT_EQ(choice["index"], texts.size());
    texts.push_back(choice["text"]);
  }
  EXPECT_THAT(texts, ElementsAre("one", "one", "two", "two", "three", "three"));
  EXPECT_EQ(object["usage"]["prompt_tokens"], 11);
  const Reply stream = Post(kCompletions, R"({"prompt": ["one", "two"], "stream": true})");
  std::map<int, std::string> streamed;
  for (const json& event : stream.Events()) {
    for (const json& choice : event["choices"]) {
      streamed[choice["index"]] += choice["text"].get<std::string>();
    }
  }
  EXPECT_EQ(streamed, (std::map<int, std::string>{{0, "one"}, {1, "two"}}));
  EXPECT_TRUE(stream.done());
  EXPECT_TRUE(IsIdle());
}

TEST_F(HttpFixture, OnePromptsFailureIsTheRequests) {
  FakeWorker* const decode = Decode();
  std::shared_ptr<fakes::DecodeCall> open;
  decode->on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    if (call->request.spec().token_ids_size() == 3) {
      open = call;  // would never end
    } else {
      call->End(absl::InvalidArgumentError("this prompt is not liked"));
    }
  };
  StartHttp();
  const Reply reply = Post(kCompletions, R"({"prompt": ["one", "three"]})");
  EXPECT_EQ(reply.status, 400) << reply.body;
  EXPECT_EQ(ErrorOf(reply), "prompt[1]: this prompt is not liked");
  EXPECT_TRUE(IsIdle()) << "the other prompt has been cancelled";
}

// Long enough for the pool, where the good prompt is read first.
TEST_F(HttpFixture, ABatchWithAWrongPromptRunsNowhere) {
  FakeWorker* const decode = Decode();
  StartHttp();
  std::vector<std::string> prompts(15, std::string(5000, 'x'));
  prompts[0] = "good";
  const json body = {{"prompt", prompts}};
  json stream = body;
  stream["stream"] = true;
  for (const json& one : {body, stream}) {
    const Reply reply = Post(kCompletions, one.dump());
    EXPECT_EQ(reply.status, 400) << reply.body;
    EXPECT_EQ(ErrorOf(reply),
              "prompt[1] has 5000 tokens: the context is 4096, and at least one token must fit "
              "behind it");
    EXPECT_EQ(reply.Json()["error"]["param"], "prompt[1]");
  }
  const Reply ids = Post(kCompletions, R"({"prompt": ["good", [5, 300]], "stream": true})");
  EXPECT_EQ(ids.status, 400);
  EXPECT_EQ(ErrorOf(ids), "prompt[1] tokens.ids[1] is 300: must be below the vocabulary size, 300");
  const Reply all = Post(kCompletions, R"({"prompt": ["a", "b"], "temperature": -1})");
  EXPECT_EQ(ErrorOf(all), "temperature is -1: must be a finite number >= 0")
      << "what is wrong with all of them is not one's";
  EXPECT_TRUE(decode->decodes().empty());
  EXPECT_TRUE(IsIdle());
}

TEST_F(HttpFixture, StopStringsWaitForTheLeastNumberOfTokens) {
  Decode();
  StartHttp();
  for (const auto& [min_tokens, text, reason] :
       {std::tuple{0, "he", "stop"}, std::tuple{4, "hel", "stop"},
        std::tuple{5, "hello", "length"}}) {
    const json reply =
        Post(kCompletions,
             absl::StrCat(R"({"prompt": "x", "stop": "l", "min_tokens": )", min_tokens, "}"))
            .Json();
    EXPECT_EQ(reply["choices"][0]["text"], text);
    EXPECT_EQ(reply["choices"][0]["finish_reason"], reason);
  }
}

TEST_F(HttpFixture, NothingIsReadForAClientThatHasGone) {
  Decode();
  StartHttp();
  // Every thread that reads long bodies waits.
  std::promise<void> go_on;
  const std::shared_future<void> gone_on = go_on.get_future().share();
  for (unsigned i = 0; i <= std::thread::hardware_concurrency(); ++i) {
    ASSERT_TRUE(door_->Run(kInlineTokenizeBytes, [gone_on] { gone_on.wait(); }).ok());
  }
  HttpClient client(port());
  client.Ask(kCompletions, "[" + std::string(kInlineTokenizeBytes, ' ') + "this is no JSON");
  ASSERT_TRUE(Eventually([&] { return !router_->WaitUntilIdle(absl::ZeroDuration()); }));
  client.Close();
  ASSERT_TRUE(Eventually([&] { return Metric("ferry_router_http_connections") == "0"; }));
  go_on.set_value();
  EXPECT_TRUE(Eventually(
      [&] { return Metric("ferry_router_rejected_total{reason=\"cancelled\"}") == "1"; }));
  EXPECT_EQ(Metric("ferry_router_rejected_total{reason=\"invalid_argument\"}"), "")
      << "nobody has found out that it is no JSON";
  EXPECT_TRUE(router_->WaitUntilIdle(absl::Seconds(20)));
}

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
  expect(R"({"prompt": [5, 300]})", 400,
         "prompt tokens.ids[1] is 300: must be below the vocabulary size, 300", "prompt");
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
  EXPECT_EQ(ErrorOf(chat), "model m: no chat format is known");
  const Reply nowhere = Get("/v2/completions");
  EXPECT_EQ(nowhere.status, 404);
  EXPECT_EQ(ErrorOf(nowhere), "there is nothing at /v2/completions");
  const Reply method = Get(kCompletions);
  EXPECT_EQ(method.status, 405);
  EXPECT_EQ(method.headers.at("allow"), "POST");
  EXPECT_EQ(Post("/health", "{}").status, 405);
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

TEST_F(HttpFixture, SupervisorsAreAnswered) {
  FakeWorker* const decode = Decode();
  StartHttp();
  EXPECT_EQ(Get("/health").status, 200);
  EXPECT_EQ(Get("/ready").status, 200);
  EXPECT_EQ(Get("/version").Json(), json::parse(R"({"version": "0.1.0"})"));
  const json models = Get("/v1/models").Json();
  EXPECT_EQ(models["object"], "list");
  ASSERT_EQ(models["data"].size(), 1u);
  EXPECT_EQ(models["data"][0]["id"], "m");
  EXPECT_EQ(models["data"][0]["max_model_len"], 4096);
  EXPECT_EQ(Get("/v1/models/m").Json(), models["data"][0]);
  EXPECT_EQ(Get("/v1/models/%6D").status, 200);
  EXPECT_EQ(Get("/v1/models/other").status, 404);
  Post(kCompletions, kHi);
  const Reply metrics = Get("/metrics");
  EXPECT_THAT(metrics.headers.at("content-type"), StartsWith("text/plain; version=0.0.4"));
  EXPECT_THAT(
      metrics.body,
      HasSubstr("ferry_router_http_responses_total{path=\"/v1/completions\",status=\"200\"} 1\n"));
  // A request is counted when all of it is over, a little behind its answer.
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  std::string counted;
  while (counted.find("ferry_router_requests_total") == counted.npos && absl::Now() < deadline) {
    counted = Get("/metrics").body;
  }
  EXPECT_THAT(counted, HasSubstr("ferry_router_requests_total"));
  decode->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 0));
  const Reply not_ready = Get("/ready");
  EXPECT_EQ(not_ready.status, 503);
  EXPECT_THAT(ErrorOf(not_ready), HasSubstr("no model has a decode worker that is ready"));
  EXPECT_EQ(Get("/health").status, 200) << "alive all the same";
}

TEST_F(HttpFixture, ATargetMayBeAWholeUrl) {
  Decode();
  StartHttp();
  HttpClient client(port());
  client.Ask("http://ferry.example/version?x");
  EXPECT_EQ(client.Read().status, 200);
}

// As the metrics port shows it, which knows nothing of this server.
TEST_F(HttpFixture, OpenConnectionsAreCountedWhoeverAsks) {
  Decode();
  StartHttp();
  EXPECT_EQ(Metric("ferry_router_http_connections"), "0");
  {
    const HttpClient first(port()), second(port());
    EXPECT_TRUE(Eventually([&] { return Metric("ferry_router_http_connections") == "2"; }));
  }
  EXPECT_TRUE(Eventually([&] { return Metric("ferry_router_http_connections") == "0"; }));
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

TEST_F(HttpFixture, ATenantIsThatOfTheKeyOrOfAHeaderThatIsBelieved) {
  const tokenizer::TempDir dir;
  dir.Write("keys", "sk-0123456789abcdef acme\nsk-fedcba9876543210\n");
  http_options_.api_keys_file = dir.path() + "/keys";
  http_options_.trust_tenant_header = true;
  FakeWorker* const decode = Decode();
  StartHttp();
  const auto namespace_of = [&](const std::string& headers) {
    const Reply reply = Post(kCompletions, kHi, headers);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return decode->decodes().back().spec().cache_namespace();
  };
  const auto expected = [&](const std::string& tenant) {
    ferry::v1::GenerateRequest request = Text("say hi");
    request.set_tenant(tenant);
    EXPECT_TRUE(Generate(request).status.ok());
    return decode->decodes().back().spec().cache_namespace();
  };
  const std::string of_acme = "Authorization: Bearer sk-0123456789abcdef\r\n";
  const std::string of_nobody = "Authorization: Bearer sk-fedcba9876543210\r\n";
  const std::string says_bolt = "X-Ferry-Tenant: bolt\r\n";
  ASSERT_NE(expected("acme"), expected(""));
  EXPECT_EQ(namespace_of(of_acme), expected("acme"));
  EXPECT_EQ(namespace_of(of_acme + says_bolt), expected("acme")) << "the key knows better";
  EXPECT_EQ(namespace_of(of_nobody), expected(""));
  EXPECT_EQ(namespace_of(of_nobody + says_bolt), expected("bolt"));
  const Reply odd = Post(kCompletions, kHi, of_nobody + "X-Ferry-Tenant: two words\r\n");
  EXPECT_EQ(odd.status, 400);
  EXPECT_THAT(ErrorOf(odd), StartsWith("x-ferry-tenant \"two words\""));
}

TEST_F(HttpFixture, ATenantThatNobodyVouchesForIsRefused) {
  FakeWorker* const decode = Decode();
  StartHttp();
  const Reply reply = Post(kCompletions, kHi, "X-Ferry-Tenant: acme\r\n");
  EXPECT_EQ(reply.status, 403);
  EXPECT_EQ(ErrorOf(reply), "x-ferry-tenant is \"acme\": this router does not believe that header");
  EXPECT_TRUE(decode->decodes().empty());
}

TEST_F(HttpFixture, WithKeysOnlyThoseWhoHaveOneAreServed) {
  const tokenizer::TempDir dir;
  dir.Write("keys", "sk-0123456789abcdef\n");
  http_options_.api_keys_file = dir.path() + "/keys";
  Decode();
  StartHttp();
  const std::string good = "Authorization: Bearer sk-0123456789abcdef\r\n";
  const std::string bad = "Authorization: Bearer sk-0123456789abcdeg\r\n";
  EXPECT_EQ(Post(kCompletions, kHi, good).status, 200);
  for (const std::string& headers : {std::string(), bad}) {
    const Reply reply = Post(kCompletions, kHi, headers);
    EXPECT_EQ(reply.status, 401);
    EXPECT_EQ(reply.Json()["error"]["code"], "invalid_api_key");
    EXPECT_EQ(reply.headers.at("www-authenticate"), "Bearer");
    EXPECT_EQ(Get("/v1/models", headers).status, 401);
    EXPECT_EQ(Get("/metrics", headers).status, 401);
    EXPECT_EQ(Get("/health", headers).status, 200);
    EXPECT_EQ(Get("/ready", headers).status, 200);
  }
  EXPECT_EQ(Get("/v1/models", good).status, 200);
  // Nobody has to send a long body to be told so.
  HttpClient client(port());
  client.Send("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n{");
  EXPECT_EQ(client.Read().status, 401);
}

TEST_F(HttpFixture, ARouterThatDrainsFinishesAnswersAndTakesNoMore) {
  std::shared_ptr<fakes::DecodeCall> open;
  FakeWorker* const decode = Decode();
  decode->on_decode = [&](std::shared_ptr<fakes::DecodeCall> call) {
    call->Accept();
    call->Tokens(0, "a");
    open = call;
  };
  StartHttp();
  HttpClient client(port());
  client.Ask(kCompletions, kHiStream);
  client.ReadUntil("\"a\"");
  router_->StartDrain();
  const Reply late = Post(kCompletions, kHi);
  EXPECT_EQ(late.status, 503);
  EXPECT_EQ(ErrorOf(late), "the router is draining");
  EXPECT_EQ(Get("/ready").status, 503);
  EXPECT_FALSE(router_->WaitUntilIdle(absl::ZeroDuration()));
  open->Answer("b");
  EXPECT_TRUE(client.Read().done());
  EXPECT_TRUE(router_->WaitUntilIdle(absl::Seconds(20)));
  front_->Shutdown(absl::Seconds(20));
  EXPECT_TRUE(client.AtEnd()) << "an idle connection ends at once";
}

}  // namespace
}  // namespace router::http
