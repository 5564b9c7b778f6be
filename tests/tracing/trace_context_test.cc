#include "tracing/trace_context.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tracing {
namespace {

using testing::MatchesRegex;

// The standard's own example.
constexpr char kHeader[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

TEST(TraceContextTest, GoesOnWithWhatItGets) {
  const TraceContext span = BeginSpan(kHeader, /*new_sampled=*/0);
  EXPECT_EQ(span.trace_id, "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(span.parent_span_id, "00f067aa0ba902b7");
  EXPECT_THAT(span.span_id, MatchesRegex("[0-9a-f]{16}"));
  EXPECT_NE(span.span_id, span.parent_span_id);
  EXPECT_TRUE(span.sampled);
  EXPECT_EQ(Traceparent(span), "00-4bf92f3577b34da6a3ce929d0e0e4736-" + span.span_id + "-01");
  EXPECT_EQ(TraceIdOf(kHeader), span.trace_id);
}

TEST(TraceContextTest, WhoIsNotSampledStaysSo) {
  const TraceContext span =
      BeginSpan("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00", /*new_sampled=*/1);
  EXPECT_FALSE(span.sampled);
  EXPECT_EQ(Traceparent(span).substr(53), "00");
  EXPECT_TRUE(BeginSpan("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0b").sampled)
      << "flags that are not known yet";
}

TEST(TraceContextTest, ALaterVersionMaySayMore) {
  const std::string later = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  EXPECT_EQ(BeginSpan(later).parent_span_id, "00f067aa0ba902b7");
  EXPECT_EQ(BeginSpan(later + "-more").parent_span_id, "00f067aa0ba902b7");
  EXPECT_TRUE(BeginSpan(later + "more").parent_span_id.empty());
  EXPECT_TRUE(BeginSpan(absl::StrCat(kHeader, "-more")).parent_span_id.empty());
}

TEST(TraceContextTest, WhatIsMalformedBeginsANewTrace) {
  std::set<std::string> traces;
  for (const char* header : {
           "",
           "00",
           "nonsense",
           "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
           "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
           "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
           "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
           "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
           "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
           "00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
           "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0x",
       }) {
    const TraceContext span = BeginSpan(header);
    EXPECT_THAT(span.trace_id, MatchesRegex("[0-9a-f]{32}"));
    EXPECT_TRUE(span.parent_span_id.empty()) << header;
    EXPECT_TRUE(span.sampled);
    EXPECT_TRUE(traces.insert(span.trace_id).second) << "two traces are one";
    EXPECT_EQ(TraceIdOf(header), "-") << header;
    EXPECT_EQ(TraceIdOf(Traceparent(span)), span.trace_id);
  }
  EXPECT_FALSE(BeginSpan("", /*new_sampled=*/0).sampled);
}

}  // namespace
}  // namespace tracing
