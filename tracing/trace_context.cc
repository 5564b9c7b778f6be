#include "tracing/trace_context.h"

#include <cstdint>
#include <limits>
#include <optional>

#include "absl/random/random.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"

namespace tracing {
namespace {

// version "-" trace-id "-" parent-id "-" flags
constexpr size_t kTraceAt = 3;
constexpr size_t kSpanAt = 36;
constexpr size_t kFlagsAt = 53;
constexpr size_t kLength = 55;

uint64_t RandomNonZero() {
  thread_local absl::BitGen random;
  return absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1,
                                 std::numeric_limits<uint64_t>::max());
}

double RandomFraction() {
  thread_local absl::BitGen random;
  return absl::Uniform(random, 0.0, 1.0);
}

bool IsLowerHex(absl::string_view text) {
  for (const char c : text) {
    if (!absl::ascii_isdigit(c) && (c < 'a' || c > 'f')) return false;
  }
  return true;
}

bool IsZero(absl::string_view text) {
  return text.find_first_not_of('0') == absl::string_view::npos;
}

// With span_id that of the sender.
std::optional<TraceContext> Parse(absl::string_view header) {
  header = absl::StripAsciiWhitespace(header);
  if (header.size() < kLength) return std::nullopt;
  const absl::string_view version = header.substr(0, 2);
  const absl::string_view trace_id = header.substr(kTraceAt, 32);
  const absl::string_view span_id = header.substr(kSpanAt, 16);
  const absl::string_view flags = header.substr(kFlagsAt, 2);
  if (header[2] != '-' || header[kSpanAt - 1] != '-' || header[kFlagsAt - 1] != '-' ||
      !IsLowerHex(version) || !IsLowerHex(trace_id) || !IsLowerHex(span_id) || !IsLowerHex(flags) ||
      IsZero(trace_id) || IsZero(span_id) || version == "ff") {
    return std::nullopt;
  }
  // Later versions may say more behind another dash.
  if (header.size() > kLength && (version == "00" || header[kLength] != '-')) return std::nullopt;
  const int low = absl::ascii_isdigit(flags[1]) ? flags[1] - '0' : flags[1] - 'a' + 10;
  return TraceContext{.trace_id = std::string(trace_id),
                      .span_id = std::string(span_id),
                      .parent_span_id = {},
                      .sampled = (low & 1) != 0};
}

}  // namespace

std::string NewSpanId() { return absl::StrFormat("%016x", RandomNonZero()); }

TraceContext BeginSpan(absl::string_view traceparent, double new_sampled) {
  if (std::optional<TraceContext> received = Parse(traceparent); received.has_value()) {
    received->parent_span_id = received->span_id;
    received->span_id = NewSpanId();
    return *std::move(received);
  }
  return {.trace_id = absl::StrFormat("%016x%016x", RandomNonZero(), RandomNonZero()),
          .span_id = NewSpanId(),
          .parent_span_id = {},
          .sampled = RandomFraction() < new_sampled};
}

std::string Traceparent(const TraceContext& context) {
  return absl::StrFormat("00-%s-%s-%s", context.trace_id, context.span_id,
                         context.sampled ? "01" : "00");
}

std::string TraceIdOf(absl::string_view traceparent) {
  const std::optional<TraceContext> context = Parse(traceparent);
  return context.has_value() ? context->trace_id : "-";
}

}  // namespace tracing
