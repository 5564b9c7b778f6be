// Damaged and unsupported files: each is one clear error.

#include <functional>
#include <string>

#include "gtest/gtest.h"
#include "tests/tokenizer/tiny_tokenizer.h"
#include "tokenizer/tokenizer.h"

namespace tokenizer {
namespace {

using nlohmann::json;

struct Damage {
  const char* name;
  std::function<void(json&)> apply;
  const char* message;  // part of the error
};

const Damage kDamages[] = {
    {"no model", [](json& j) { j.erase("model"); }, "tokenizer.json: model: missing"},
    {"model is a list", [](json& j) { j["model"] = json::array(); },
     "model: need an object, found []"},
    {"unigram", [](json& j) { j["model"]["type"] = "Unigram"; },
     "only BPE is supported, found Unigram"},
    {"vocabulary is a list", [](json& j) { j["model"]["vocab"] = json::array(); },
     "model.vocab: need an object, found array"},
    {"no vocabulary", [](json& j) { j["model"].erase("vocab"); }, "model.vocab: missing"},
    {"id is text", [](json& j) { j["model"]["vocab"]["a"] = "7"; },
     "model.vocab[\"a\"]: need an id in [0, 16777216), found \"7\""},
    {"id is negative", [](json& j) { j["model"]["vocab"]["a"] = -1; }, "found -1"},
    {"id is a fraction", [](json& j) { j["model"]["vocab"]["a"] = 1.5; }, "found 1.5"},
    {"id is huge", [](json& j) { j["model"]["vocab"]["a"] = 4294967296; }, "found 4294967296"},
    {"two tokens of one id", [](json& j) { j["model"]["vocab"]["ab"] = 7; }, "id 7 is"},
    {"a byte without token", [](json& j) { j["model"]["vocab"].erase("a"); },
     "no token for byte 97"},
    {"no merges", [](json& j) { j["model"].erase("merges"); }, "model.merges: missing"},
    {"merges are an object", [](json& j) { j["model"]["merges"] = json::object(); },
     "model.merges: need an array, found object"},
    {"merge of an unknown token", [](json& j) { j["model"]["merges"] = {"a zz"}; },
     "model.merges[0]: \"zz\" is not in the vocabulary"},
    {"merge into an unknown token", [](json& j) { j["model"]["merges"] = {"a b"}; },
     "model.merges[0]: \"ab\" is not in the vocabulary"},
    {"merge of three", [](json& j) { j["model"]["merges"] = {"a b c"}; },
     "need \"left right\", found"},
    {"merge of one", [](json& j) { j["model"]["merges"] = {"a"}; }, "need \"left right\", found"},
    {"merge is a number", [](json& j) { j["model"]["merges"] = {1}; }, "model.merges[0]: need"},
    {"merge pair of numbers",
     [](json& j) {
       j["model"]["merges"] = {{1, 2}};
     },
     "model.merges[0]: need"},
    {"byte fallback", [](json& j) { j["model"]["byte_fallback"] = true; },
     "byte_fallback: not supported"},
    {"ignore_merges is text", [](json& j) { j["model"]["ignore_merges"] = "yes"; },
     "ignore_merges: need true or false"},
    {"dropout", [](json& j) { j["model"]["dropout"] = 0.1; }, "dropout: not supported"},
    {"word suffix", [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; },
     "end_of_word_suffix: not supported"},
    {"normalizer",
     [](json& j) {
       j["normalizer"] = {{"type", "NFC"}};
     },
     "normalizer: the normalizer NFC is not supported"},
    {"normalizer in a sequence",
     [](json& j) {
       j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}};
     },
     "the normalizer Lowercase is not supported"},
    {"no pre-tokenizer", [](json& j) { j["pre_tokenizer"] = nullptr; }, "found no ByteLevel"},
    {"metaspace",
     [](json& j) {
       j["pre_tokenizer"] = {{"type", "Metaspace"}};
     },
     "pre_tokenizer: the pre-tokenizer Metaspace is not supported"},
    {"split after ByteLevel",
     [](json& j) {
       j["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}});
     },
     "pretokenizers[1]: Digits after ByteLevel is not supported"},
    {"bad regex",
     [](json& j) {
       j["pre_tokenizer"] = {
           {"type", "Sequence"},
           {"pretokenizers",
            {{{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}},
             {{"type", "ByteLevel"}}}}};
     },
     "pattern of split 0: missing closing parenthesis"},
    {"unknown behaviour",
     [](json& j) {
       j["pre_tokenizer"] = {
           {"type", "Split"}, {"pattern", {{"String", "a"}}}, {"behavior", "Sideways"}};
     },
     "behavior: \"Sideways\" is not known"},
    {"pattern of neither kind",
     [](json& j) {
       j["pre_tokenizer"] = {{"type", "Split"}, {"pattern", "a"}, {"behavior", "Isolated"}};
     },
     "pre_tokenizer.pattern: need"},
    {"decoder",
     [](json& j) {
       j["decoder"] = {{"type", "Metaspace"}};
     },
     "decoder: only ByteLevel is supported"},
    {"post-processor",
     [](json& j) {
       j["post_processor"] = {{"type", "BertProcessing"}};
     },
     "the post-processor BertProcessing is not supported"},
    {"template with an unknown token",
     [](json& j) {
       j["post_processor"] = {
           {"type", "TemplateProcessing"},
           {"single", {{{"SpecialToken", {{"id", "<x>"}}}}, {{"Sequence", {}}}}}};
     },
     "\"<x>\" is not a token"},
    {"added tokens are an object", [](json& j) { j["added_tokens"] = json::object(); },
     "added_tokens: need an array"},
    {"added token without id",
     [](json& j) {
       j["added_tokens"] = {{{"content", "<s>"}}};
     },
     "added_tokens[0].id: missing"},
    {"added token of a huge id",
     [](json& j) {
       j["added_tokens"] = {{{"id", 1 << 30}, {"content", "<s>"}}};
     },
     "added_tokens[0].id: need an id in"},
    {"added token without text",
     [](json& j) {
       j["added_tokens"] = {{{"id", 300}, {"content", ""}}};
     },
     "added_tokens[0].content: empty"},
    {"added token takes an id",
     [](json& j) {
       j["added_tokens"] = {{{"id", 97}, {"content", "<s>"}}};
     },
     "id 97 is \"a\" and \"<s>\""},
    {"added token of two ids",
     [](json& j) {
       j["added_tokens"] = {{{"id", 300}, {"content", "a"}}};
     },
     "\"a\" has the ids 97 and 300"},
};

TEST(TokenizerFileTest, EachDamageIsOneClearError) {
  for (const Damage& damage : kDamages) {
    SCOPED_TRACE(damage.name);
    json tokenizer = TinyTokenizer();
    damage.apply(tokenizer);
    const auto loaded = LoadFrom(tokenizer.dump());
    ASSERT_FALSE(loaded.ok());
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
    const std::string message(loaded.status().message());
    EXPECT_NE(message.find(damage.message), std::string::npos) << message;
    EXPECT_NE(message.find("/tokenizer.json: "), std::string::npos) << message;
  }
}

TEST(TokenizerFileTest, AFileCutAnywhereIsAnError) {
  const std::string whole = TinyTokenizer().dump();
  ASSERT_TRUE(LoadFrom(whole).ok());
  for (size_t size = 0; size < whole.size(); size += 1 + size / 16) {
    const auto loaded = LoadFrom(whole.substr(0, size));
    ASSERT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument) << size;
    EXPECT_NE(loaded.status().message().find("tokenizer.json: not JSON"), std::string::npos);
  }
}

