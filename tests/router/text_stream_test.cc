#include "router/text_stream.h"

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router {
namespace {

std::vector<uint32_t> Bytes(const std::string& text) {
  std::vector<uint32_t> ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  return ids;
}

class TextStreamTest : public testing::Test {
 protected:
  const std::unique_ptr<tokenizer::Tokenizer> tokenizer_ =
      tokenizer::Make(tokenizer::TinyTokenizer());
};

TEST_F(TextStreamTest, GivesOutWholeCharactersOnly) {
  TextStream stream(tokenizer_.get(), {});
  EXPECT_EQ(stream.Add(Bytes("a\xC3"), false, false).text, "a");
  const TextStream::Piece piece = stream.Add(Bytes("\xA9"), false, false);
  EXPECT_EQ(piece.text, "\xC3\xA9");
  EXPECT_EQ(piece.num_tokens, 1);
  EXPECT_FALSE(piece.stopped);
  EXPECT_EQ(stream.Add(Bytes("\xC3"), /*ended=*/true, false).text, "\xEF\xBF\xBD");
}

TEST_F(TextStreamTest, StopStringsAreFoundOverTokenBoundaries) {
  TextStream stream(tokenizer_.get(), {.stops = {"END"}});
  EXPECT_EQ(stream.Add(Bytes("abE"), false, false).text, "ab");
  EXPECT_EQ(stream.Add(Bytes("Ex"), false, false).text, "EEx");
  EXPECT_EQ(stream.Add(Bytes("EN"), false, false).text, "");
  const TextStream::Piece piece = stream.Add(Bytes("Dxyz"), false, false);
  EXPECT_EQ(piece.text, "");
  EXPECT_TRUE(piece.stopped);
  EXPECT_EQ(piece.num_tokens, 1) << "what comes after the stop string is not the client's";
}

TEST_F(TextStreamTest, StopStringsDoNotEndItBeforeTheLeastNumberOfTokens) {
  const std::string text = "aENDbENDc";
  for (const int32_t min_tokens : {0, 4, 5, 7, 8, 9}) {
    TextStream stream(tokenizer_.get(), {.stops = {"END"}, .min_tokens = min_tokens});
    std::string given;
    int32_t num_tokens = 0;
    bool stopped = false;
    for (size_t i = 0; i < text.size() && !stopped; ++i) {
      const auto piece = stream.Add(Bytes(text.substr(i, 1)), i + 1 == text.size(), false);
      given += piece.text;
      num_tokens += piece.num_tokens;
      stopped = piece.stopped;
    }
    const int expected = min_tokens <= 4 ? 4 : min_tokens <= 8 ? 8 : 9;
    EXPECT_EQ(num_tokens, expected) << min_tokens;
    EXPECT_EQ(stopped, expected < 9) << min_tokens;
    EXPECT_EQ(given, expected == 4 ? "a" : expected == 8 ? "aENDb" : text) << min_tokens;
  }
  TextStream at_once(tokenizer_.get(), {.stops = {"END"}, .min_tokens = 6});
  EXPECT_EQ(at_once.Add(Bytes(text), true, false).text, "aENDb") << "all tokens in one message";
}

TEST_F(TextStreamTest, WhatIsHeldBackComesAtTheEnd) {
  TextStream stream(tokenizer_.get(), {.stops = {"END"}});
  EXPECT_EQ(stream.Add(Bytes("xEN"), false, false).text, "x");
  const TextStream::Piece piece = stream.Add(Bytes("E"), /*ended=*/true, false);
  EXPECT_EQ(piece.text, "ENE");
  EXPECT_FALSE(piece.stopped);
}

TEST_F(TextStreamTest, TheStopIdsTextIsLeftOutUnlessAskedFor) {
  TextStream without(tokenizer_.get(), {.stop_ids = {'.'}});
  TextStream::Piece piece = without.Add(Bytes("hi."), /*ended=*/true, /*by_stop_id=*/true);
  EXPECT_EQ(piece.text, "hi");
  EXPECT_EQ(piece.num_tokens, 3);
  TextStream with(tokenizer_.get(), {.include_stop = true, .stop_ids = {'.'}});
  EXPECT_EQ(with.Add(Bytes("hi."), true, true).text, "hi.");
  TextStream length(tokenizer_.get(), {.stop_ids = {'.'}});
  EXPECT_EQ(length.Add(Bytes("hi."), true, /*by_stop_id=*/false).text, "hi.");
}

TEST_F(TextStreamTest, IdsWithoutTextAndNoTokenizer) {
  TextStream padded(tokenizer_.get(), {});
  TextStream::Piece piece = padded.Add(std::vector<uint32_t>{'a', 100000, 'b'}, true, false);
  EXPECT_EQ(piece.text, "ab");
  EXPECT_EQ(piece.num_tokens, 3);
  TextStream none(nullptr, {});
  piece = none.Add(std::vector<uint32_t>{1, 2}, true, false);
  EXPECT_EQ(piece.text, "");
  EXPECT_EQ(piece.num_tokens, 2);
}

TEST_F(TextStreamTest, SpecialTokensHaveNoTextButThoseThatAreAskedFor) {
  nlohmann::json json = tokenizer::TinyTokenizer();
  for (const int id : {256, 257}) {
    json["added_tokens"].push_back({{"id", id},
                                    {"content", id == 256 ? "<call>" : "<pad>"},
                                    {"special", true},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", false},
                                    {"normalized", false}});
  }
  const auto tokenizer = tokenizer::Make(json);
  TextStream hidden(tokenizer.get(), {});
  EXPECT_EQ(hidden.Add(std::vector<uint32_t>{'a', 256, 257, 'b'}, true, false).text, "ab");
  TextStream shown(tokenizer.get(), {.stop_ids = {257}, .shown_special_ids = {256}});
  EXPECT_EQ(shown.Add(std::vector<uint32_t>{'a', 256, 'b', 257}, true, true).text, "a<call>b");
}

}  // namespace
}  // namespace router
