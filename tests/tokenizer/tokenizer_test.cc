#include "tokenizer/tokenizer.h"

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace tokenizer {
namespace {

using Ids = std::vector<int32_t>;
using nlohmann::json;

constexpr char kSplitBos[] = R"({"bos_token": {"content": "<s>"}, "add_bos_token": true})";

json WithBos() {
  json tokenizer = TinyTokenizer();
  tokenizer["added_tokens"] = {{{"id", 256}, {"content", "<s>"}, {"special", true}}};
  return tokenizer;
}

TEST(TokenizerTest, LoadNamesAMissingFile) {
  const auto missing = Tokenizer::Load("/nowhere");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(missing.status().message(), "no such file: /nowhere/tokenizer.json");
  EXPECT_EQ(*TokenizerHash("/nowhere"), "");
}

TEST(TokenizerTest, LowestRankThenLeftmostMergesFirst) {
  nlohmann::json json = TinyTokenizer();
  AddMerge(json, "b", "c");   // 256
  AddMerge(json, "a", "b");   // 257
  AddMerge(json, "a", "a");   // 258
  AddMerge(json, "aa", "a");  // 259
  const auto tokenizer = Make(json);
  EXPECT_EQ(*tokenizer->Encode("abc", false), (Ids{'a', 256}));
  EXPECT_EQ(*tokenizer->Encode("abab", false), (Ids{257, 257}));
  EXPECT_EQ(*tokenizer->Encode("aaaaa", false), (Ids{258, 259}));
  // The same through the heap that long pieces take.
  Ids expected(30, 258);
  EXPECT_EQ(*tokenizer->Encode(std::string(60, 'a'), false), expected);
}

TEST(TokenizerTest, ShortAndLongMergingAgree) {
  // A piece of 40 bytes is merged by scanning; doubled, by the heap.  The separator has no merges.
  nlohmann::json json = TinyTokenizer();
  for (const char* merge : {"ab", "ba", "aa", "bb"}) AddMerge(json, {merge[0]}, {merge[1]});
  for (const char* merge : {"ab ab", "ba b", "aa ba", "bb aa", "abab ab"}) {
    const std::string text = merge;
    AddMerge(json, text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1));
  }
  const auto tokenizer = Make(json);
  uint32_t state = 1;
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 40; ++i) {
      state = state * 1664525 + 1013904223;
      text += state >> 31 ? 'a' : 'b';
    }
    Ids expected = *tokenizer->Encode(text, false);
    const Ids half = expected;
    expected.push_back('-');
    expected.insert(expected.end(), half.begin(), half.end());
    ASSERT_EQ(*tokenizer->Encode(text + "-" + text, false), expected) << text;
  }
}

TEST(TokenizerTest, IgnoreMergesTakesWholePieces) {
  nlohmann::json json = TinyTokenizer();
  json["model"]["vocab"]["xyz"] = 256;  // no merge makes it
  EXPECT_EQ(*Make(json)->Encode("xyz", false), (Ids{'x', 'y', 'z'}));
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(*Make(json)->Encode("xyz", false), (Ids{256}));
}

TEST(TokenizerTest, MergesAsPairsMeanTheSame) {
  nlohmann::json json = TinyTokenizer();
  AddMerge(json, "a", "b");
  json["model"]["merges"] = nlohmann::json::parse(R"([["a", "b"]])");
  EXPECT_EQ(*Make(json)->Encode("ab", false), (Ids{256}));
}

TEST(TokenizerTest, BosComesFromTheConfiguration) {
  EXPECT_EQ(*Make(WithBos(), kSplitBos)->Encode("a", true), (Ids{256, 'a'}));
  EXPECT_EQ(*Make(WithBos(), kSplitBos)->Encode("a", false), (Ids{'a'}));
  EXPECT_EQ(*Make(WithBos(), kSplitBos)->Encode("", true), (Ids{256}));
  EXPECT_EQ(Make(WithBos(), kSplitBos)->bos_id(), 256);
  const char* without = R"({"bos_token": "<s>", "add_bos_token": false})";
  EXPECT_EQ(*Make(WithBos(), without)->Encode("a", true), (Ids{'a'}));
  EXPECT_EQ(Make(WithBos(), without)->bos_id(), 256);
  EXPECT_EQ(Make(WithBos())->bos_id(), -1);
}

TEST(TokenizerTest, AWrittenBosIsNotDoubled) {
  EXPECT_EQ(*Make(WithBos(), kSplitBos)->Encode("<s>a", true), (Ids{256, 'a'}));
}

TEST(TokenizerTest, BosComesFromTheTemplate) {
  nlohmann::json json = WithBos();
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}},
        {{"type", "TemplateProcessing"},
         {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}}}}}};
  EXPECT_EQ(*Make(json)->Encode("a", true), (Ids{256, 'a'}));
  EXPECT_EQ(Make(json)->bos_id(), 256);
  // The configuration has the last word.
  EXPECT_EQ(*Make(json, R"({"add_bos_token": false})")->Encode("a", true), (Ids{'a'}));
}

