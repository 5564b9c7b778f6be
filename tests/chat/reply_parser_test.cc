#include "chat/reply_parser.h"

#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace chat {

bool operator==(const ToolCall& a, const ToolCall& b) {
  return a.id == b.id && a.type == b.type && a.name == b.name && a.arguments == b.arguments;
}
bool operator==(const ReplyDelta& a, const ReplyDelta& b) {
  return a.reasoning_content == b.reasoning_content && a.content == b.content &&
         a.tool_calls == b.tool_calls;
}
void PrintTo(const ReplyDelta& delta, std::ostream* out) {
  *out << "reasoning " << testing::PrintToString(delta.reasoning_content) << ", content "
       << testing::PrintToString(delta.content);
  for (const ToolCall& call : delta.tool_calls) {
    *out << ", " << call.type << " " << call.name << "(" << call.arguments << ")";
  }
}

namespace {

void Add(ReplyDelta delta, ReplyDelta* sum) {
  sum->reasoning_content += delta.reasoning_content;
  sum->content += delta.content;
  for (ToolCall& call : delta.tool_calls) sum->tool_calls.push_back(std::move(call));
}

ReplyDelta Parse(const ReplyParser::Options& options, const std::vector<std::string_view>& pieces) {
  ReplyParser parser(options);
  ReplyDelta sum;
  for (const std::string_view piece : pieces) Add(parser.Append(piece), &sum);
  Add(parser.Finish(), &sum);
  return sum;
}

struct Case {
  const char* name;
  Format format;
  bool in_reasoning;
  std::string text;
  ReplyDelta expected;
};

std::string Section(const std::string& calls) {
  return "<｜tool▁calls▁begin｜>" + calls + "<｜tool▁calls▁end｜>";
}
std::string V3Call(const std::string& name, const std::string& arguments) {
  return "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + name + "\n```json\n" + arguments +
         "\n```<｜tool▁call▁end｜>";
}
std::string V31Call(const std::string& name, const std::string& arguments) {
  return "<｜tool▁call▁begin｜>" + name + "<｜tool▁sep｜>" + arguments + "<｜tool▁call▁end｜>";
}
ToolCall Call(const std::string& name, const std::string& arguments) {
  ToolCall call;
  call.name = name;
  call.arguments = arguments;
  return call;
}

const std::string kInvoke =
    "<｜DSML｜invoke name=\"search\">\n"
    "<｜DSML｜parameter name=\"q\" string=\"true\">a \"b\" <c>\n</｜DSML｜parameter>\n"
    "<｜DSML｜parameter name=\"n\" string=\"false\">[1, {\"k\": null}]</｜DSML｜parameter>\n"
    "</｜DSML｜invoke>\n";
const char kInvoked[] = "{\"q\": \"a \\\"b\\\" <c>\\n\", \"n\": [1, {\"k\": null}]}";

std::vector<Case> Cases() {
  const std::string opened = "<｜tool▁calls▁begin｜>";
  return {
      {"plain", Format::kV3, false, "Hello <b> 你好", {"", "Hello <b> 你好", {}}},
      {"empty", Format::kV3, true, "", {}},
      {"prompt opened it", Format::kR1, true, "hm\n</think>\n\nYes", {"hm\n", "\n\nYes", {}}},
      {"model opened it too", Format::kR1, true, "<think>hm</think>Yes", {"hm", "Yes", {}}},
      {"model opened it", Format::kR1_0528, false, "<think>hm</think>Yes", {"hm", "Yes", {}}},
      {"cut in reasoning", Format::kV31, true, "hm </thin", {"hm </thin", "", {}}},
      {"cut in the opening", Format::kV31, false, "<thi", {"", "<thi", {}}},
      {"later marks are text",
       Format::kV31,
       false,
       "a<think>b</think>",
       {"", "a<think>b</think>", {}}},
      {"v2 has no reasoning", Format::kV2, false, "<think>a</think>", {"", "<think>a</think>", {}}},
      {"v3 calls",
       Format::kV3,
       false,
       "One moment." + Section(V3Call("f", "{\"a\": \"```\"}") + "\n" + V3Call("g", "{}")),
       {"", "One moment.", {Call("f", "{\"a\": \"```\"}"), Call("g", "{}")}}},
      {"v3 calls not closed",
       Format::kV3,
       false,
       opened + V3Call("f", "{}") + "\n",
       {"", "", {Call("f", "{}")}}},
      {"r1 calls behind reasoning",
       Format::kR1,
       true,
       "hm</think>" + Section(V3Call("f", "{}")),
       {"hm", "", {Call("f", "{}")}}},
      {"v3.1 calls",
       Format::kV31,
       false,
       Section(V31Call("f", "{\"a\": 1}") + V31Call("g", "{}")) + "!",
       {"", "!", {Call("f", "{\"a\": 1}"), Call("g", "{}")}}},
      {"cut in the first call",
       Format::kV31,
       false,
       "a" + opened + "<｜tool▁call▁begin｜>f",
       {"", "a" + opened + "<｜tool▁call▁begin｜>f", {}}},
      {"cut in the second call",
       Format::kV31,
       false,
       opened + V31Call("f", "{}") + "<｜tool▁call▁begin｜>g",
       {"", "<｜tool▁call▁begin｜>g", {Call("f", "{}")}}},
      {"no call in the section",
       Format::kV31,
       false,
       opened + " what? " + V31Call("f", "{}"),
       {"", opened + " what? " + V31Call("f", "{}"), {}}},
      {"a call without a name",
       Format::kV3,
       false,
       Section(V3Call("", "{}")),
       {"", Section(V3Call("", "{}")), {}}},
      {"nearly a section", Format::kV3, false, "<｜tool▁calls▁", {"", "<｜tool▁calls▁", {}}},
      {"v3.2 calls",
       Format::kV32,
       true,
       "hm</think>Look:\n\n<｜DSML｜function_calls>\n" + kInvoke + kInvoke +
           "</｜DSML｜function_calls>",
       {"hm", "Look:", {Call("search", kInvoked), Call("search", kInvoked)}}},
      {"v4 calls",
       Format::kV4,
       false,
       "<｜DSML｜tool_calls>\n" + kInvoke + "</｜DSML｜tool_calls>",
       {"", "", {Call("search", kInvoked)}}},
      {"v4 call without arguments",
       Format::kV4,
       false,
       "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke "
       "name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
       {"", "", {Call("f", "{}")}}},
      {"v4 value that is no json",
       Format::kV4,
       false,
       "<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"a\" "
       "string=\"false\">x y</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
       {"", "", {Call("f", "{\"a\": \"x y\"}")}}},
      {"blank lines are kept", Format::kV4, false, "a\n\n<b>\n\n", {"", "a\n\n<b>\n\n", {}}},
  };
}

ReplyParser::Options OptionsOf(const Case& one) {
  return {one.format, one.in_reasoning, /*tools=*/true};
}

TEST(ReplyParserTest, SplitsAWholeReply) {
  for (const Case& one : Cases()) {
    EXPECT_EQ(Parse(OptionsOf(one), {one.text}), one.expected) << one.name;
  }
}

// Every cut into two, byte by byte, and random ones.
TEST(ReplyParserTest, HoweverTheTextIsCut) {
  std::mt19937 random(20261130);
  for (const Case& one : Cases()) {
    const std::string_view text = one.text;
    std::vector<std::string_view> bytes;
    for (size_t i = 0; i < text.size(); ++i) {
      bytes.push_back(text.substr(i, 1));
      ASSERT_EQ(Parse(OptionsOf(one), {text.substr(0, i), text.substr(i)}), one.expected)
          << one.name << " cut at " << i;
    }
    ASSERT_EQ(Parse(OptionsOf(one), bytes), one.expected) << one.name;
    for (int run = 0; run < 200; ++run) {
      std::vector<std::string_view> pieces;
      for (std::string_view rest = text; !rest.empty();) {
        const size_t size = std::min<size_t>(1 + random() % 20, rest.size());
        pieces.push_back(rest.substr(0, size));
        rest.remove_prefix(size);
      }
      ASSERT_EQ(Parse(OptionsOf(one), pieces), one.expected) << one.name << " run " << run;
    }
  }
}

// Whatever a reply is, what comes out does not depend on the cut; without tools nothing is lost but
// <think> and </think>.
TEST(ReplyParserTest, RandomSequencesOfMarkers) {
  std::mt19937 random(7);
  const std::vector<std::string> parts = {"<think>",
                                          "</think>",
                                          "<｜tool▁calls▁begin｜>",
                                          "<｜tool▁calls▁end｜>",
                                          V3Call("f", "{}"),
                                          V31Call("f", "{}"),
                                          "<｜DSML｜tool_calls>",
                                          "</｜DSML｜tool_calls>",
                                          "\n\n<｜DSML｜function_calls>",
                                          "</｜DSML｜function_calls>",
                                          kInvoke,
                                          "\n",
                                          " ",
                                          "text",
                                          "<",
                                          "｜"};
  for (int run = 0; run < 3000; ++run) {
    std::string text;
    for (int i = random() % 8; i >= 0; --i) text += parts[random() % parts.size()];
    const ReplyParser::Options options = {static_cast<Format>(random() % 8), random() % 2 == 0,
                                          /*tools=*/random() % 4 != 0};
    const ReplyDelta whole = Parse(options, {text});
    const size_t cut = random() % (text.size() + 1);
    const std::string_view view = text;
    ASSERT_EQ(Parse(options, {view.substr(0, cut), view.substr(cut)}), whole) << text;
    std::vector<std::string_view> bytes;
    for (size_t i = 0; i < view.size(); ++i) bytes.push_back(view.substr(i, 1));
    ASSERT_EQ(Parse(options, bytes), whole) << text;
    if (!options.tools) {
      EXPECT_TRUE(whole.tool_calls.empty());
      EXPECT_GE(
          whole.reasoning_content.size() + whole.content.size() + sizeof("<think></think>") - 1,
          text.size());
    }
  }
}

TEST(ReplyParserTest, TextIsNotHeldBackWithoutNeed) {
  ReplyParser parser({Format::kV31, /*in_reasoning=*/true, /*tools=*/true});
  EXPECT_EQ(parser.Append("Let me").reasoning_content, "Let me");
  EXPECT_EQ(parser.Append(" see <").reasoning_content, " see ");
  EXPECT_EQ(parser.Append("b>").reasoning_content, "<b>");
  EXPECT_EQ(parser.Append("</think>Yes").content, "Yes");
  EXPECT_EQ(parser.Append("<｜tool▁calls▁begin｜>").content, "");
  EXPECT_EQ(parser.Append(V31Call("f", "{}")).tool_calls.size(), 1u);
}

// Quadratic work would take minutes here.
TEST(ReplyParserTest, LongCallsAndBlanksTakeLinearTime) {
  for (const std::string& filling : {std::string("x"), std::string("\n")}) {
    ReplyParser parser({Format::kV31, /*in_reasoning=*/false, /*tools=*/true});
    parser.Append("<｜tool▁calls▁begin｜>");
    if (filling == "x") parser.Append("<｜tool▁call▁begin｜>f<｜tool▁sep｜>");
    for (int i = 0; i < 1000000; ++i) parser.Append(filling);
    if (filling == "\n") parser.Append("<｜tool▁call▁begin｜>f<｜tool▁sep｜>");
    EXPECT_EQ(parser.Append("<｜tool▁call▁end｜>").tool_calls.size(), 1u);
  }
}

TEST(ReplyParserTest, WithoutToolsMarkersAreText) {
  const std::string text = Section(V3Call("f", "{}"));
  EXPECT_EQ(Parse({Format::kV3, false, /*tools=*/false}, {text}), (ReplyDelta{"", text, {}}));
}

}  // namespace
}  // namespace chat
