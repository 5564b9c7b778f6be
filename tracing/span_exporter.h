// SpanExporter: sends spans to a collector as OTLP/HTTP with JSON bodies, in batches, on a thread
// of its own.  Nothing waits for it: what the bounded queue cannot hold is dropped and counted.
//
// Thread-safe.

#ifndef TRACING_SPAN_EXPORTER_H_
#define TRACING_SPAN_EXPORTER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tracing/trace_context.h"

namespace tracing {

struct Span {
  TraceContext context;  // its own span_id, and that of the span it belongs to
  std::string name;
  bool is_server = false;  // the part of a process that was called; else within one
  absl::Time start;        // wall clock
  absl::Time end;
  std::vector<std::pair<std::string, std::variant<std::string, int64_t, double>>> attributes = {};
  std::string error = {};  // empty: it went well
};

class SpanExporter {
 public:
  struct Options {
    std::string endpoint;  // "http://collector:4318"; /v1/traces is put behind it
    std::string service_name;
    std::string service_version;
    size_t max_queue = 8192;  // spans
    absl::Duration timeout = absl::Seconds(10);
    // A collector that cannot be reached or is overloaded is asked again after this, doubled each
    // time up to max_back_off.
    absl::Duration first_back_off = absl::Milliseconds(500);
    absl::Duration max_back_off = absl::Seconds(30);
  };
  // REQUIRES: the endpoint is an http:// or https:// URL.  Errors: kInternal: libcurl does not
  // start.
  static absl::StatusOr<std::unique_ptr<SpanExporter>> Create(const Options& options);
  // Tries once more to send what is queued; takes about two seconds at most.
  virtual ~SpanExporter() = default;

  // Does not block.
  virtual void Export(std::vector<Span> spans) = 0;

  virtual int64_t num_exported() const = 0;
  virtual int64_t num_dropped() const = 0;  // the queue was full, or the collector refused them
};

// The body of one request.
std::string ToOtlpJson(const SpanExporter::Options& options, const std::vector<Span>& spans);

}  // namespace tracing

#endif  // TRACING_SPAN_EXPORTER_H_
