// OpenAI's API with real processes: the text is gRPC's, and clients that leave or do not read leave
// nothing behind.

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/integration/ferry_system.h"
#include "tests/integration/requests.h"
#include "tests/router/http/http_client.h"

namespace integration {
namespace {

using nlohmann::json;
using router::http::HttpClient;
using router::http::Post;
using router::http::Reply;

constexpr char kCompletions[] = "/v1/completions";

class HttpServingTest : public testing::Test {
 protected:
  static std::unique_ptr<FerrySystem> Start(const char* model, const char* num_blocks) {
    SystemOptions options;
    options.model_dir = std::getenv(model);
    options.prefill_flags = options.decode_flags = {"--num_blocks", num_blocks};
    options.router_flags = {"--local_prefill_tokens", "40", "--http_listen", "127.0.0.1:0",
                            "--chat_format",          "v2"};
    return FerrySystem::Start(options);
  }
  static std::string Words(int count) {
    std::string text = "In the beginning";
    for (int i = 0; i < count; ++i) absl::StrAppend(&text, i % 3 == 0 ? " the sea" : " and ships");
    return text;
  }
  static std::string TextOf(const Reply& reply) {
    std::string text;
    for (const json& event : reply.Events()) {
      for (const json& choice : event.value("choices", json::array())) text += choice["text"];
    }
    return text;
  }
};

TEST_F(HttpServingTest, TheTextIsThatOfGrpcWholeAndStreamed) {
  const auto system = Start("FERRY_DEMO_MODEL", "200");
  const int port = system->router_http_port();
  for (const int words : {1, 30, 200}) {
    for (const int seed : {0, 7}) {
      SCOPED_TRACE(testing::Message() << words << " words, seed " << seed);
      json body = {{"prompt", Words(words)}, {"max_tokens", 24}, {"stop", {"\n\n"}}};
      ferry::v1::GenerateRequest request;
      request.set_text(Words(words));
      request.mutable_sampling()->set_max_tokens(24);
      request.mutable_sampling()->add_stop("\n\n");
      if (seed == 0) {
        body["temperature"] = 0;
        request.mutable_sampling()->set_temperature(0);
      } else {
        body.update({{"temperature", 0.9}, {"top_p", 0.95}, {"top_k", 50}, {"seed", seed}});
        request.mutable_sampling()->set_temperature(0.9);
        request.mutable_sampling()->set_top_p(0.95);
        request.mutable_sampling()->set_top_k(50);
        request.mutable_sampling()->set_seed(seed);
      }
      const auto completion = system->client().Complete(request);
      ASSERT_TRUE(completion.ok()) << completion.status();
      const Reply whole = Post(port, kCompletions, body.dump());
      ASSERT_EQ(whole.status, 200) << whole.body;
      const json object = whole.Json();
      EXPECT_EQ(object["choices"][0]["text"], completion->text);
      EXPECT_EQ(object["usage"]["prompt_tokens"], completion->summary.prompt_tokens());
      EXPECT_EQ(object["usage"]["completion_tokens"], completion->summary.completion_tokens());
      body["stream"] = true;
      const Reply stream = Post(port, kCompletions, body.dump());
      EXPECT_EQ(TextOf(stream), completion->text);
      EXPECT_TRUE(stream.done());
    }
  }
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
}

// Whatever is asked, and however much is logged: no text, no token of a client.
TEST_F(HttpServingTest, LogsHoldNeitherTextNorKeys) {
  const std::string phrase = "Zanzibar", key = "key-of-the-lighthouse", wrong = "key-of-a-thief";
  const std::string keys = MakeTestDir() + "/keys";
  std::ofstream(keys) << key << " gold\n";
  SystemOptions options;
  options.model_dir = std::getenv("FERRY_DEMO_MODEL");
  const std::vector<std::string> loud = {"--log_level", "trace"};
  options.prefill_flags = options.decode_flags = options.router_flags = loud;
  options.router_flags.insert(options.router_flags.end(),
                              {"--local_prefill_tokens", "0", "--http_listen", "127.0.0.1:0",
                               "--api_keys_file", keys, "--chat_format", "v2"});
  const auto system = FerrySystem::Start(options);
  const int port = system->router_http_port();
  const auto ask = [&](int status, const std::string& path, const json& body,
                       const std::string& bearer) {
    const Reply reply =
        Post(port, path, body.dump(), absl::StrCat("Authorization: Bearer ", bearer, "\r\n"));
    EXPECT_EQ(reply.status, status) << reply.body;
  };
  const json good = {{"prompt", phrase}, {"max_tokens", 4}, {"stop", {phrase}}, {"user", phrase}};
  ask(200, kCompletions, good, key);
  ask(401, kCompletions, good, wrong);
  json bad = good;
  bad["temperature"] = phrase;
  ask(400, kCompletions, bad, key);
  bad["temperature"] = -1;
  ask(400, kCompletions, bad, key);
  ask(400, kCompletions, {{"prompt", {{"text", phrase}}}}, key);
  ask(400, kCompletions, {{"prompt", "a"}, {phrase, 1}}, key);
  ask(400, kCompletions, phrase, key);
  EXPECT_EQ(
      Post(port, kCompletions, "{\"prompt\": " + phrase, "Authorization: Bearer " + key + "\r\n")
          .status,
      400);
  ask(400, "/v1/chat/completions", {{"messages", {{{"role", phrase}, {"content", phrase}}}}}, key);
  bad = good;
  bad["max_tokens"] = 100000;
  ask(400, kCompletions, bad, key);
  ask(200, "/v1/chat/completions",
      {{"messages", {{{"role", "user"}, {"content", phrase}}}}, {"max_tokens", 4}}, key);
  ferry::v1::GenerateRequest request;
  request.set_text(phrase);
  request.mutable_sampling()->set_max_tokens(4);
  EXPECT_TRUE(system->client().Complete(request).ok());
  request.mutable_sampling()->set_temperature(-1);
  EXPECT_FALSE(system->client().Complete(request).ok());

  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(30)), "");
  const std::string logs = absl::StrCat(system->router().log(), system->prefill(0).process.log(),
                                        system->decode(0).process.log());
  EXPECT_THAT(logs, testing::HasSubstr("request_id="));
  for (const std::string& secret : {phrase, key, wrong}) {
    EXPECT_THAT(logs, testing::Not(testing::HasSubstr(secret)));
  }
}

