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
    reader.Add(body.substr(at, piece), [&](std::string_view data) { events.emplace_back(data); });
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

}  // namespace
}  // namespace cli
