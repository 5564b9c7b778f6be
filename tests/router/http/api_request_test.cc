// Requests for completions and chat completions: what they become, and that every wrong member is
// named with its value.

#include "router/http/api_request.h"

#include "absl/strings/str_cat.h"
#include "ferry/v1/inference.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router::http {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

ServedModels ChatModels(chat::Format format = chat::Format::kV3) {
  std::vector<std::unique_ptr<ModelAssets>> models;
  models.push_back(std::make_unique<ModelAssets>());
  models[0]->name = "m";
  json tokenizer = tokenizer::TinyTokenizer();
  int id = 256;
  for (const char* const marker : {"<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜User｜>"}) {
    tokenizer["added_tokens"].push_back({{"id", id++},
                                         {"content", marker},
                                         {"special", true},
                                         {"single_word", false},
                                         {"lstrip", false},
                                         {"rstrip", false},
                                         {"normalized", false}});
  }
  models[0]->tokenizer = tokenizer::Make(tokenizer);
  models[0]->chat_format = format;
  return ServedModels(std::move(models));
}

std::string CompletionError(const std::string& body) {
  return std::string(ParseCompletionRequest(body).status().message());
}
// What is wrong with {"prompt": "hi", MEMBER: VALUE}, in both APIs.
std::string MemberError(const std::string& member) {
  const std::string error = CompletionError(absl::StrCat(R"({"prompt": "hi", )", member, "}"));
  const ServedModels models = ChatModels();
  const auto chat = ParseChatRequest(
      absl::StrCat(R"({"messages": [{"role": "user", "content": "hi"}], )", member, "}"), models);
  EXPECT_EQ(chat.status().message(), error) << member;
  return error;
}
std::string ChatError(const std::string& members,
                      const std::string& messages = R"([{"role": "user", "content": "hi"}])") {
  const ServedModels models = ChatModels();
  const auto chat = ParseChatRequest(
      absl::StrCat(R"({"messages": )", messages, members.empty() ? "" : ", ", members, "}"),
      models);
  return std::string(chat.status().message());
}

TEST(ApiRequestTest, EveryMemberOfACompletionHasItsPlace) {
  const auto api = ParseCompletionRequest(R"({
    "model": "m", "prompt": "Hello", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
    "min_p": 0.1, "n": 3, "best_of": 3, "stream": true, "stream_options": {"include_usage": true},
    "logprobs": 2, "stop": ["a", "b"], "stop_token_ids": [5], "presence_penalty": 0.25,
    "frequency_penalty": -1, "repetition_penalty": 1.5, "seed": 18446744073709551615,
    "min_tokens": 2, "ignore_eos": true, "include_stop_str_in_output": true, "priority": -3,
    "cache_salt": "s", "user": "u", "echo": false, "suffix": null, "logit_bias": {}})");
  ASSERT_TRUE(api.ok()) << api.status();
  EXPECT_EQ(api->api, Api::kCompletions);
  EXPECT_TRUE(api->stream);
  EXPECT_TRUE(api->include_usage);
  EXPECT_EQ(api->branches, 3u);
  EXPECT_TRUE(api->text.add_special_tokens);
  ASSERT_EQ(api->prompts.size(), 1u);
  const ferry::v1::GenerateRequest& request = *api->prompts[0];
  EXPECT_EQ(request.model(), "m");
  EXPECT_EQ(request.text(), "Hello");
  EXPECT_EQ(request.priority(), -3);
  EXPECT_EQ(request.cache_salt(), "s");
  const ferry::v1::SamplingParams& s = request.sampling();
  EXPECT_EQ(s.max_tokens(), 7u);
  EXPECT_EQ(s.temperature(), 0.5f);
  EXPECT_EQ(s.top_p(), 0.9f);
  EXPECT_EQ(s.top_k(), 40);
  EXPECT_EQ(s.min_p(), 0.1f);
  EXPECT_EQ(s.n(), 3u);
  EXPECT_EQ(s.logprobs(), 2u);
  EXPECT_THAT(s.stop(), ElementsAre("a", "b"));
  EXPECT_THAT(s.stop_token_ids(), ElementsAre(5));
  EXPECT_EQ(s.presence_penalty(), 0.25f);
  EXPECT_EQ(s.frequency_penalty(), -1.0f);
  EXPECT_EQ(s.repetition_penalty(), 1.5f);
  EXPECT_EQ(s.seed(), UINT64_MAX);
  EXPECT_EQ(s.min_tokens(), 2u);
  EXPECT_TRUE(s.ignore_eos());
  EXPECT_TRUE(s.include_stop());
}

