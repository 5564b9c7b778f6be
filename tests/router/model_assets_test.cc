#include "router/model_assets.h"

#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kConfig[] =
    R"({"vocab_size": 512, "max_position_embeddings": 2048, "eos_token_id": 1})";

TEST(ModelAssetsTest, ReadsTheThreeFiles) {
  tokenizer::TempDir dir;
  dir.Write("config.json", kConfig);
  dir.Write("tokenizer.json", tokenizer::TinyTokenizer().dump());
  dir.Write("generation_config.json",
            R"({"eos_token_id": [1, 7], "temperature": 0.6, "top_p": 0.95, "do_sample": true})");
  const auto assets = ModelAssets::Load("name=" + dir.path());
  ASSERT_TRUE(assets.ok()) << assets.status();
  const ModelAssets& model = **assets;
  EXPECT_EQ(model.name, "name");
  EXPECT_EQ(model.vocab_size, 512);
  EXPECT_EQ(model.context_tokens(), 2048);
  EXPECT_THAT(model.eos_ids, ElementsAre(1, 7));
  EXPECT_FLOAT_EQ(model.defaults.temperature.value(), 0.6f);
  EXPECT_FLOAT_EQ(model.defaults.top_p.value(), 0.95f);
  EXPECT_FALSE(model.defaults.top_k.has_value());
  ASSERT_NE(model.tokenizer, nullptr);
  EXPECT_EQ(model.tokenizer_hash, model.tokenizer->hash());
  EXPECT_EQ(model.longest_token_bytes, 1u);
  EXPECT_FALSE(model.is_served());
  (*assets)->SetWorkerLimits(WorkerLimits::OfContext(100));
  EXPECT_TRUE(model.is_served());
  EXPECT_EQ(model.context_tokens(), 100);
  EXPECT_EQ(model.lengths().prompt(), 99);
  (*assets)->SetWorkerLimits(WorkerLimits::OfContext(5000));
  EXPECT_EQ(model.context_tokens(), 2048) << "config.json's";
  EXPECT_EQ(model.lengths().prompt(), 2047);
}

TEST(ModelAssetsTest, ConfigAloneIsEnoughAndTheNameIsTheDirectorys) {
  tokenizer::TempDir dir;
  dir.Write("config.json", R"({"vocab_size": 16, "eos_token_id": null})");
  const auto assets = ModelAssets::Load(dir.path() + "/");
  ASSERT_TRUE(assets.ok()) << assets.status();
  EXPECT_EQ((*assets)->name, std::filesystem::path(dir.path()).filename().string());
  EXPECT_EQ((*assets)->tokenizer, nullptr);
  EXPECT_TRUE((*assets)->eos_ids.empty());
  EXPECT_EQ((*assets)->context_tokens(), 0);
}

TEST(ModelAssetsTest, GreedyByDefaultWhenTheCheckpointSaysSo) {
  tokenizer::TempDir dir;
  dir.Write("config.json", kConfig);
  dir.Write("generation_config.json", R"({"do_sample": false})");
  const auto assets = ModelAssets::Load(dir.path());
  ASSERT_TRUE(assets.ok()) << assets.status();
  EXPECT_EQ((*assets)->defaults.temperature.value(), 0);
  EXPECT_THAT((*assets)->eos_ids, ElementsAre(1)) << "config.json's";
}

TEST(ModelAssetsTest, AnEosThatTheModelCannotSayIsNone) {
  tokenizer::TempDir dir;
  dir.Write("config.json", R"({"vocab_size": 16, "eos_token_id": [16, 15, 100000]})");
  const auto assets = ModelAssets::Load(dir.path());
  ASSERT_TRUE(assets.ok()) << assets.status();
  EXPECT_THAT((*assets)->eos_ids, ElementsAre(15));
}