TEST_F(HttpServingTest, AChatIsACompletionOfItsPrompt) {
  const auto system = Start("FERRY_DEMO_MODEL", "200");
  const int port = system->router_http_port();
  const Reply chat = Post(port, "/v1/chat/completions",
                          R"({"messages": [{"role": "user", "content": "Where is the ferry?"}],
                              "max_tokens": 20, "temperature": 0, "logprobs": true, "top_logprobs": 2})");
  ASSERT_EQ(chat.status, 200) << chat.body;
  // The tokenizer puts BOS before the text of a completion.
  const Reply completion =
      Post(port, kCompletions,
           R"({"prompt": "User: Where is the ferry?\n\nAssistant:", "max_tokens": 20,
               "temperature": 0, "logprobs": 2})");
  const json choice = chat.Json()["choices"][0];
  const json same = completion.Json()["choices"][0];
  EXPECT_EQ(choice["message"]["content"], same["text"]);
  EXPECT_EQ(choice["finish_reason"], same["finish_reason"]);
  EXPECT_EQ(chat.Json()["usage"]["prompt_tokens"], completion.Json()["usage"]["prompt_tokens"]);
  ASSERT_EQ(choice["logprobs"]["content"].size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(choice["logprobs"]["content"][i]["logprob"], same["logprobs"]["token_logprobs"][i]);
  }
}

// A prompt of a long answer, so that it is under way when its client leaves.
std::string LongAsk(int salt, int prompt_tokens, bool stream) {
  return json{{"prompt", MakePrompt(prompt_tokens, salt, 200)},
              {"max_tokens", 3000},
              {"ignore_eos", true},
              {"stream", stream}}
      .dump();
}

TEST_F(HttpServingTest, ClientsThatLeaveAtAnyMomentLeaveNothingBehind) {
  const auto system = Start("FERRY_LONG_MODEL", "120");
  const int port = system->router_http_port();
  for (const bool stream : {false, true}) {
    for (const int prompt_tokens : {20, 1500}) {  // computed where it is decoded, and elsewhere
      std::vector<HttpClient> clients;
      for (int i = 0; i < 4; ++i) {
        clients.emplace_back(port).Ask(kCompletions, LongAsk(i, prompt_tokens, stream));
      }
      if (stream) {
        clients[0].ReadUntil("data: ");
        clients[1].ReadUntil("data: ");
      } else {
        EXPECT_TRUE(FerrySystem::WaitForLoad(
            system->decode(0), [](const auto& load) { return load.running_requests() > 0; },
            absl::Seconds(60)));
      }
      clients.clear();
      EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(60)), "");
    }
  }
}

TEST_F(HttpServingTest, AClientThatDoesNotReadDoesNotHoldUpTheOthers) {
  const auto system = Start("FERRY_LONG_MODEL", "120");
  const int port = system->router_http_port();
  HttpClient stuck(port);
  stuck.LimitReceiveBuffer(4096);
  stuck.Ask(kCompletions, LongAsk(1, 20, true));
  const std::string ask = json{
      {"prompt", MakePrompt(20, 2, 200)},
      {"max_tokens", 10},
      {"temperature", 0},
      {"ignore_eos", true}}.dump();
  const Reply first = Post(port, kCompletions, ask);
  ASSERT_EQ(first.status, 200) << first.body;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Post(port, kCompletions, ask).Json()["choices"], first.Json()["choices"]);
  }
  stuck.Close();
  EXPECT_EQ(system->WaitUntilIdle(absl::Seconds(60)), "");
}

}  // namespace
}  // namespace integration