TEST(ApiRequestTest, WhatIsAbsentOrNullTakesItsDefault) {
  const auto api = ParseCompletionRequest(
      R"({"prompt": "x", "temperature": null, "stop": null, "seed": null, "stream": null,
          "max_tokens": null, "logprobs": null, "something": null})");
  ASSERT_TRUE(api.ok()) << api.status();
  const ferry::v1::SamplingParams& s = api->prompts[0]->sampling();
  EXPECT_FALSE(s.has_temperature() || s.has_seed() || s.has_n() || s.has_logprobs());
  EXPECT_EQ(s.stop_size(), 0);
  EXPECT_EQ(s.max_tokens(), 16u) << "OpenAI's default of this API";
  EXPECT_FALSE(api->stream);
  EXPECT_EQ(api->branches, 1u);

  const ServedModels models = ChatModels();
  const auto chat = ParseChatRequest(R"({"messages": [{"role": "user", "content": "x"}]})", models);
  ASSERT_TRUE(chat.ok()) << chat.status();
  EXPECT_FALSE(chat->prompts[0]->sampling().has_max_tokens()) << "what fits";
}

TEST(ApiRequestTest, WhatSaysSomethingOfTheCallerIsTaken) {
  const std::string members =
      R"("user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "auto",
         "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h")";
  EXPECT_EQ(MemberError(members), "");
  EXPECT_EQ(ChatError(members + R"(, "verbosity": "medium")"), "");
}

TEST(ApiRequestTest, APromptIsTextOrIdsOrSeveralOfThem) {
  const auto texts = ParseCompletionRequest(R"({"prompt": ["a", "b"], "seed": 4})");
  ASSERT_TRUE(texts.ok()) << texts.status();
  ASSERT_EQ(texts->prompts.size(), 2u);
  EXPECT_EQ(texts->prompts[1]->text(), "b");
  EXPECT_EQ(texts->prompts[1]->sampling().seed(), 4u);
  const auto ids = ParseCompletionRequest(R"({"prompt": [1, 2, 3]})");
  ASSERT_TRUE(ids.ok()) << ids.status();
  ASSERT_EQ(ids->prompts.size(), 1u);
  EXPECT_THAT(ids->prompts[0]->tokens().ids(), ElementsAre(1, 2, 3));
  const auto mixed = ParseCompletionRequest(R"({"prompt": [[1, 2], "a", [3]]})");
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  ASSERT_EQ(mixed->prompts.size(), 3u);
  EXPECT_THAT(mixed->prompts[2]->tokens().ids(), ElementsAre(3));
  const auto negative_seed = ParseCompletionRequest(R"({"prompt": "a", "seed": -1})");
  EXPECT_EQ(negative_seed->prompts[0]->sampling().seed(), UINT64_MAX);
  const auto one_stop = ParseCompletionRequest(R"({"prompt": "a", "stop": "x"})");
  EXPECT_THAT(one_stop->prompts[0]->sampling().stop(), ElementsAre("x"));
}

TEST(ApiRequestTest, WrongPromptsAreNamed) {
  constexpr char kRule[] = ": must be a string, an array of token ids, or an array of such prompts";
  EXPECT_EQ(CompletionError("{}"), "prompt is missing");
  EXPECT_EQ(CompletionError(R"({"prompt": 5})"), absl::StrCat("prompt is 5", kRule));
  EXPECT_EQ(CompletionError(R"({"prompt": []})"), absl::StrCat("prompt is []", kRule));
  EXPECT_EQ(CompletionError(R"({"prompt": {"a": 1}})"), absl::StrCat("prompt is {\"a\":1}", kRule));
  EXPECT_EQ(CompletionError(R"({"prompt": [1, -2]})"), "prompt[1] is -2: must be a token id");
  EXPECT_EQ(CompletionError(R"({"prompt": [1, 2.5]})"), "prompt[1] is 2.5: must be a token id");
  EXPECT_EQ(CompletionError(R"({"prompt": [1, 4294967296]})"),
            "prompt[1] is 4294967296: must be a token id");
  EXPECT_EQ(CompletionError(R"({"prompt": [1, "a"]})"), "prompt[1] is \"a\": must be a token id");
  EXPECT_EQ(CompletionError(R"({"prompt": ["a", []]})"),
            "prompt[1] is []: must be a string or an array of token ids");
  EXPECT_EQ(CompletionError(R"({"prompt": ["a", [1, null]]})"),
            "prompt[1][1] is null: must be a token id");
  const json many = {{"prompt", std::vector<std::string>(1025, "x")}};
  EXPECT_EQ(CompletionError(many.dump()), "prompt is an array of 1025 prompts: at most 1024");
}

