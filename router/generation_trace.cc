// A Generation's part in a distributed trace: the span of the whole request, and in it those of its
// stages.  Times at workers are theirs, put where the router heard of them, and within what the
// router knows: news may come late.

#include <algorithm>

#include "ferry/v1/worker.pb.h"
#include "router/generation.h"
#include "status/grpc_status.h"
#include "tracing/span_exporter.h"

namespace router {

std::string Generation::Traceparent() const { return tracing::Traceparent(prepared_.trace); }

void Generation::ExportSpans(const absl::Status& status) const {
  const absl::Time now = EventLoop::Now();
  const absl::Duration to_wall = absl::Now() - now;
  std::vector<tracing::Span> spans;
  spans.push_back({.context = prepared_.trace,
                   .name = "generate",
                   .is_server = true,
                   .start = prepared_.arrival + to_wall,
                   .end = now + to_wall});
  tracing::Span& whole = spans.back();
  whole.attributes = {{"ferry.request_id", prepared_.request_id},
                      {"ferry.model", prepared_.model->name},
                      {"ferry.prompt_tokens", int64_t{prepared_.num_prompt_tokens()}},
                      {"ferry.output_tokens", output_tokens_},
                      {"ferry.attempts", int64_t{attempt_}},
                      {"ferry.migrations", int64_t{migrations_}},
                      {"ferry.status", std::string(status::CodeName(status.code()))}};
  if (!status.ok()) whole.error = std::string(status.message());
  const auto add = [&](const char* name, absl::Time start, absl::Time end) -> tracing::Span& {
    tracing::TraceContext context = prepared_.trace;
    context.parent_span_id = prepared_.trace.span_id;
    context.span_id = tracing::NewSpanId();
    spans.push_back({.context = std::move(context),
                     .name = name,
                     .start = start + to_wall,
                     .end = end + to_wall});
    return spans.back();
  };
  const bool placed = placed_at_ != absl::InfinitePast();
  const bool waits = phase_ == Phase::kQueued;
  add("queue", queued_at_, placed && !waits ? placed_at_ : now);
  if (prefill_done_ != nullptr && prefill_started_at_ != absl::InfinitePast()) {
    tracing::Span& prefill =
        add("prefill", prefill_started_at_,
            std::min(prefill_started_at_ + absl::Milliseconds(prefill_done_->compute_ms()),
                     prefill_done_at_));
    prefill.attributes = {{"ferry.worker", prefill_address_},
                          {"ferry.computed_tokens", int64_t{prefill_done_->computed_tokens()}},
                          {"ferry.cached_tokens", int64_t{prefill_done_->cached_tokens()}}};
    tracing::Span& transfer =
        add("transfer",
            std::max(prefill_done_at_ - absl::Milliseconds(prefill_done_->transfer_ms()),
                     prefill_started_at_),
            prefill_done_at_);
    transfer.attributes = {{"ferry.from", prefill_address_},
                           {"ferry.to", decode_address_},
                           {"ferry.link", prefill_done_->transport()},
                           {"ferry.bytes", static_cast<int64_t>(prefill_done_->kv_bytes())}};
  }
  if (placement_.local() && decode_done_ != nullptr && first_token_at_ != absl::InfinitePast()) {
    tracing::Span& prefill =
        add("prefill",
            std::min(placed_at_ + absl::Milliseconds(decode_done_->wait_ms()), first_token_at_),
            first_token_at_);
    prefill.attributes = {{"ferry.worker", decode_address_},
                          {"ferry.computed_tokens", int64_t{decode_done_->computed_tokens()}},
                          {"ferry.cached_tokens", int64_t{decode_done_->cached_tokens()}}};
  }
  if (first_token_at_ != absl::InfinitePast()) {
    add("first_token", prepared_.arrival, first_token_at_);
    add("decode", first_token_at_, first_token_at_ + DecodeTime()).attributes = {
        {"ferry.worker", decode_address_}};
  }
  context_.spans->Export(std::move(spans));
}

}  // namespace router
