#include "worker/ended_requests.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace worker {
namespace {

TEST(EndedRequestsTest, TheNewestAttemptThatEndedIsKnown) {
  EndedRequests ended;
  EXPECT_EQ(ended.newest("a"), std::nullopt);
  ended.Add("a", 2);
  ended.Add("a", 1);
  EXPECT_EQ(ended.newest("a"), 2u);
  ended.Add("a", 3);
  EXPECT_EQ(ended.newest("a"), 3u);
  EXPECT_EQ(ended.newest("b"), std::nullopt);
}

TEST(EndedRequestsTest, TheOldestIsForgottenAndNoOther) {
  EndedRequests ended;
  for (size_t i = 0; i <= EndedRequests::kMost; ++i) {
    for (uint32_t attempt = 1; attempt <= 2; ++attempt) ended.Add(absl::StrCat(i), attempt);
  }
  EXPECT_EQ(ended.newest("0"), std::nullopt);
  for (size_t i = 1; i <= EndedRequests::kMost; ++i) {
    EXPECT_EQ(ended.newest(absl::StrCat(i)), 2u) << i;
  }
}

TEST(EndedRequestsTest, ARequestThatEndsAgainIsRememberedFromThenOn) {
  EndedRequests ended;
  for (size_t i = 0; i < EndedRequests::kMost; ++i) ended.Add(absl::StrCat(i), 1);
  ended.Add("0", 2);
  ended.Add("new", 1);
  EXPECT_EQ(ended.newest("0"), 2u);
  EXPECT_EQ(ended.newest("1"), std::nullopt);
}

}  // namespace
}  // namespace worker
