// The output of generations as OpenAI's JSON, whole and streamed.

#include "router/http/answer.h"

#include <limits>

#include "ferry/v1/inference.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace router::http {
namespace {

using ferry::v1::GenerateResponse;
using nlohmann::json;
using testing::HasSubstr;

constexpr char kBegin[] =
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n";
constexpr char kEnd[] = "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";

ApiRequest MakeRequest(Api api, bool stream, int num_prompts = 1, uint32_t branches = 1) {
  ApiRequest request;
  request.api = api;
  request.stream = stream;
  request.branches = branches;
  for (int i = 0; i < num_prompts; ++i) {
    request.prompts.push_back(std::make_shared<ferry::v1::GenerateRequest>());
  }
  return request;
}

GenerateResponse Text(const std::string& text, uint32_t index = 0,
                      ferry::v1::FinishReason finish = ferry::v1::FINISH_REASON_UNSPECIFIED) {
  GenerateResponse message;
  message.set_index(index);
  message.set_text(text);
  message.set_finish_reason(finish);
  return message;
}

GenerateResponse Summary(uint32_t prompt_tokens, uint32_t output_tokens, uint32_t cached_tokens) {
  GenerateResponse message;
  message.mutable_summary()->set_prompt_tokens(prompt_tokens);
  message.mutable_summary()->set_completion_tokens(output_tokens);
  message.mutable_summary()->set_cached_tokens(cached_tokens);
  return message;
}

void AddToken(GenerateResponse* message, const std::string& token, float logprob,
              const std::vector<std::pair<std::string, float>>& top = {}) {
  auto* const position = message->add_logprobs();
  position->mutable_chosen()->set_token(token);
  position->mutable_chosen()->set_logprob(logprob);
  for (const auto& [name, value] : top) {
    auto* const one = position->add_top();
    one->set_token(name);
    one->set_logprob(value);
  }
}

// One event's JSON; discarded if there is none or more.
json EventOf(const std::string& text) {
  EXPECT_EQ(text.substr(0, 6), "data: ");
  EXPECT_EQ(text.substr(text.size() - 2), "\n\n");
  return json::parse(text.substr(6, text.size() - 8), nullptr, false);
}

const AnswerName kName = {.request_id = "r1", .model = "m", .created = 1700000000};
constexpr auto kStop = ferry::v1::FINISH_REASON_STOP;
constexpr auto kLength = ferry::v1::FINISH_REASON_LENGTH;

TEST(AnswerTest, AWholeCompletionHasAChoiceForEachPromptAndBranch) {
  const ApiRequest request = MakeRequest(Api::kCompletions, false, 2, 2);
  const auto answer = Answer::Create(request, kName);
  EXPECT_EQ(answer->Add(1, Text("c", 0, kStop)), "");
  EXPECT_EQ(answer->Add(0, Text("a", 1)), "");
  EXPECT_EQ(answer->Add(0, Text("b", 0, kLength)), "");
  EXPECT_EQ(answer->Add(0, Text("a", 1, kLength)), "");
  EXPECT_EQ(answer->Add(0, Summary(3, 4, 2)), "");
  EXPECT_EQ(answer->Add(1, Text("d", 1, kStop)), "");
  EXPECT_EQ(answer->Add(1, Summary(5, 6, 1)), "");
  EXPECT_EQ(json::parse(answer->Finish()), json::parse(R"({
    "id": "cmpl-r1", "object": "text_completion", "created": 1700000000, "model": "m",
    "system_fingerprint": "ferry-0.1.0", "choices": [
      {"index": 0, "text": "b", "logprobs": null, "finish_reason": "length"},
      {"index": 1, "text": "aa", "logprobs": null, "finish_reason": "length"},
      {"index": 2, "text": "c", "logprobs": null, "finish_reason": "stop"},
      {"index": 3, "text": "d", "logprobs": null, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 8, "completion_tokens": 10, "total_tokens": 18,
              "prompt_tokens_details": {"cached_tokens": 3}}})"));
}

TEST(AnswerTest, AStreamedCompletionEndsWithUsageIfAskedForAndDone) {
  ApiRequest request = MakeRequest(Api::kCompletions, true);
  request.include_usage = true;
  const auto answer = Answer::Create(request, kName);
  const json first = EventOf(answer->Add(0, Text("He")));
  EXPECT_EQ(first["choices"][0],
            json::parse(R"({"index": 0, "text": "He", "logprobs": null, "finish_reason": null})"));
  EXPECT_TRUE(first["usage"].is_null() && first.contains("usage"));
  EXPECT_EQ(answer->Add(0, Text("")), "") << "half a character is nothing to say";
  EXPECT_EQ(EventOf(answer->Add(0, Text("", 0, kStop)))["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(answer->Add(0, Summary(2, 3, 0)), "");
  const std::string last = answer->Finish();
  EXPECT_THAT(last,
              HasSubstr("\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3"));
  EXPECT_EQ(last.substr(last.size() - 14), "data: [DONE]\n\n");

  request.include_usage = false;
  const auto without = Answer::Create(request, kName);
  EXPECT_FALSE(EventOf(without->Add(0, Text("x", 0, kStop))).contains("usage"));
  EXPECT_EQ(without->Finish(), "data: [DONE]\n\n");
}

TEST(AnswerTest, LogprobsOfCompletionsNameTokensThatAreNoTextApart) {
  for (const bool stream : {false, true}) {
    ApiRequest request = MakeRequest(Api::kCompletions, stream);
    request.prompts[0]->mutable_sampling()->set_logprobs(2);
    const auto answer = Answer::Create(request, kName);
    GenerateResponse message = Text("\xC3\xA9 x", 0, kStop);
    AddToken(&message, "\xC3", -0.5, {{"\xC3", -0.5}, {"b", -1.5}});
    AddToken(&message, "\xA9", -0.25, {{"b", -1.5}});
    AddToken(&message, " x", -std::numeric_limits<float>::infinity());
    const std::string events = answer->Add(0, message);
    const json whole = stream ? EventOf(events) : json::parse(answer->Finish());
    EXPECT_EQ(whole["choices"][0]["logprobs"], json::parse(R"({
      "tokens": ["bytes:\\xc3", "bytes:\\xa9", " x"], "token_logprobs": [-0.5, -0.25, -9999.0],
      "text_offset": [0, 1, 1],
      "top_logprobs": [{"bytes:\\xc3": -0.5, "b": -1.5}, {"b": -1.5, "bytes:\\xa9": -0.25},
                       {" x": -9999.0}]})"));
  }
}

TEST(AnswerTest, AWholeChatSplitsTheReply) {
  ApiRequest request = MakeRequest(Api::kChat, false);
  request.reply = {.format = chat::Format::kR1, .in_reasoning = true, .tools = true};
  const auto answer = Answer::Create(request, kName);
  for (const char* const piece : {"Let me ", "see.</thi", "nk>Adding.", kBegin, "{\"a\": 1}"}) {
    EXPECT_EQ(answer->Add(0, Text(piece)), "");
  }
  answer->Add(0, Text(kEnd, 0, kStop));
  answer->Add(0, Summary(2, 3, 0));
  json object = json::parse(answer->Finish());
  EXPECT_EQ(object["id"], "chatcmpl-r1");
  EXPECT_EQ(object["object"], "chat.completion");
  json& choice = object["choices"][0];
  json& call = choice["message"]["tool_calls"][0];
  EXPECT_EQ(call["id"].get<std::string>().substr(0, 5), "call_");
  call.erase("id");
  EXPECT_EQ(choice, json::parse(R"({"index": 0, "message": {"role": "assistant",
    "content": "Adding.", "refusal": null, "reasoning_content": "Let me see.", "tool_calls": [
      {"type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]},
    "logprobs": null, "finish_reason": "tool_calls"})"));
}

TEST(AnswerTest, AReplyOfCallsAloneHasNoContent) {
  ApiRequest request = MakeRequest(Api::kChat, false);
  request.reply = {.format = chat::Format::kV3, .tools = true};
  const auto answer = Answer::Create(request, kName);
  answer->Add(0, Text(std::string(kBegin) + "{}" + kEnd, 0, kLength));
  const json choice = json::parse(answer->Finish())["choices"][0];
  EXPECT_TRUE(choice["message"]["content"].is_null());
  EXPECT_EQ(choice["finish_reason"], "length") << "the calls may go on";
  const auto empty = Answer::Create(request, kName);
  empty->Add(0, Text("", 0, kStop));
  EXPECT_EQ(json::parse(empty->Finish())["choices"][0]["message"]["content"], "");
}

TEST(AnswerTest, AStreamedChatAddsUpToTheWholeOne) {
  ApiRequest request = MakeRequest(Api::kChat, true, 1, 2);
  request.reply = {.format = chat::Format::kR1, .in_reasoning = true, .tools = true};
  const auto answer = Answer::Create(request, kName);
  const std::string reply = std::string("Why\xC3\xA9</think>Yes.") + kBegin + "{\"a\": 1}" + kEnd;
  json message = {{"content", ""}, {"reasoning_content", ""}, {"tool_calls", json::array()}};
  json finish;
  int roles = 0;
  // Characters stay whole, as a router gives them.
  for (size_t at = 0; at < reply.size();) {
    size_t length = 1;
    while (at + length < reply.size() &&
           (static_cast<unsigned char>(reply[at + length]) & 0xC0) == 0x80) {
      ++length;
    }
    const bool last = at + length == reply.size();
    const std::string events = answer->Add(
        0, Text(reply.substr(at, length), 1, last ? kStop : ferry::v1::FINISH_REASON_UNSPECIFIED));
    at += length;
    if (events.empty()) continue;
    const json event = EventOf(events);
    EXPECT_EQ(event["object"], "chat.completion.chunk");
    const json& choice = event["choices"][0];
    EXPECT_EQ(choice["index"], 1);
    finish = choice["finish_reason"];
    const json& delta = choice["delta"];
    roles += delta.contains("role");
    for (const char* const member : {"content", "reasoning_content"}) {
      message[member] = message[member].get<std::string>() + delta.value(member, "");
    }
    for (const json& call : delta.value("tool_calls", json::array()))
      message["tool_calls"].push_back(call);
  }
  EXPECT_EQ(roles, 1);
  EXPECT_EQ(finish, "tool_calls");
  EXPECT_EQ(message["content"], "Yes.");
  EXPECT_EQ(message["reasoning_content"], "Why\xC3\xA9");
  ASSERT_EQ(message["tool_calls"].size(), 1u);
  EXPECT_EQ(message["tool_calls"][0]["index"], 0);
  EXPECT_EQ(message["tool_calls"][0]["function"],
            json::parse(R"({"name": "add", "arguments": "{\"a\": 1}"})"));
  // The other branch has a message of its own.
  EXPECT_EQ(EventOf(answer->Add(0, Text("x", 0)))["choices"][0]["delta"]["role"], "assistant");
}

TEST(AnswerTest, LogprobsOfChatsCarryBytes) {
  ApiRequest request = MakeRequest(Api::kChat, true);
  request.prompts[0]->mutable_sampling()->set_logprobs(1);
  const auto answer = Answer::Create(request, kName);
  GenerateResponse half = Text("");
  AddToken(&half, "\xC3", -0.5, {{"b", -0.125}});
  const json event = EventOf(answer->Add(0, half));
  EXPECT_EQ(event["choices"][0]["logprobs"], json::parse(R"({"refusal": null, "content": [
    {"token": "\ufffd", "logprob": -0.5, "bytes": [195],
     "top_logprobs": [{"token": "b", "logprob": -0.125, "bytes": [98]}]}]})"));
}

}  // namespace
}  // namespace router::http