TEST(ModelAssetsTest, BadFilesGiveOneSentence) {
  const struct {
    const char* config;
    const char* generation;
    const char* words;
  } cases[] = {
      {"[1]", "{}", "config.json is not a JSON object"},
      {"{", "{}", "config.json is not a JSON object"},
      {"{}", "{}", "config.json: vocab_size is missing"},
      {R"({"vocab_size": -3})", "{}", "vocab_size is -3, expected a positive integer"},
      {R"({"vocab_size": "x"})", "{}", "vocab_size is \"x\""},
      {R"({"vocab_size": 4, "eos_token_id": "</s>"})", "{}", "eos_token_id is \"</s>\""},
      {kConfig, R"({"eos_token_id": [1, 2, 3, 4, 5, 6, 7, 8, 9]})",
       "eos_token_id has 9 ids, at most 8"},
      {kConfig, R"({"top_p": 2})", "generation_config.json: top_p is 2"},
      {kConfig, R"({"temperature": [1]})", "temperature is [1]"},
  };
  for (const auto& bad : cases) {
    SCOPED_TRACE(bad.words);
    tokenizer::TempDir dir;
    dir.Write("config.json", bad.config);
    dir.Write("generation_config.json", bad.generation);
    const auto assets = ModelAssets::Load(dir.path());
    ASSERT_FALSE(assets.ok());
    EXPECT_EQ(assets.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(assets.status().message()), HasSubstr(bad.words));
  }
  EXPECT_EQ(ModelAssets::Load("x=/nowhere/at/all").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ModelAssets::Load("x=").status().code(), absl::StatusCode::kInvalidArgument);
}

// As in a download that was cut off: each of them would say something else of the model.
TEST(ModelAssetsTest, AnOptionalFileThatIsABrokenLinkIsNotTakenForLeftOut) {
  for (const char* name : {"generation_config.json", "tokenizer.json", "chat_template.jinja",
                           "tokenizer_config.json"}) {
    for (const char* target : {"nowhere", name}) {  // the other one is a circle
      tokenizer::TempDir dir;
      dir.Write("config.json", kConfig);
      if (std::string(name) != "tokenizer.json") {
        dir.Write("tokenizer.json", tokenizer::TinyTokenizer().dump());
      }
      const std::string path = dir.path() + "/" + name;
      std::filesystem::create_symlink(target, path);
      EXPECT_EQ(ModelAssets::Load(dir.path()).status(),
                absl::InvalidArgumentError(path + ": a link that leads to no file"));
    }
  }
}

// The tiny tokenizer with these tokens added.
std::string TokenizerWith(const std::vector<std::string>& tokens) {
  nlohmann::json json = tokenizer::TinyTokenizer();
  int id = 256;
  for (const std::string& token : tokens) {
    json["added_tokens"].push_back({{"id", id++},
                                    {"content", token},
                                    {"special", true},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", false}});
  }
  return json.dump();
}

TEST(ModelAssetsTest, TheChatFormatIsTheCheckpointsOrTheReasonWhyThereIsNone) {
  tokenizer::TempDir dir;
  const auto load = [&] { return ModelAssets::Load("m=" + dir.path()).value(); };
  const auto why = [&] { return std::string(load()->chat_format.status().message()); };
  dir.Write("config.json", kConfig);
  EXPECT_THAT(why(), HasSubstr("has no tokenizer.json"));
  const std::vector<std::string> markers = {"<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"};
  dir.Write("tokenizer.json", TokenizerWith(markers));
  EXPECT_THAT(why(), HasSubstr("has no chat_template"));
  dir.Write("chat_template.jinja", "{{ messages }}");
  EXPECT_THAT(why(), HasSubstr("no chat with this checkpoint, only completions"));
  const auto assets = load();
  EXPECT_EQ(assets->UseChatFormat("v2"), absl::OkStatus());
  EXPECT_EQ(*assets->chat_format, chat::Format::kV2);
  EXPECT_THAT(std::string(assets->UseChatFormat("v3").message()), HasSubstr("<｜User｜>"));
  EXPECT_THAT(std::string(assets->UseChatFormat("v9").message()), HasSubstr("\"v9\" is none of"));
  dir.Write("chat_template.jinja", "'User: ' 'Assistant: '");
  EXPECT_EQ(*load()->chat_format, chat::Format::kV2);
  dir.Write("tokenizer.json", TokenizerWith({markers[0]}));
  EXPECT_THAT(why(), HasSubstr("<｜end▁of▁sentence｜>"));
}

}  // namespace
}  // namespace router
