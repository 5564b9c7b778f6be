#include "cli/quote.h"

#include "gtest/gtest.h"

namespace cli {
namespace {

TEST(QuoteTest, EscapesWhatATerminalCannotShow) {
  EXPECT_EQ(Quote(" word"), "\" word\"");
  EXPECT_EQ(Quote("a\"b\\\n\t\r\x1B\x7F"), "\"a\\\"b\\\\\\n\\t\\r\\x1b\\x7f\"");
  EXPECT_EQ(Quote("\xC3\xA9\xF0\x9F"), "\"\xC3\xA9\\xf0\\x9f\"");
}

}  // namespace
}  // namespace cli