TEST(TokenizerFileTest, NotAnObjectAndNotText) {
  EXPECT_FALSE(LoadFrom("[]").ok());
  EXPECT_FALSE(LoadFrom("null").ok());
  EXPECT_FALSE(LoadFrom(std::string("\xFF\xFE\0\0", 4)).ok());
  EXPECT_FALSE(LoadFrom(std::string(1 << 20, '[')).ok());
}

TEST(TokenizerFileTest, BadConfigurationsNameTheirFile) {
  const std::string tokenizer = TinyTokenizer().dump();
  const std::pair<std::string, const char*> cases[] = {
      {"{", "tokenizer_config.json: not JSON"},
      {"", "tokenizer_config.json: not JSON"},
      {"{\"a\": 1e999}", "tokenizer_config.json: a number is too large for a 64-bit float"},
      {"{\"a\": " + std::string(100000, '[') + std::string(100000, ']') + "}",
       "tokenizer_config.json: values are nested deeper than 64 levels"},
      {"[]", "tokenizer_config.json: need an object, found array"},
      {R"({"bos_token": 5})", "bos_token: need a string or an object, found 5"},
      {R"({"bos_token": {"text": "a"}})", "bos_token.content: missing"},
      {R"({"bos_token": "<s>"})", "bos_token: \"<s>\" is not a token of tokenizer.json"},
      {R"({"add_bos_token": true})", "add_bos_token is true and there is no bos_token"},
      {R"({"add_bos_token": "yes"})", "add_bos_token: need true or false, found \"yes\""},
  };
  for (const auto& [config, message] : cases) {
    const auto loaded = LoadFrom(tokenizer, config);
    ASSERT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument) << config;
    EXPECT_NE(std::string(loaded.status().message()).find(message), std::string::npos)
        << loaded.status();
  }
}

}  // namespace
}  // namespace tokenizer
