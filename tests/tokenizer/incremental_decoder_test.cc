#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/tokenizer/tiny_tokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace tokenizer {
namespace {

TEST(IncrementalDecoderTest, HoldsHalfCharacters) {
  const auto tokenizer = Make(TinyTokenizer());
  IncrementalDecoder decoder(*tokenizer, /*skip_special_tokens=*/false);
  EXPECT_EQ(decoder.Add(0xF0), "");
  EXPECT_EQ(decoder.Add(0x9F), "");
  EXPECT_EQ(decoder.Add(0x98), "");
  EXPECT_EQ(decoder.Add(0x80), "\xF0\x9F\x98\x80");
  EXPECT_EQ(decoder.Add(0xE4), "");
  // The next byte shows that the character will never be whole.
  EXPECT_EQ(decoder.Add('x'), "\xEF\xBF\xBDx");
  EXPECT_EQ(decoder.Add(0xC3), "");
  EXPECT_EQ(decoder.Finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(decoder.Finish(), "");
  // An id that no token has adds nothing.
  EXPECT_EQ(decoder.Add(1'000'000), "");
  EXPECT_EQ(decoder.Add(-1), "");
}

TEST(IncrementalDecoderTest, EqualsDecodeOverRandomIds) {
  std::mt19937 random(7);
  nlohmann::json json = TinyTokenizer();
  json["added_tokens"] = {{{"id", 256}, {"content", "<s>"}, {"special", true}},
                          {{"id", 257}, {"content", "｜x｜"}, {"special", false}}};
  const auto tiny = Make(json);
  for (int round = 0; round < 4000; ++round) {
    const Tokenizer& tokenizer = round % 2 == 0 ? *tiny : DeepSeekV3();
    const bool skip_special = round % 4 < 2;
    std::vector<int32_t> ids(random() % 30);
    for (int32_t& id : ids) {
      // Mostly bytes of multi-byte characters, which seldom fit together.
      const bool byte = random() % 4 != 0;
      const uint32_t range = byte ? 400 : tokenizer.vocab_size();
      id = static_cast<int32_t>(random() % std::min<uint32_t>(range, tokenizer.vocab_size()));
    }
    IncrementalDecoder decoder(tokenizer, skip_special);
    std::string text;
    for (const int32_t id : ids) {
      const std::string part = decoder.Add(id);
      ASSERT_EQ(FirstInvalidUtf8(part), part.size());
      text += part;
    }
    text += decoder.Finish();
    ASSERT_EQ(text, *tokenizer.Decode(ids, skip_special)) << "round " << round;
  }
}

TEST(Utf8Test, FindsTheFirstInvalidByte) {
  const struct {
    std::string_view text;
    size_t offset;
  } cases[] = {
      {"", 0},
      {"plain ascii, longer than eight", 30},
      {"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 9},
      {"abcdefghij\x80", 10},   // a continuation alone
      {"\xC0\x80", 0},          // overlong
      {"\xE0\x9F\xBF", 0},      // overlong
      {"\xED\xA0\x80", 0},      // a surrogate
      {"\xF4\x90\x80\x80", 0},  // beyond U+10FFFF
      {"\xF5\x80\x80\x80", 0},
      {"ok\xE2\x82", 2},  // cut short
      {"ok\xE2\x82z", 2},
  };
  for (const auto& one : cases) EXPECT_EQ(FirstInvalidUtf8(one.text), one.offset) << one.text;
}

TEST(Utf8Test, ReplacesMaximalInvalidParts) {
  const std::string r(kReplacementCharacter);
  std::string out;
  EXPECT_EQ(AppendValidUtf8("a\xE2\x82z\xFF\xC0\x80\xF0\x9F", &out), 7u);
  EXPECT_EQ(out, "a" + r + "z" + r + r + r);
}

}  // namespace
}  // namespace tokenizer
