// Rows that the `tokenizers` library made (tests/golden/tokenizer/README.md).

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/tokenizer/tiny_tokenizer.h"
#include "tokenizer/tokenizer.h"

namespace tokenizer {
namespace {

using nlohmann::json;

void ExpectRow(const Tokenizer& tokenizer, const json& row) {
  const auto text = row["text"].get<std::string>();
  const auto expected = row["ids"].get<std::vector<int32_t>>();
  const auto ids = tokenizer.Encode(text, /*add_special_tokens=*/false);
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(*ids, expected) << text;
  const auto decoded = tokenizer.Decode(expected, /*skip_special_tokens=*/false);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(*decoded, row["decoded"].get<std::string>());
  if (row.contains("decoded_without_special")) {
    EXPECT_EQ(*tokenizer.Decode(expected, /*skip_special_tokens=*/true),
              row["decoded_without_special"].get<std::string>());
  }
}

TEST(GoldenRowsTest, DeepSeekV3) {
  const json rows = json::parse(ReadText(GoldenDir() + "/tokenizer/tokenizer_golden.json"));
  ASSERT_GT(rows.size(), 200u);
  for (const json& row : rows) ExpectRow(DeepSeekV3(), row);
}

TEST(GoldenRowsTest, EveryBehaviourOfSmallTokenizers) {
  const json cases = json::parse(ReadText(GoldenDir() + "/tokenizer/small_tokenizers.json"));
  ASSERT_GT(cases.size(), 20u);
  for (const json& one : cases) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const auto tokenizer = LoadFrom(one["tokenizer"].dump());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    ASSERT_GT(one["rows"].size(), 10u);
    for (const json& row : one["rows"]) ExpectRow(**tokenizer, row);
  }
}

}  // namespace
}  // namespace tokenizer