TEST(TokenizerTest, AddedTokensTakeSpacesAndRespectWords) {
  nlohmann::json json = TinyTokenizer();
  json["added_tokens"] = {{{"id", 256}, {"content", "<l>"}, {"lstrip", true}},
                          {{"id", 257}, {"content", "<r>"}, {"rstrip", true}},
                          {{"id", 258}, {"content", "cat"}, {"single_word", true}},
                          {{"id", 259}, {"content", "<l"}},
                          {{"id", 260}, {"content", "<l>>"}}};
  const auto tokenizer = Make(json);
  EXPECT_EQ(*tokenizer->Encode("a  <l> b", false), (Ids{'a', 256, ' ', 'b'}));
  EXPECT_EQ(*tokenizer->Encode("a <r> \tb", false), (Ids{'a', ' ', 257, 'b'}));
  EXPECT_EQ(*tokenizer->Encode("<r>  <l>", false), (Ids{257, 256}));
  EXPECT_EQ(*tokenizer->Encode("cat,cats", false), (Ids{258, ',', 'c', 'a', 't', 's'}));
  // The longest wins.
  EXPECT_EQ(*tokenizer->Encode("<l<l>>", false), (Ids{259, 260}));
}

TEST(TokenizerTest, KnowsItsTokens) {
  const Tokenizer& tokenizer = DeepSeekV3();
  EXPECT_EQ(tokenizer.vocab_size(), 128815);
  EXPECT_EQ(tokenizer.bos_id(), 0);
  EXPECT_EQ(tokenizer.TokenId("<｜end▁of▁sentence｜>"), 1);
  EXPECT_EQ(tokenizer.TokenId("no such token"), -1);
  EXPECT_TRUE(tokenizer.IsSpecial(0));
  EXPECT_FALSE(tokenizer.IsSpecial(128803));  // <｜User｜> is added, not special
  EXPECT_FALSE(tokenizer.IsSpecial(-1));
  EXPECT_EQ(tokenizer.TokenBytes(tokenizer.TokenId("Ġthe")), " the");
  EXPECT_EQ(tokenizer.TokenBytes(128803), "<｜User｜>");
  EXPECT_EQ(tokenizer.TokenBytes(1 << 20), "");
  EXPECT_EQ(tokenizer.hash().size(), 32u);
  EXPECT_EQ(tokenizer.hash(), *TokenizerHash(GoldenDir() + "/tokenizer/deepseek_v3"));
}

TEST(TokenizerTest, RefusesInvalidTextAndIds) {
  const auto text = DeepSeekV3().Encode("ab\xFFz", false);
  EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(text.status().message(), "text is not valid UTF-8 at byte 2");
  for (const int32_t id : {-1, 128815}) {
    const auto decoded = DeepSeekV3().Decode(Ids{5, id}, false);
    EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(decoded.status().message(),
              "token id " + std::to_string(id) + " at 1 is not in [0, 128815)");
  }
}

// Quadratic work would show at a quarter of a megabyte as well; the runs that users really send are
// longer.
size_t LongRunBytes(std::string_view unit) {
  return unit == "a" || unit == " " ? 1 << 20 : 1 << 18;
}

TEST(TokenizerTest, LongRunsOfOneCharacter) {
  const Tokenizer& tokenizer = DeepSeekV3();
  for (const std::string_view unit :
       {"a", " ", "\n", "1", ".", "\xE4\xB8\xAD", "\xCC\x81", " \n", "\x01", "<"}) {
    std::string text;
    while (text.size() < LongRunBytes(unit)) text += unit;
    // With something behind the run, patterns must step back.
    for (const char* end : {"", "x"}) {
      const auto ids = tokenizer.Encode(text + end, false);
      ASSERT_TRUE(ids.ok()) << ids.status();
      ASSERT_EQ(*tokenizer.Decode(*ids, false), text + end);
    }
  }
}

TEST(TokenizerTest, LongRunsWithDeepSeekV2sSplits) {
  nlohmann::json json = TinyTokenizer();
  nlohmann::json splits = nlohmann::json::array();
  for (const char* pattern :
       {"[\r\n]", "\\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+", "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$",
        "[一-龥ࠀ-一가-퟿]+"}) {
    splits.push_back(
        {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}});
  }
  splits.push_back({{"type", "Digits"}, {"individual_digits", true}});
  splits.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
  json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", splits}};
  const auto tokenizer = Make(json);
  for (const char unit : {'a', ' ', '\n', '1', '.'}) {
    for (const char* end : {"", "x", "1", "\xE2\x80\x8B"}) {
      const std::string text = std::string(LongRunBytes({&unit, 1}), unit) + end;
      const auto ids = tokenizer->Encode(text, false);
      ASSERT_TRUE(ids.ok()) << ids.status();
      ASSERT_EQ(ids->size(), text.size());
    }
  }
}

TEST(TokenizerTest, ThreadsShareOne) {
  const auto tokenizer = Tokenizer::Load(GoldenDir() + "/tokenizer/deepseek_v3");
  ASSERT_TRUE(tokenizer.ok());
  const std::string text = ReadText(GoldenDir() + "/tokenizer/tokenizer_golden.json");
  const Ids expected = *DeepSeekV3().Encode(text, false);
  std::vector<std::thread> threads;
  std::vector<Ids> results(4);
  for (Ids& result : results)
    threads.emplace_back([&] { result = *(*tokenizer)->Encode(text, false); });
  for (std::thread& thread : threads) thread.join();
  for (const Ids& result : results) EXPECT_EQ(result, expected);
}

}  // namespace
}  // namespace tokenizer