TEST(ApiRequestTest, WrongMembersAreNamedWithTheirValues) {
  for (const char* const name : {"temperature", "top_p", "min_p", "repetition_penalty",
                                 "presence_penalty", "frequency_penalty"}) {
    EXPECT_EQ(MemberError(absl::StrCat("\"", name, "\": \"hot\"")),
              absl::StrCat(name, " is \"hot\": must be a number"));
    EXPECT_EQ(MemberError(absl::StrCat("\"", name, "\": 1e300")),
              absl::StrCat(name, " is 1e+300: must be a number"));
    EXPECT_EQ(MemberError(absl::StrCat("\"", name, "\": [1]")),
              absl::StrCat(name, " is [1]: must be a number"));
  }
  for (const char* const name : {"stream", "ignore_eos", "include_stop_str_in_output"}) {
    EXPECT_EQ(MemberError(absl::StrCat("\"", name, "\": 1")),
              absl::StrCat(name, " is 1: must be true or false"));
  }
  for (const char* const name : {"max_tokens", "max_completion_tokens", "min_tokens"}) {
    const char* const least = name == std::string("min_tokens") ? "0" : "1";
    for (const char* const value : {"-1", "1.5", "\"7\"", "4294967296", "18446744073709551615"}) {
      EXPECT_EQ(
          MemberError(absl::StrCat("\"", name, "\": ", value)),
          absl::StrCat(name, " is ", value, ": must be an integer of ", least, " to 2147483647"));
    }
  }
  EXPECT_EQ(MemberError(R"("max_tokens": 0)"),
            "max_tokens is 0: must be an integer of 1 to 2147483647");
  for (const char* const value : {"0", "17", "2147483647", "true"}) {
    EXPECT_EQ(MemberError(absl::StrCat("\"n\": ", value)),
              absl::StrCat("n is ", value, ": must be an integer of 1 to 16"));
  }
  EXPECT_EQ(MemberError(R"("top_k": 1e3)"),
            "top_k is 1000.0: must be an integer of -2147483648 to 2147483647");
  EXPECT_EQ(MemberError(R"("seed": 0.5)"), "seed is 0.5: must be an integer of 64 bits");
  EXPECT_EQ(MemberError(R"("model": 7)"), "model is 7: must be a string");
  EXPECT_EQ(MemberError(R"("cache_salt": false)"), "cache_salt is false: must be a string");
  EXPECT_EQ(MemberError(R"("stop": 5)"), "stop is 5: must be a string or an array of strings");
  EXPECT_EQ(MemberError(R"("stop": "")"),
            "stop is \"\": must be a string of at least one character");
  for (const char* const value : {"5", "\"\""}) {
    EXPECT_EQ(MemberError(absl::StrCat("\"stop\": [\"a\", ", value, "]")),
              absl::StrCat("stop[1] is ", value, ": must be a string of at least one character"));
  }
  EXPECT_EQ(MemberError(R"("stop_token_ids": 5)"),
            "stop_token_ids is 5: must be an array of token ids");
  EXPECT_EQ(MemberError(R"("stop_token_ids": [-1])"),
            "stop_token_ids[0] is -1: must be a token id");
  EXPECT_EQ(MemberError(R"("max_tokens": 5, "max_completion_tokens": 6)"),
            "max_completion_tokens is 6: must be max_tokens, 5, if both are given");
  EXPECT_EQ(MemberError(R"("stream_options": {"include_usage": true})"),
            "stream_options is {\"include_usage\":true}: must be absent unless stream is true");
  EXPECT_EQ(MemberError(R"("stream": true, "stream_options": true)"),
            "stream_options is true: must be an object");
  EXPECT_EQ(MemberError(R"("stream": true, "stream_options": {"include_usage": 1})"),
            "stream_options.include_usage is 1: must be true or false");
  EXPECT_EQ(MemberError(R"("stream": true, "stream_options": {"includ_usage": true})"),
            "stream_options.includ_usage is true: there is no such member of a request");
  EXPECT_EQ(MemberError(R"("stream": true, "stream_options": {"include_obfuscation": 1})"),
            "stream_options.include_obfuscation is 1: must be true or false");
  for (const char* const name : {"user", "service_tier", "safety_identifier", "prompt_cache_key",
                                 "prompt_cache_retention"}) {
    EXPECT_EQ(MemberError(absl::StrCat("\"", name, "\": 5")),
              absl::StrCat(name, " is 5: must be a string"));
  }
  EXPECT_EQ(MemberError(R"("store": "yes")"), "store is \"yes\": must be true or false");
  EXPECT_EQ(MemberError(R"("metadata": [])"), "metadata is []: must be an object of strings");
  EXPECT_EQ(MemberError(R"("metadata": {"a": "b", "c": 5})"), "metadata.c is 5: must be a string");
  EXPECT_EQ(MemberError(absl::StrCat("\"metadata\": {\"", std::string(5000, 'n'), "\": 5}")),
            "metadata.(a name of 5000 bytes) is 5: must be a string");
  EXPECT_EQ(MemberError(absl::StrCat("\"", std::string(5000, 'n'), "\": 5")),
            "(a name of 5000 bytes) is 5: there is no such member of a request");
  EXPECT_EQ(MemberError(R"("logit_bias": {"5": 10})"),
            "logit_bias is {\"5\":10}: must be {}, nothing else can be served");
  EXPECT_EQ(MemberError(R"("max_token": 5)"),
            "max_token is 5: there is no such member of a request");
  EXPECT_EQ(CompletionError(R"({"prompt": "a", "echo": true})"),
            "echo is true: must be false, nothing else can be served");
  EXPECT_EQ(CompletionError(R"({"prompt": "a", "best_of": 2})"),
            "best_of is 2: must be 1, nothing else can be served");
  EXPECT_EQ(CompletionError(R"({"prompt": "a", "logprobs": 21})"),
            "logprobs is 21: must be an integer of 0 to 20");
  EXPECT_EQ(CompletionError(R"({"prompt": "a", "logprobs": true})"),
            "logprobs is true: must be an integer of 0 to 20");
  EXPECT_EQ(CompletionError(
                absl::StrCat(R"({"prompt": "a", "model": [")", std::string(100, 'x'), "\"]}")),
            "model is an array of 1: must be a string");
}

