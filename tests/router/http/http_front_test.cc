// OpenAI's API against fake workers: answers, streams, and what supervisors ask.

#include <cstdio>
#include <thread>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/router/http/http_fixture.h"

namespace router::http {
namespace {

using fakes::FakeWorker;
using nlohmann::json;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

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
  EXPECT_EQ(ErrorOf(ids), "prompt[1][1] is 300: must be below the vocabulary size, 300");
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

// What a shell command prints.
std::string OutputOf(const std::string& command) {
  std::FILE* const pipe = popen(command.c_str(), "r");
  std::string output;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
  EXPECT_EQ(pclose(pipe), 0) << command << "\n" << output;
  return output;
}

TEST_F(HttpFixture, CurlGetsAnswersAndStreams) {
  Decode();
  StartHttp();
  const auto curl = [&](const std::string& body) {
    return OutputOf(absl::StrCat(
        "curl --silent --show-error --no-buffer --max-time 60 --header 'Content-Type: "
        "application/json' --data '",
        body, "' --write-out ' %{http_code}' http://127.0.0.1:", port(), kCompletions));
  };
  const std::string whole = curl(kHi);
  EXPECT_THAT(whole, HasSubstr(R"("text":"hello")"));
  EXPECT_THAT(whole, EndsWith(" 200"));
  const std::string stream = curl(kHiStream);
  EXPECT_THAT(stream, StartsWith("data: {"));
  EXPECT_THAT(stream, EndsWith("data: [DONE]\n\n 200"));
  EXPECT_THAT(curl(R"({"prompt": 5})"), EndsWith(" 400"));
}

TEST_F(HttpFixture, SupervisorsAreAnswered) {
  FakeWorker* const worker = Add(ferry::v1::WORKER_ROLE_BOTH);
  StartHttp();
  EXPECT_EQ(Get("/health").status, 200);
  EXPECT_EQ(Get("/ready").status, 200);
  EXPECT_EQ(Get("/version").Json(), json::parse(R"({"version": "0.1.0"})"));
  const json models = Get("/v1/models").Json();
  EXPECT_EQ(models["object"], "list");
  ASSERT_EQ(models["data"].size(), 1u);
  EXPECT_EQ(models["data"][0]["id"], "m");
  EXPECT_EQ(models["data"][0]["max_model_len"], 4096);
  EXPECT_EQ(models["data"][0]["vocab_size"], 300);
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
  const auto has = [](const std::string& words) {
    return [words](const Reply& reply) { return reply.body.find(words) != reply.body.npos; };
  };
  const std::string counted = "ferry_router_requests_total";
  EXPECT_THAT(GetUntil("/metrics", has(counted)).body, HasSubstr(counted));
  worker->Kill();
  ASSERT_TRUE(WaitForWorkers(0, 0));
  // Whoever may see the metrics may know where the workers are, as soon as their trouble is known.
  const std::string why =
      "model m is not served now: neither a prefill nor a decode worker is ready; worker " +
      worker->address();
  const Reply not_ready = GetUntil("/ready", has(why));
  EXPECT_EQ(not_ready.status, 503);
  EXPECT_THAT(not_ready.Json()["error"].value("message", ""), HasSubstr(why));
  EXPECT_EQ(Get("/health").status, 200) << "alive all the same";
  EXPECT_EQ(Get("/v1/models").Json(), models) << "what the router is for, served now or not";
}

TEST_F(HttpFixture, ModelsShowTheContextOfThePairThatServes) {
  options_.heartbeat = absl::Milliseconds(100);
  options_.worker_wait = absl::Milliseconds(300);
  Add({.role = ferry::v1::WORKER_ROLE_PREFILL, .max_model_len = 1000});
  FakeWorker* const large = Add({.role = ferry::v1::WORKER_ROLE_PREFILL, .max_model_len = 2000});
  Decode();
  StartHttp();
  const auto context = [this] { return Get("/v1/models/m").Json()["max_model_len"].get<int>(); };
  EXPECT_EQ(context(), 2000);
  large->Kill();
  ASSERT_TRUE(WaitForWorkers(1, 1));
  EXPECT_EQ(Get("/ready").status, 200);
  EXPECT_EQ(context(), 1000);
  const Reply away = Post(kCompletions, json{{"prompt", std::string(1500, 'x')}}.dump());
  EXPECT_EQ(away.status, 503);
  EXPECT_EQ(ErrorOf(away),
            "no pair of workers can serve a prompt of 1500 tokens for model m now: 1 decode "
            "worker, 1 worker that prefills any length; the longest prompt that they take has 999 "
            "tokens; workers that take more are away");
  const Reply never = Post(kCompletions, json{{"prompt", std::string(2500, 'x')}}.dump());
  EXPECT_EQ(never.status, 400);
  EXPECT_EQ(ErrorOf(never),
            "prompt has 2500 tokens: the context is 2000, and at least one token must fit behind "
            "it");
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
