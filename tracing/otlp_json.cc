#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tracing/span_exporter.h"

namespace tracing {
namespace {

using nlohmann::json;

// Of opentelemetry.proto.trace.v1.
constexpr int kInternal = 1;
constexpr int kServer = 2;
constexpr int kError = 2;

json Attribute(const std::string& key, const std::variant<std::string, int64_t, double>& value) {
  json typed;
  if (const auto* text = std::get_if<std::string>(&value)) {
    typed = {{"stringValue", *text}};
  } else if (const auto* number = std::get_if<int64_t>(&value)) {
    typed = {{"intValue", std::to_string(*number)}};  // 64 bits are strings in protobuf's JSON
  } else {
    typed = {{"doubleValue", std::get<double>(value)}};
  }
  return {{"key", key}, {"value", typed}};
}

json SpanJson(const Span& span) {
  json result = {{"traceId", span.context.trace_id},
                 {"spanId", span.context.span_id},
                 {"name", span.name},
                 {"kind", span.is_server ? kServer : kInternal},
                 {"startTimeUnixNano", absl::StrCat(absl::ToUnixNanos(span.start))},
                 {"endTimeUnixNano", absl::StrCat(absl::ToUnixNanos(span.end))},
                 {"attributes", json::array()},
                 {"status", json::object()}};
  if (!span.context.parent_span_id.empty()) result["parentSpanId"] = span.context.parent_span_id;
  for (const auto& [key, value] : span.attributes) {
    result["attributes"].push_back(Attribute(key, value));
  }
  if (!span.error.empty()) result["status"] = {{"code", kError}, {"message", span.error}};
  return result;
}

}  // namespace

std::string ToOtlpJson(const SpanExporter::Options& options, const std::vector<Span>& spans) {
  json list = json::array();
  for (const Span& span : spans) list.push_back(SpanJson(span));
  const json resource = {
      {"attributes", json::array({Attribute("service.name", options.service_name),
                                  Attribute("service.version", options.service_version)})}};
  const json scope = {{"scope", {{"name", "ferry"}, {"version", options.service_version}}},
                      {"spans", std::move(list)}};
  const json body = {{"resourceSpans", json::array({{{"resource", resource},
                                                     {"scopeSpans", json::array({scope})}}})}};
  // Messages of errors may hold any bytes.
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace tracing