TEST(ApiRequestTest, ABodyThatIsNoObjectIsRefusedWithItsPlace) {
  EXPECT_THAT(CompletionError(""), StartsWith("the body is not JSON: "));
  EXPECT_THAT(CompletionError("{\"prompt\": \"a\",}"), HasSubstr("line 1, column 16"));
  EXPECT_THAT(CompletionError("{\"prompt\": \"\xff\"}"), HasSubstr("ill-formed UTF-8"));
  EXPECT_THAT(CompletionError(R"({"prompt": "\ud800"})"), StartsWith("the body is not JSON: "));
  EXPECT_THAT(CompletionError(R"({"prompt": "a", "n": 1e999})"),
              StartsWith("the body is not JSON"));
  EXPECT_EQ(CompletionError("[]"), "the body is []: must be an object");
  EXPECT_EQ(CompletionError("7"), "the body is 7: must be an object");
  EXPECT_EQ(CompletionError(absl::StrCat("{\"prompt\": ", std::string(100000, '['))),
            "the body is nested more than 128 levels deep");
  EXPECT_EQ(CompletionError(std::string("{\"prompt\": \"a\"}\0{}", 18)),
            "the body is not JSON: byte 15 is a NUL character");
  EXPECT_EQ(CompletionError(
                absl::StrCat("{\"prompt\": ", std::string(1000, '['), std::string(1000, ']'), "}")),
            "the body is nested more than 128 levels deep");
  std::string wide = "{\"prompt\": \"a\"";
  for (int i = 0; i < 600; ++i) absl::StrAppend(&wide, ", \"m", i, "\": 1");
  EXPECT_EQ(CompletionError(wide + "}"), "an object of the body has more than 512 members");
}

// Time that grows with the square of their number would take minutes.
TEST(ApiRequestTest, TwoMillionObjectsAreReadAsFastAsTheyCome) {
  std::string body = "{\"x\": [{}";
  for (int i = 1; i < 2'000'000; ++i) body += ",{}";
  EXPECT_EQ(CompletionError(body + "]}"),
            "x is an array of 2000000: there is no such member of a request");
}

