#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tokenizer/pre_tokenizer.h"

namespace tokenizer {
namespace {

std::vector<std::string> Split(const PreTokenizerRules& rules, std::string_view text,
                               size_t num_before_prefix = 0) {
  const auto pre_tokenizer = PreTokenizer::Create(rules, num_before_prefix);
  EXPECT_TRUE(pre_tokenizer.ok()) << pre_tokenizer.status();
  Pieces pieces;
  EXPECT_TRUE(pre_tokenizer->Split(text, pieces).ok());
  return {pieces.pieces.begin(), pieces.pieces.end()};
}

std::vector<std::string> SplitAtDash(SplitBehavior behavior, bool invert = false) {
  return Split({.splits = {{"-", Regex::Syntax::kLiteral, behavior, invert}}},
               "the-final--countdown");
}

using Strings = std::vector<std::string>;

TEST(SplitBehaviorTest, EachBehavior) {
  EXPECT_EQ(SplitAtDash(SplitBehavior::kRemoved), (Strings{"the", "final", "countdown"}));
  EXPECT_EQ(SplitAtDash(SplitBehavior::kIsolated),
            (Strings{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(SplitAtDash(SplitBehavior::kContiguous),
            (Strings{"the", "-", "final", "--", "countdown"}));
  EXPECT_EQ(SplitAtDash(SplitBehavior::kMergedWithPrevious),
            (Strings{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(SplitAtDash(SplitBehavior::kMergedWithNext),
            (Strings{"the", "-final", "-", "-countdown"}));
}

TEST(SplitBehaviorTest, InvertTakesWhatLiesBetween) {
  EXPECT_EQ(SplitAtDash(SplitBehavior::kRemoved, /*invert=*/true), (Strings{"-", "-", "-"}));
}

TEST(SplitBehaviorTest, LaterSplitsSeeOnePieceOnly) {
  // Alone, the look-ahead leaves the last space to what follows; behind the digit split it cannot
  // see it.
  const SplitRule spaces{.pattern = "\\s+(?!\\S)|\\s+"};
  EXPECT_EQ(Split({.splits = {spaces}}, "a   1"), (Strings{"a", "  ", " ", "1"}));
  EXPECT_EQ(Split({.splits = {{.pattern = "\\p{N}"}, spaces}}, "a   1"),
            (Strings{"a", "   ", "1"}));
}

TEST(SplitBehaviorTest, PrefixSpaceGoesToEveryPieceWithoutOne) {
  const PreTokenizerRules rules{.splits = {{.pattern = ","}}, .add_prefix_space = true};
  EXPECT_EQ(Split(rules, "a, b", 1), (Strings{" a", " ,", " b"}));
  EXPECT_EQ(Split(rules, "a, b", 0), (Strings{" a", ",", " b"}));
}

TEST(SplitBehaviorTest, EmptyMatchesAndEmptyText) {
  EXPECT_EQ(Split({.splits = {{.pattern = "x*"}}}, "axxb"), (Strings{"a", "xx", "b"}));
  EXPECT_EQ(Split({.splits = {{.pattern = "$"}}}, "ab"), (Strings{"ab"}));
  EXPECT_EQ(Split({.splits = {{.pattern = "a"}}}, ""), Strings{});
}

}  // namespace
}  // namespace tokenizer
