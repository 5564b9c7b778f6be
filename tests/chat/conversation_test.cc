#include "chat/conversation.h"

#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace chat {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<Conversation> Parse(const std::string& text) {
  return ParseConversation(Json::parse(text));
}

TEST(ConversationTest, ReadsWhatOpenAiClientsSend) {
  const auto conversation = Parse(R"({"model": "m", "temperature": 1, "messages": [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
    {"role": "assistant", "content": null, "refusal": null, "annotations": [], "audio": null,
      "function_call": null, "reasoning_content": "r", "tool_calls": [
      {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"thinking": true}, "reasoning_effort": "max"})");
  ASSERT_TRUE(conversation.ok()) << conversation.status();
  ASSERT_EQ(conversation->messages.size(), 3u);
  EXPECT_EQ(conversation->messages[0].content, "a\nb");
  EXPECT_EQ(conversation->messages[1].content, std::nullopt);
  EXPECT_EQ(conversation->messages[1].reasoning_content, "r");
  EXPECT_EQ(conversation->messages[1].tool_calls.at(0).name, "f");
  EXPECT_EQ(conversation->messages[2].tool_call_id, "call_1");
  EXPECT_EQ(conversation->tools.at(0).parameters, R"({"type": "object"})");
  EXPECT_EQ(conversation->tools.at(0).function,
            R"({"name": "f", "parameters": {"type": "object"}})");
  EXPECT_EQ(conversation->thinking, true);
  EXPECT_TRUE(conversation->max_effort);
  EXPECT_TRUE(conversation->add_generation_prompt);
}

TEST(ConversationTest, NoneMeansNone) {
  const auto conversation = Parse(R"({"messages": [{"role": "user", "content": ""}],
    "tools": [{"function": {"name": "f"}}], "tool_choice": "none", "reasoning_effort": "none"})");
  ASSERT_TRUE(conversation.ok()) << conversation.status();
  EXPECT_TRUE(conversation->tools.empty());
  EXPECT_EQ(conversation->thinking, false);
}

TEST(ConversationTest, ErrorsNameTheMemberAndItsValue) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"([])", "the request is an array, expected an object"},
      {R"({})", "messages is missing"},
      {R"({"messages": []})", "messages is empty"},
      {R"({"messages": "hi"})", "messages is \"hi\", expected an array"},
      {R"({"messages": [7]})", "messages[0] is 7, expected an object"},
      {R"({"messages": [{"content": "a"}]})", "messages[0].role is missing"},
      {R"({"messages": [{"role": "bot", "content": "a"}]})",
       "messages[0].role is \"bot\", expected system, developer, user, assistant or tool"},
      {R"({"messages": [{"role": "user"}]})", "messages[0].content is missing"},
      {R"({"messages": [{"role": "user", "tool_calls": [{}]}]})",
       "messages[0].tool_calls is an array: there is no such member here"},
      {R"({"messages": [{"role": "user", "content": "a", "colour": "red"}]})",
       "messages[0].colour is \"red\": there is no such member here"},
      {R"({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]})",
       "messages[0].tool_call_id is \"x\": there is no such member here"},
      {R"({"messages": [{"role": "user", "content": "a", "name": 5}]})",
       "messages[0].name is 5, expected a string"},
      {R"({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]})",
       "messages[0].refusal is \"no\": there is no such member here"},
      {R"({"messages": [{"role": "assistant", "content": "a", "annotations": [1]}]})",
       "messages[0].annotations is an array, expected an empty array"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "size": 1}]}]})",
       "messages[0].content[0].size is 1: there is no such member here"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"kind": 1, "function": {}}]}]})",
       "messages[0].tool_calls[0].kind is 1: there is no such member here"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {}}]}]})",
       "messages[0].tool_calls[0].type is \"x\", expected \"function\""},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
           "arguments": "{}", "args": 1}}]}]})",
       "messages[0].tool_calls[0].function.args is 1: there is no such member here"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"type": "web_search",
           "function": {"name": "f"}}]})",
       "tools[0].type is \"web_search\", expected \"function\""},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"function": {"name": "f"},
           "cost": 1}]})",
       "tools[0].cost is 1: there is no such member here"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"function": {"name": "f",
           "params": {}}}]})",
       "tools[0].function.params is an object: there is no such member here"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"function": {"name": "f",
           "strict": "yes"}}]})",
       "tools[0].function.strict is \"yes\", expected true or false"},
      {R"({"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"think": 1}})",
       "chat_template_kwargs.think is 1: there is no such member here"},
      {R"({"messages": [{"role": "user", "content": 1}]})",
       "messages[0].content is 1, expected a string or an array of text parts"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})",
       "messages[0].content[0].type is \"image_url\": only text can be served"},
      {R"({"messages": [{"role": "assistant", "tool_calls": 1}]})",
       "messages[0].tool_calls is 1, expected an array"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]})",
       "messages[0].tool_calls[0].function.arguments is missing"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"function": {}}]})",
       "tools[0].function.name is missing"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"function": {"name": ""}}]})",
       "tools[0].function.name is empty"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"type": "web_search"}]})",
       "tools[0].type is \"web_search\", expected \"function\""},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"type": "function"}]})",
       "tools[0].function is missing"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": [{"function": "f"}]})",
       "tools[0].function is \"f\", expected an object"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]})",
       "messages[0].tool_calls[0].type is \"custom\", expected \"function\""},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]})",
       "messages[0].tool_calls[0].function is missing"},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "",
           "arguments": "{}"}}]}]})",
       "messages[0].tool_calls[0].function.name is empty"},
      {R"({"messages": [{"role": "user", "content": ""}], "tools": {}})",
       "tools is an object, expected an array"},
      {R"({"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"thinking": 1}})",
       "chat_template_kwargs.thinking is 1, expected true or false"},
  };
  for (const auto& [request, message] : cases) {
    const auto conversation = Parse(request);
    EXPECT_EQ(conversation.status().code(), absl::StatusCode::kInvalidArgument) << request;
    EXPECT_EQ(conversation.status().message(), message);
  }
}

TEST(ConversationTest, DeepNestingIsRefusedNotFollowed) {
  const std::string open(100000, '['), close(100000, ']');
  const auto conversation =
      Parse(R"({"messages": [{"role": "user", "content": ""}], "tools": )" + open + close + "}");
  EXPECT_EQ(conversation.status().message(), "the request is nested more than 128 levels deep");
}

}  // namespace
}  // namespace chat
