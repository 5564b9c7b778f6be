// A request's place in a distributed trace, as W3C Trace Context has it: the `traceparent` that
// comes with a request, goes to every process that works on it, and stands in its log lines.
//
// Plain values; thread-safe.

#ifndef TRACING_TRACE_CONTEXT_H_
#define TRACING_TRACE_CONTEXT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tracing {

inline constexpr char kTraceparent[] = "traceparent";  // of gRPC metadata and HTTP headers

struct TraceContext {
  std::string trace_id;        // 32 lower-case hex digits
  std::string span_id;         // 16: of this process's part, the parent of what it calls
  std::string parent_span_id;  // 16, or empty: the trace begins here
  bool sampled = false;        // its spans are to be exported
};

// Goes on with the trace that `traceparent` names, under a new span.  If that is empty or not as
// the standard has it, a new trace begins, which is sampled with probability `new_sampled`.
TraceContext BeginSpan(absl::string_view traceparent, double new_sampled = 1);

// What this process sends on.
std::string Traceparent(const TraceContext& context);

// Of what another process sent: its trace_id, or "-".
std::string TraceIdOf(absl::string_view traceparent);

std::string NewSpanId();

}  // namespace tracing

#endif  // TRACING_TRACE_CONTEXT_H_
