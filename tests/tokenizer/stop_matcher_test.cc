#include "tokenizer/stop_matcher.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tokenizer/utf8.h"

namespace tokenizer {
namespace {

// The whole text's answer, by search: the stop that is complete first, of equals the longest.
std::string Naive(const std::vector<std::string>& stops, bool include_stop, const std::string& text,
                  bool* stopped) {
  size_t best_end = std::string::npos, best_size = 0;
  for (const std::string& stop : stops) {
    const size_t at = text.find(stop);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    if (end < best_end || (end == best_end && stop.size() > best_size)) {
      best_end = end;
      best_size = stop.size();
    }
  }
  *stopped = best_end != std::string::npos;
  return *stopped ? text.substr(0, best_end - (include_stop ? 0 : best_size)) : text;
}

TEST(StopMatcherTest, HoldsBackOnlyWhatMayBeginAStop) {
  StopMatcher matcher({"\n\nUser:"}, /*include_stop=*/false);
  EXPECT_EQ(matcher.Add("hello\n"), "hello");
  EXPECT_EQ(matcher.Add("world\n\nUs"), "\nworld");
  EXPECT_EQ(matcher.Add("age"), "\n\nUsage");
  EXPECT_EQ(matcher.Add("\n\n\nUser"), "\n");
  EXPECT_FALSE(matcher.stopped());
  EXPECT_EQ(matcher.Add(": more"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.Add("ignored"), "");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, FinishGivesWhatWasHeld) {
  StopMatcher matcher({"END"}, /*include_stop=*/false);
  EXPECT_EQ(matcher.Add("the EN"), "the ");
  EXPECT_EQ(matcher.Finish(), "EN");
}

TEST(StopMatcherTest, IncludeStopKeepsIt) {
  StopMatcher matcher({"END"}, /*include_stop=*/true);
  EXPECT_EQ(matcher.Add("the EN"), "the ");
  EXPECT_EQ(matcher.Add("D of it"), "END");
  EXPECT_TRUE(matcher.stopped());
}

TEST(StopMatcherTest, WhatMayNotStopYetIsText) {
  StopMatcher matcher({"aba"}, false);
  EXPECT_EQ(matcher.Add("xab", false), "x");
  EXPECT_EQ(matcher.Add("a", false), "ab") << "the last letter may begin another";
  EXPECT_FALSE(matcher.stopped());
  EXPECT_EQ(matcher.Add("ba"), "") << "begins within the one that was passed over";
  EXPECT_TRUE(matcher.stopped());
}

TEST(StopMatcherTest, NoStopsPassEverything) {
  StopMatcher matcher({}, /*include_stop=*/false);
  EXPECT_EQ(matcher.Add("a"), "a");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, EqualsSearchOverRandomStreams) {
  std::mt19937 random(20240607);
  const auto below = [&random](int n) { return static_cast<int>(random() % n); };
  // Few letters, so that stops overlap themselves and each other; one of them of two bytes.
  const std::vector<std::string> letters = {"a", "b", "\xC3\xA9"};
  const auto word = [&](int length) {
    std::string out;
    while (length-- > 0) out += letters[below(static_cast<int>(letters.size()))];
    return out;
  };
  int num_stopped = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> stops(below(4));
    for (std::string& stop : stops) stop = word(1 + below(6));
    const bool include_stop = below(2) == 1;
    StopMatcher matcher(stops, include_stop);
    size_t longest = 1;
    for (const std::string& stop : stops) longest = std::max(longest, stop.size());
    std::string all, given;
    for (int chunks = below(12); chunks > 0; --chunks) {
      const std::string chunk = word(below(5));
      const std::string out = matcher.Add(chunk);
      ASSERT_EQ(FirstInvalidUtf8(out), out.size());
      all += chunk;
      given += out;
      if (!matcher.stopped()) {
        ASSERT_LE(all.size() - given.size(), longest - 1);
      }
    }
    given += matcher.Finish();
    bool stopped = false;
    ASSERT_EQ(given, Naive(stops, include_stop, all, &stopped))
        << "round " << round << " of " << all;
    ASSERT_EQ(matcher.stopped(), stopped);
    num_stopped += stopped;
  }
  EXPECT_GT(num_stopped, 5000);
  EXPECT_LT(num_stopped, 19000);
}

}  // namespace
}  // namespace tokenizer
