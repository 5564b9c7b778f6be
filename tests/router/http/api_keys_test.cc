#include "router/http/api_keys.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/tokenizer/tiny_tokenizer.h"

namespace router::http {
namespace {

using testing::HasSubstr;
using testing::Not;

absl::StatusOr<ApiKeys> LoadFrom(const std::string& text) {
  const tokenizer::TempDir dir;
  dir.Write("keys", text);
  return ApiKeys::Load(dir.path() + "/keys");
}

TEST(ApiKeysTest, WithoutAFileEverybodyMay) {
  const auto keys = ApiKeys::Load("");
  ASSERT_TRUE(keys.ok());
  EXPECT_TRUE(keys->empty());
  EXPECT_EQ(*keys->TenantOf(""), "");
}

TEST(ApiKeysTest, AKeyOfTheFileIsNeeded) {
  const auto keys = LoadFrom("# ours\nsk-0123456789abcdef\n\n  sk-fedcba9876543210 \r\n");
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_EQ(*keys->TenantOf("Bearer sk-0123456789abcdef"), "");
  EXPECT_EQ(*keys->TenantOf("bearer  sk-fedcba9876543210"), "");
  for (const char* const wrong :
       {"", "Bearer", "Bearer ", "Bearer sk-0123456789abcde", "Bearer sk-0123456789abcdef0",
        "Bearer # ours", "sk-0123456789abcdef", "Basic sk-0123456789abcdef"}) {
    EXPECT_EQ(keys->TenantOf(wrong).status().code(), absl::StatusCode::kUnauthenticated) << wrong;
  }
}

TEST(ApiKeysTest, AKeyMayBelongToATenant) {
  const auto keys = LoadFrom(
      "sk-0123456789abcdef acme\nsk-fedcba9876543210 \t acme\nsk-aaaaaaaaaaaaaaaa\n"
      "sk-bbbbbbbbbbbbbbbb #1\n");
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_EQ(*keys->TenantOf("Bearer sk-0123456789abcdef"), "acme");
  EXPECT_EQ(*keys->TenantOf("Bearer sk-fedcba9876543210"), "acme");
  EXPECT_EQ(*keys->TenantOf("Bearer sk-aaaaaaaaaaaaaaaa"), "");
  EXPECT_EQ(*keys->TenantOf("Bearer sk-bbbbbbbbbbbbbbbb"), "#1");
  EXPECT_FALSE(keys->TenantOf("Bearer sk-0123456789abcdef acme").ok());
}

TEST(ApiKeysTest, AFileWithoutUsableKeysIsRefusedWithoutShowingThem) {
  EXPECT_THAT(std::string(ApiKeys::Load("/nowhere/keys").status().message()),
              HasSubstr("/nowhere/keys"));
  EXPECT_THAT(std::string(LoadFrom("# none\n").status().message()), HasSubstr("holds no key"));
  const std::string short_key(LoadFrom("sk-0123456789abcdef\nsecret\n").status().message());
  EXPECT_THAT(short_key, HasSubstr("the key of line 2 has 6 characters: at least 16"));
  EXPECT_THAT(short_key, Not(HasSubstr("secret")));
  const std::string spaced(LoadFrom("a-long-secret-key its tenant\n").status().message());
  EXPECT_THAT(spaced, HasSubstr("line 1 has 3 words: must be KEY or KEY TENANT"));
  EXPECT_THAT(spaced, Not(HasSubstr("secret")));
  const std::string twice(LoadFrom("# ours\na-long-secret-key\nsk-0123456789abcdef\n"
                                   "a-long-secret-key acme\n")
                              .status()
                              .message());
  EXPECT_THAT(twice, HasSubstr("/keys: line 4 has the key of line 2"));
  EXPECT_THAT(twice, Not(HasSubstr("secret")));
  const std::string odd(LoadFrom("a-long-secret-k\xc3\xa9y\n").status().message());
  EXPECT_THAT(odd, HasSubstr("line 1 is not a key"));
  EXPECT_THAT(odd, Not(HasSubstr("secret")));
  EXPECT_THAT(
      std::string(
          LoadFrom(absl::StrCat("sk-0123456789abcdef ", std::string(129, 'x'))).status().message()),
      HasSubstr("line 1: tenant has 129 characters: at most 128"));
}

}  // namespace
}  // namespace router::http