TEST(ApiRequestTest, AChatBecomesThePromptOfItsFormat) {
  const ServedModels models = ChatModels();
  const auto api = ParseChatRequest(
      R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
          "logprobs": true, "top_logprobs": 3, "max_completion_tokens": 9, "tools": [{"type":
          "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto"})",
      models);
  ASSERT_TRUE(api.ok()) << api.status();
  EXPECT_EQ(api->api, Api::kChat);
  EXPECT_THAT(api->prompts[0]->text(), StartsWith("<｜begin▁of▁sentence｜>Be brief."));
  EXPECT_EQ(api->prompts[0]->sampling().logprobs(), 3u);
  EXPECT_EQ(api->prompts[0]->sampling().max_tokens(), 9u);
  EXPECT_FALSE(api->text.add_special_tokens) << "the text has its own BOS";
  EXPECT_THAT(api->text.shown_special_ids, ElementsAre(256, 257, 258))
      << "by which the reply is split; not <｜User｜>";
  EXPECT_EQ(api->reply.format, chat::Format::kV3);
  EXPECT_TRUE(api->reply.tools);
  EXPECT_FALSE(api->reply.in_reasoning);
  const auto thinking = ParseChatRequest(
      R"({"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"thinking": true}})",
      ChatModels(chat::Format::kV31));
  ASSERT_TRUE(thinking.ok()) << thinking.status();
  EXPECT_TRUE(thinking->reply.in_reasoning);
  EXPECT_FALSE(thinking->reply.tools);
}

TEST(ApiRequestTest, WrongMembersOfAChatAreNamed) {
  EXPECT_EQ(ChatError(R"("logprobs": 5)"), "logprobs is 5: must be true or false");
  EXPECT_EQ(ChatError(R"("top_logprobs": 5)"),
            "top_logprobs is 5: must be absent unless logprobs is true");
  EXPECT_EQ(ChatError(R"("logprobs": true, "top_logprobs": 21)"),
            "top_logprobs is 21: must be an integer of 0 to 20");
  EXPECT_EQ(
      ChatError(R"("tool_choice": "required")"),
      "tool_choice is \"required\": must be \"auto\" or \"none\": the model cannot be made to "
      "call a tool");
  EXPECT_EQ(ChatError(R"("reasoning_effort": "huge")"),
            "reasoning_effort is \"huge\": must be none, minimal, low, medium, high, xhigh or max");
  EXPECT_EQ(ChatError(R"("response_format": {"type": "json_object"})"),
            "response_format is {\"type\":\"json_object\"}: must be {\"type\":\"text\"}, nothing "
            "else can be served");
  EXPECT_EQ(ChatError(R"("verbosity": "low")"),
            "verbosity is \"low\": must be \"medium\", nothing else can be served");
  EXPECT_EQ(ChatError("", R"([{"role": "user", "content": "a", "colour": "red"}])"),
            "messages[0].colour is \"red\": there is no such member here");
  EXPECT_EQ(ChatError(R"("chat_template_kwargs": {"think": true})"),
            "chat_template_kwargs.think is true: there is no such member here");
  EXPECT_EQ(ChatError(R"("tools": [{"function": {"name": "f", "params": 1}}])"),
            "tools[0].function.params is 1: there is no such member here");
  EXPECT_EQ(ChatError(R"("parallel_tool_calls": false)"),
            "parallel_tool_calls is false: must be true, nothing else can be served");
  EXPECT_EQ(ChatError(R"("prompt": "a")"), "prompt is \"a\": there is no such member of a request");
  EXPECT_EQ(ChatError("", "[]"), "messages is empty");
  EXPECT_EQ(ChatError("", R"([{"role": "user"}])"), "messages[0].content is missing");
  EXPECT_THAT(ChatError("", R"([{"role": "king", "content": "a"}])"),
              StartsWith("messages[0].role is \"king\""));
  const std::string huge(100'000, 'r');
  EXPECT_EQ(ChatError("", absl::StrCat(R"([{"content": "a", "role": ")", huge, R"("}])")),
            "messages[0].role is a string of 100000 bytes, expected system, developer, user, "
            "assistant or tool");
  EXPECT_EQ(
      ChatError("", absl::StrCat(R"([{"role": "user", "content": [{"type": ")", huge, R"("}]}])")),
      "messages[0].content[0].type is a string of 100000 bytes: only text can be served");
  EXPECT_THAT(
      ChatError("", R"([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])"),
      StartsWith("messages[0].content[0].type is \"image_url\""));
  EXPECT_EQ(ChatError(R"("model": "other")"), "model \"other\" is not served here; served: m");
}

TEST(ApiRequestTest, ChatWithACheckpointOfNoKnownFormatIsRefusedWithoutSayingWhereItLies) {
  std::vector<std::unique_ptr<ModelAssets>> assets;
  assets.push_back(std::make_unique<ModelAssets>());
  assets[0]->name = "m";
  assets[0]->chat_format = absl::FailedPreconditionError("no chat: /models/m has no template");
  const ServedModels models(std::move(assets));
  const auto chat = ParseChatRequest(R"({"messages": [{"role": "user", "content": "x"}]})", models);
  EXPECT_EQ(chat.status(),
            absl::InvalidArgumentError("model m: chat is not available, only completions are"));
}

}  // namespace
}  // namespace router::http
