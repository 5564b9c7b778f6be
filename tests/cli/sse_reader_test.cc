#include "cli/sse_reader.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace cli {
namespace {

using testing::ElementsAre;

// The events of `body`, given in pieces of `piece` bytes.
std::vector<std::string> Events(const std::string& body, size_t piece) {
  SseReader reader;
  std::vector<std::string> events;
  for (size_t at = 0; at < body.size(); at += piece) {
    EXPECT_TRUE(reader.Add(body.substr(at, piece),
                           [&](std::string_view data) { events.emplace_back(data); }));
  }
  return events;
}

TEST(SseReaderTest, EventsDoNotDependOnThePieces) {
  const std::string body =
      ": ping\n\ndata: {\"a\":1}\n\nevent: x\r\nid: 7\r\ndata:two\r\ndata:  lines\r\n\r\ndata: "
      "[DONE]\n\n";
  for (size_t piece = 1; piece <= body.size(); ++piece) {
    EXPECT_THAT(Events(body, piece), ElementsAre("{\"a\":1}", "two\n lines", "[DONE]")) << piece;
  }
}

TEST(SseReaderTest, AnEventWithoutItsEndIsNone) {
  EXPECT_THAT(Events("data: a\n\ndata: b\n", 100), ElementsAre("a"));
  EXPECT_THAT(Events("event: x\n\n\n", 100), ElementsAre());
}

TEST(SseReaderTest, AnEventWithoutAnEndIsGivenUp) {
  const std::string piece(1 << 20, 'x');
  for (const std::string line : {"", "\ndata: "}) {  // one line, and many
    SseReader reader;
    const auto none = [](std::string_view) { FAIL(); };
    size_t taken = 0;
    while (reader.Add("data: " + piece + line, none)) {
      taken += piece.size();
      ASSERT_LE(taken, SseReader::kMaxEventBytes);
    }
    EXPECT_GT(taken + 2 * piece.size(), SseReader::kMaxEventBytes);
  }
}

}  // namespace
}  // namespace cli
