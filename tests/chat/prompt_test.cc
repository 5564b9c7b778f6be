#include "chat/prompt.h"

#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace chat {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

absl::StatusOr<std::string> Render(Format format, const Json& request) {
  const absl::StatusOr<Conversation> conversation = ParseConversation(request);
  if (!conversation.ok()) return conversation.status();
  return RenderPrompt(format, *conversation);
}

Json Golden(const std::string& name) {
  return Json::parse(tokenizer::ReadText(tokenizer::GoldenDir() + "/chat/" + name));
}

TEST(PromptTest, EqualsTheRowsOfTransformers) {
  const Json rows = Golden("chat_golden.json");
  ASSERT_GE(rows.size(), 8u);
  for (const Json& row : rows) {
    const auto text = Render(Format::kV3, row);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(*text, row["text"].get<std::string>());
  }
}

TEST(PromptTest, EqualsTheRowsOfEveryFormat) {
  std::map<std::string, int> rows;
  for (const Json& row : Golden("format_rows.json")) {
    const auto name = row["format"].get<std::string>();
    const auto format = FormatFromName(name);
    ASSERT_TRUE(format.ok()) << format.status();
    const auto text = Render(*format, row);
    ASSERT_TRUE(text.ok()) << text.status() << "\n" << row;
    EXPECT_EQ(*text, row["text"].get<std::string>()) << row;
    ++rows[name];
  }
  EXPECT_EQ(rows.size(), 8u);
  for (const auto& [name, count] : rows) EXPECT_GE(count, 8) << name;
}

Json Ask(const char* role = "user") {
  return {{"messages", {{{"role", role}, {"content", "Hi"}}}}};
}

Json WithTool(Json request) {
  request["tools"] = {{{"type", "function"}, {"function", {{"name", "f"}}}}};
  return request;
}

TEST(PromptTest, DevelopersAreSystemsWhereTheFormatHasNone) {
  EXPECT_EQ(*Render(Format::kV3, Ask("developer")), *Render(Format::kV3, Ask("system")));
  EXPECT_NE(*Render(Format::kV32, Ask("developer")), *Render(Format::kV32, Ask("system")));
}

TEST(PromptTest, ToolsOfV3StandBehindTheSystemMessage) {
  EXPECT_EQ(
      *Render(Format::kV3, WithTool(Ask())),
      "<｜begin▁of▁sentence｜>\n\n## Tools\n\n### Function\n\nYou have the following functions "
      "available:\n\n- `f`:\n```json\n{\"name\": "
      "\"f\"}\n```\n<｜User｜>Hi<｜Assistant｜>");
}

TEST(PromptTest, WhatAFormatCannotSayIsRefused) {
  EXPECT_EQ(Render(Format::kV2, WithTool(Ask())).status().message(), "chat format v2 has no tools");
  EXPECT_EQ(Render(Format::kV2, Ask("tool")).status().message(),
            "messages[0]: chat format v2 has no tools");
  EXPECT_EQ(Render(Format::kV31, Ask("latest_reminder")).status().message(),
            "messages[0]: chat format v3.1 has no role latest_reminder");
  Json own_tools = Ask();
  own_tools["messages"][0] = WithTool(own_tools["messages"][0]);
  EXPECT_THAT(std::string(Render(Format::kV3, own_tools).status().message()),
              HasSubstr("messages[0]: chat format v3 has no tools of a message"));
  EXPECT_TRUE(Render(Format::kV4, own_tools).ok());
}

TEST(PromptTest, V32RefusesResultsThatDoNotMatchTheCalls) {
  EXPECT_EQ(Render(Format::kV32, Ask("tool")).status().message(),
            "a message of role tool answers none of the 0 tool_calls before it");
  Json request = Ask();
  const Json call = {{"function", {{"name", "f"}, {"arguments", "{}"}}}};
  request["messages"].push_back({{"role", "assistant"}, {"tool_calls", {call, call}}});
  request["messages"].push_back({{"role", "tool"}, {"content", "1"}});
  EXPECT_EQ(Render(Format::kV32, request).status().message(),
            "1 messages of role tool answer 2 tool_calls");
}

TEST(PromptTest, ArgumentsThatAreNoObjectGoAsTheyAre) {
  const auto deep = std::string(100000, '[') + std::string(100000, ']');
  for (const std::string& arguments :
       {std::string("{\"a\": 1"), std::string("[1]"), "{\"a\": " + deep + "}"}) {
    Json request = Ask();
    request["messages"].push_back(
        {{"role", "assistant"},
         {"tool_calls", {{{"function", {{"name", "f"}, {"arguments", arguments}}}}}}});
    EXPECT_THAT(*Render(Format::kV4, request),
                HasSubstr("<｜DSML｜parameter name=\"arguments\" string=\"true\">" + arguments +
                          "</｜DSML｜parameter>"));
  }
}

// The parser must be told the state that the prompt leaves the model in.
TEST(PromptTest, ReasoningBeginsExactlyWherePromptsOpenIt) {
  for (const Json& row : Golden("format_rows.json")) {
    const auto format = FormatFromName(row["format"].get<std::string>());
    const auto text = row["text"].get<std::string>();
    const bool opened = text.ends_with("<think>") || text.ends_with("<think>\n");
    EXPECT_EQ(ReplyBeginsInReasoning(*format, *ParseConversation(row)), opened) << row;
  }
}

}  // namespace
}  // namespace chat
