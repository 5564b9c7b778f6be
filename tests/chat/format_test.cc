#include "chat/format.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace chat {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using tokenizer::GoldenDir;
using tokenizer::ReadText;
using tokenizer::TempDir;

TEST(FormatTest, NamesAreReadBack) {
  for (const char* name : {"v2", "v3", "r1", "v3-0324", "r1-0528", "v3.1", "v3.2", "v4"}) {
    const auto format = FormatFromName(name);
    ASSERT_TRUE(format.ok()) << format.status();
    EXPECT_EQ(FormatName(*format), name);
  }
  EXPECT_EQ(FormatFromName("v5").status().message(),
            "chat format \"v5\" is none of v2, v3, r1, v3-0324, r1-0528, v3.1, v3.2, v4");
}

TEST(FormatTest, EveryPublishedTemplateIsKnown) {
  const json templates = json::parse(ReadText(GoldenDir() + "/chat/templates.json"));
  ASSERT_EQ(templates.size(), 6u);
  for (const auto& [name, text] : templates.items()) {
    const auto format = FormatOfTemplate(text.get<std::string>());
    ASSERT_TRUE(format.ok()) << name << ": " << format.status();
    EXPECT_EQ(FormatName(*format), name);
  }
}

TEST(FormatTest, OtherTemplatesAreRefusedWithAReason) {
  const std::string v3 = json::parse(ReadText(GoldenDir() + "/chat/templates.json"))["v3"];
  for (const auto& [text, why] :
       {std::pair<std::string, std::string>{"{{'<|im_start|>' + message['role']}}",
                                            "it does not write <｜User｜>"},
        {"", "it does not write <｜User｜>"},
        {v3 + "{{'<｜search▁begin｜>'}}", "it writes <｜search▁begin｜>"},
        {v3 + "{{'<|EOT|>'}}", "it writes <|EOT|>"},
        {v3 + "{{'<think>'}}", "it treats reasoning as no published one does"}}) {
    const auto format = FormatOfTemplate(text);
    EXPECT_EQ(format.status().message(), "chat_template is none that Ferry knows: " + why);
  }
}

TEST(FormatTest, CheckpointsSayTheirFormat) {
  const auto name = [](const TempDir& dir) {
    const auto format = FormatOfCheckpoint(dir.path());
    return format.ok() ? std::string(FormatName(*format)) : std::string(format.status().message());
  };
  const json templates = json::parse(ReadText(GoldenDir() + "/chat/templates.json"));
  TempDir dir;
  dir.Write("config.json", R"({"model_type": "deepseek_v4"})");
  EXPECT_EQ(name(dir), "v4");
  dir.Write("config.json", R"({"model_type": "deepseek_v32"})");
  dir.Write("tokenizer_config.json", "{}");
  EXPECT_EQ(name(dir), "v3.2");
  // V3.2-Exp has the model_type of V3.2 and the template of V3.1.
  dir.Write("tokenizer_config.json", json{{"chat_template", templates["v3.1"]}}.dump());
  EXPECT_EQ(name(dir), "v3.1");
  dir.Write("tokenizer_config.json", json{{"chat_template",
                                           {{{"name", "rag"}, {"template", "x"}},
                                            {{"name", "default"}, {"template", templates["r1"]}}}}}
                                         .dump());
  EXPECT_EQ(name(dir), "r1");
  dir.Write("chat_template.jinja", templates["v2"].get<std::string>());
  EXPECT_EQ(name(dir), "v2");
}

TEST(FormatTest, ACheckpointWithoutAKnownTemplateHasNoChat) {
  TempDir dir;
  dir.Write("config.json", R"({"model_type": "deepseek_v3"})");
  const auto none = FormatOfCheckpoint(dir.path());
  EXPECT_EQ(none.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      none.status().message(),
      "no chat with this checkpoint, only completions: " + dir.path() +
          " has no chat_template; --chat_format names a format (v2, v3, r1, v3-0324, r1-0528, "
          "v3.1, v3.2, v4)");
  dir.Write("chat_template.jinja", "{{ messages }}");
  EXPECT_THAT(std::string(FormatOfCheckpoint(dir.path()).status().message()),
              HasSubstr("chat_template.jinja: chat_template is none that Ferry knows: it does not "
                        "write <｜User｜>; --chat_format"));
}

TEST(FormatTest, RoleMarkersMustBeTokens) {
  EXPECT_TRUE(CheckVocabulary(Format::kV3, tokenizer::DeepSeekV3()).ok());
  EXPECT_EQ(CheckVocabulary(Format::kV4, tokenizer::DeepSeekV3()).message(),
            "chat format v4 needs the token ｜DSML｜, which the tokenizer does not have");
}

}  // namespace
}  // namespace chat
