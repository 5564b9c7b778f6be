#include "tokenizer/regex.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tokenizer {
namespace {

// "begin-end" of the first match, "none" or "limit".
std::string FirstMatch(std::string_view pattern, std::string_view text) {
  const auto regex = Regex::Compile(pattern, Regex::Syntax::kPattern);
  if (!regex.ok()) return std::string(regex.status().message());
  RegexScratch scratch;
  size_t begin = 0, end = 0;
  switch (regex->Find(text, 0, scratch, &begin, &end)) {
    case Regex::Result::kMatch:
      return std::to_string(begin) + "-" + std::to_string(end);
    case Regex::Result::kNoMatch:
      return "none";
    case Regex::Result::kLimit:
      break;
  }
  return "limit";
}

TEST(RegexTest, SpaceIsUnicodeWhiteSpace) {
  for (const char* space :
       {" ", "\t", "\v", "\xC2\x85", "\xC2\xA0", "\xE3\x80\x80", "\xE2\x80\xA8"}) {
    EXPECT_NE(FirstMatch("\\s", space), "none") << space;
    EXPECT_NE(FirstMatch("[a\\s]", space), "none") << space;
    EXPECT_EQ(FirstMatch("\\S", space), "none") << space;
    EXPECT_EQ(FirstMatch("[^\\s]", space), "none") << space;
  }
  // U+180E and U+200B are format characters, not spaces.
  for (const char* other : {"\xE1\xA0\x8E", "\xE2\x80\x8B", "\x1C"}) {
    EXPECT_EQ(FirstMatch("\\s", other), "none") << other;
    EXPECT_NE(FirstMatch("\\S", other), "none") << other;
  }
}

TEST(RegexTest, PropertiesAreUnicodes) {
  EXPECT_EQ(FirstMatch("\\p{N}{1,3}", "x\xD9\xA1\xD9\xA2\xD9\xA3\xD9\xA4"), "1-7");
  EXPECT_EQ(FirstMatch("\\w+", "-na\xC3\xAFve_9-"), "1-9");
  EXPECT_EQ(FirstMatch("(?i:'S)", "it's"), "2-4");
  EXPECT_EQ(FirstMatch("\\h+", "xyz09aF "), "3-7");
}

TEST(RegexTest, AnchorsMeanLines) {
  EXPECT_EQ(FirstMatch("\\s+$", "a  \nb"), "1-3");
  EXPECT_EQ(FirstMatch("^b", "a\nb"), "2-3");
  EXPECT_EQ(FirstMatch("b\\z", "b\n"), "none");
}

TEST(RegexTest, SubjectEndsWherePieceEnds) {
  const std::string text = "  x";
  EXPECT_EQ(FirstMatch("\\s+(?!\\S)", std::string_view(text).substr(0, 2)), "0-2");
  EXPECT_EQ(FirstMatch("\\s+(?!\\S)", text), "0-1");
}

TEST(RegexTest, RefusesWhatMeansSomethingElse) {
  EXPECT_EQ(FirstMatch("[a-z&&[^b]]", "b"),
            "&& in a character class at byte 4 of the pattern is not supported");
  EXPECT_EQ(FirstMatch("[a[bc]]", "b"),
            "a nested character class at byte 2 of the pattern is not supported");
  EXPECT_EQ(FirstMatch("(?m:.)", "b"), "(?m) at byte 0 of the pattern is not supported");
  EXPECT_NE(FirstMatch("[[:alpha:]]", "b"), "none");
  EXPECT_NE(FirstMatch("[]a]", "]"), "none");
  EXPECT_NE(FirstMatch("a(b", "ab").find("missing closing parenthesis"), std::string::npos);
}

TEST(RegexTest, ExplodingPatternEndsAtALimit) {
  EXPECT_EQ(FirstMatch("(a*)*(b|a*c)+$", absl::StrCat(std::string(40, 'a'), "d")), "limit");
}

}  // namespace
}  // namespace tokenizer
