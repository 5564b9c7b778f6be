// The output side of a Generation: tokens become text for the client, a slow client holds the
// worker back, a finished answer gets its summary and its log line.

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ferry/v1/inference.pb.h"
#include "ferry/v1/worker.pb.h"
#include "router/generation.h"
#include "service/process.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router {
namespace {

// How long a finished answer waits for the workers' last words (the numbers of the summary).
constexpr absl::Duration kFinishWait = absl::Milliseconds(250);
// Output that a slow client may leave in the router before its decode stream is held back.
constexpr size_t kMaxPendingBytes = 1 << 20;

double Milliseconds(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

std::string OrDash(const std::string& value) { return value.empty() ? "-" : value; }

// Workers know ids only: the bytes of each token are put in here.
void NameTokens(const tokenizer::Tokenizer* tokenizer, ferry::v1::PositionLogprobs* position) {
  const auto name = [tokenizer](ferry::v1::TokenLogprob* logprob) {
    const auto id = static_cast<int32_t>(logprob->token_id());
    if (tokenizer == nullptr || id < 0 || id >= tokenizer->vocab_size()) return;
    logprob->set_token(std::string(tokenizer->TokenBytes(id)));
  };
  name(position->mutable_chosen());
  for (auto& top : *position->mutable_top()) name(&top);
}

}  // namespace

void Generation::OnClientDrained() {
  if (!paused_ || client_->pending_bytes() > kMaxPendingBytes / 2) return;
  paused_ = false;
  silent_since_ = context_.loop->AwakeNow();  // the silence was ours
  if (decode_leg_ != nullptr) decode_leg_->ReadNext();
}

void Generation::OnDecodeTokens(const ferry::v1::DecodeTokens& tokens) {
  if (phase_ == Phase::kEnded || phase_ == Phase::kFinishing) return;
  const bool ended = tokens.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED;
  if (tokens.branch() >= branches_.size() || (tokens.token_ids().empty() && !ended) ||
      (prepared_.wants_logprobs && tokens.logprobs_size() != tokens.token_ids_size())) {
    FailTry(Leg::kDecode, absl::InternalError(absl::StrCat(
                              "worker ", decode_address_, " sent ", tokens.token_ids_size(),
                              " tokens and ", tokens.logprobs_size(), " logprobs for branch ",
                              tokens.branch(), " of ", branches_.size())));
    return;
  }
  const absl::Time now = EventLoop::Now();
  silent_since_ = context_.loop->AwakeNow();
  if (phase_ != Phase::kDecoding) {
    if (first_token_at_ == absl::InfinitePast()) first_token_at_ = now;
    phase_ = Phase::kDecoding;
    context_.ledger->Commit(placement_.decode_cache_charge);
    context_.breakers->Answered(placement_.decode, decode_epoch_, entry.arrival);
    context_.metrics->ObserveStage("first_token", now - placed_at_);
    if (attempt_ == 1) context_.dispatcher->OnFirstToken(*this, placement_, now - placed_at_);
    if (placement_.predicted_ttft_ms > 0) {
      context_.metrics->ObservePredictedTtftRatio(Milliseconds(now - placed_at_) /
                                                  placement_.predicted_ttft_ms);
    }
    WatchIdle();
  }
  Branch& branch = branches_[tokens.branch()];
  branch.ended_by_worker = branch.ended_by_worker || ended;
  if (!branch.finished) {
    if (branch.position < branch.tokens.size()) {
      ferry::v1::DecodeTokens rest = tokens;
      if (!TakeRepeated(&branch, &rest)) return;
      if (ended || !rest.token_ids().empty()) Deliver(&branch, rest, now);
    } else {
      Deliver(&branch, tokens, now);
    }
    if (open_branches_ == 0) {
      OutputComplete();
      return;
    }
  }
  if (client_->pending_bytes() > kMaxPendingBytes) {
    paused_ = true;
  } else if (decode_leg_ != nullptr) {
    decode_leg_->ReadNext();
  }
}

bool Generation::TakeRepeated(Branch* branch, ferry::v1::DecodeTokens* tokens) {
  int known = 0;
  for (; known < tokens->token_ids_size() && branch->position < branch->tokens.size(); ++known) {
    const uint32_t sent = branch->tokens[branch->position];
    if (tokens->token_ids(known) != sent) {
      End(status::WithPublicMessage(
          absl::UnavailableError(absl::StrCat(
              "the output could not go on at worker ", decode_address_, ": token ",
              branch->position, " of branch ", tokens->branch(), " is ", tokens->token_ids(known),
              " there, but ", sent, " has been sent; before that: ", last_failure_)),
          "the output could not go on at another worker"));
      return false;
    }
    ++branch->position;
  }
  auto* const ids = tokens->mutable_token_ids();
  ids->erase(ids->begin(), ids->begin() + known);
  tokens->mutable_logprobs()->DeleteSubrange(0, std::min(known, tokens->logprobs_size()));
  return true;
}

void Generation::Deliver(Branch* branch, const ferry::v1::DecodeTokens& tokens, absl::Time now) {
  const bool ended = tokens.finish_reason() != ferry::v1::FINISH_REASON_UNSPECIFIED;
  const bool is_first = branch->last_token == absl::InfinitePast();
  if (!is_first) context_.metrics->ObserveTokenGap(now - branch->last_token);
  branch->last_token = now;
  const TextStream::Piece piece = branch->text.Add(
      tokens.token_ids(), ended, tokens.finish_reason() == ferry::v1::FINISH_REASON_STOP);
  ferry::v1::GenerateResponse message;
  message.set_index(tokens.branch());
  message.set_text(piece.text);
  for (int32_t i = 0; i < piece.num_tokens; ++i) {
    message.add_token_ids(tokens.token_ids(i));
    branch->tokens.push_back(tokens.token_ids(i));
    if (!prepared_.wants_logprobs) continue;
    *message.add_logprobs() = tokens.logprobs(i);
    NameTokens(prepared_.model->tokenizer.get(), message.mutable_logprobs(i));
  }
  branch->position = branch->tokens.size();
  output_tokens_ += piece.num_tokens;
  if (!is_first) further_tokens_ += piece.num_tokens;
  if (piece.stopped || ended) {
    message.set_finish_reason(piece.stopped ? ferry::v1::FINISH_REASON_STOP
                                            : tokens.finish_reason());
    branch->finished = true;
    --open_branches_;
  }
  client_->Write(message);
}

void Generation::OnDecodeDone(const ferry::v1::DecodeDone& done) {
  decode_done_ = std::make_unique<ferry::v1::DecodeDone>(done);
  context_.registry->OnPrefilled(placement_.decode, decode_epoch_, done.computed_tokens(),
                                 done.cached_tokens(), absl::Milliseconds(done.prefill_ms()),
                                 EventLoop::Now());
  if (phase_ != Phase::kFinishing) {
    FailTry(Leg::kDecode,
            absl::InternalError(absl::StrCat("worker ", decode_address_, " was done with ",
                                             open_branches_, " branches unfinished")));
    return;
  }
  FinishIfSettled();
}

void Generation::WatchIdle() {
  const absl::Duration left = silent_since_ + context_.stream_idle - context_.loop->AwakeNow();
  idle_timer_ = context_.loop->After(left, [this] {
    idle_timer_ = 0;
    if (phase_ != Phase::kDecoding) return;
    if (paused_) silent_since_ = context_.loop->AwakeNow();
    if (context_.loop->AwakeNow() - silent_since_ < context_.stream_idle) {
      WatchIdle();
      return;
    }
    FailTry(Leg::kDecode, absl::UnavailableError(
                              absl::StrCat("worker ", decode_address_, " has sent no token for ",
                                           absl::FormatDuration(context_.stream_idle))));
  });
}

void Generation::OutputComplete() {
  phase_ = Phase::kFinishing;
  context_.breakers->Completed(placement_.decode, decode_epoch_, entry.arrival);
  const bool worker_is_done = std::all_of(branches_.begin(), branches_.end(),
                                          [](const Branch& b) { return b.ended_by_worker; });
  if (worker_is_done) {
    decode_leg_->ReadNext();
  } else {
    CloseDecode("stop string");  // the worker cannot know that one was met
  }
  finish_timer_ = context_.loop->After(kFinishWait, [this] {
    finish_timer_ = 0;
    WriteSummary();
  });
  FinishIfSettled();
}

void Generation::FinishIfSettled() {
  if (phase_ != Phase::kFinishing) return;
  const bool decode_settled = decode_done_ != nullptr || decode_leg_ == nullptr;
  const bool prefill_settled = prefill_done_ != nullptr || prefill_leg_ == nullptr;
  if (decode_settled && prefill_settled) WriteSummary();
}

void Generation::WriteSummary() {
  const absl::Time now = EventLoop::Now();
  ferry::v1::GenerateResponse message;
  ferry::v1::GenerateSummary& summary = *message.mutable_summary();
  summary.set_request_id(prepared_.request_id);
  summary.set_prompt_tokens(prepared_.num_prompt_tokens());
  summary.set_completion_tokens(output_tokens_);
  summary.set_decode_worker(decode_address_);
  summary.set_prefill_worker(placement_.local() ? decode_address_ : prefill_address_);
  if (prefill_done_ != nullptr) {
    summary.set_cached_tokens(prefill_done_->cached_tokens());
    summary.set_kv_bytes(prefill_done_->kv_bytes());
    summary.set_kv_blocks(prefill_done_->kv_blocks());
    *summary.mutable_kv_groups() = prefill_done_->groups();
    summary.set_kv_transport(prefill_done_->transport());
    summary.set_kv_transfer_ms(prefill_done_->transfer_ms());
  } else {
    // A stop string may end the request before the worker says what it had.
    summary.set_cached_tokens(placement_.local() && decode_done_ != nullptr
                                  ? decode_done_->cached_tokens()
                                  : placement_.cached_tokens);
  }
  // After a migration some of what was cached is output.
  summary.set_cached_tokens(std::min(summary.cached_tokens(), summary.prompt_tokens()));
  summary.set_ttft_ms(Milliseconds(first_token_at_ - prepared_.arrival));
  summary.set_total_ms(Milliseconds(now - prepared_.arrival));
  summary.set_attempts(attempt_);
  summary.set_migrations(migrations_);
  summary.set_seed(prepared_.spec->sampling().seed());
  summary.set_further_tokens(further_tokens_);
  summary.set_decode_ms(Milliseconds(DecodeTime()));
  client_->Write(message);
  End(absl::OkStatus());
}

absl::Duration Generation::DecodeTime() const {
  absl::Time last = first_token_at_;
  for (const Branch& branch : branches_) last = std::max(last, branch.last_token);
  return last - first_token_at_;
}

void Generation::LogEnd(const absl::Status& status) const {
  const absl::Time now = EventLoop::Now();
  const bool has_token = first_token_at_ != absl::InfinitePast();
  spdlog::info(
      "request_id={} trace_id={} model={} status={} phase={} prompt_tokens={} output_tokens={} "
      "n={} "
      "attempts={} migrations={} prefill_worker={} decode_worker={} kv_bytes={} queue_ms={:.1f}{} "
      "total_ms={:.1f}{}",
      prepared_.request_id, prepared_.trace.trace_id, service::LogValue(prepared_.model->name),
      status::CodeName(status.code()), PhaseName(phase_), prepared_.num_prompt_tokens(),
      output_tokens_, branches_.size(), attempt_, migrations_,
      attempt_ > 0 && placement_.local() ? "local" : OrDash(prefill_address_),
      OrDash(decode_address_), prefill_done_ != nullptr ? prefill_done_->kv_bytes() : 0,
      Milliseconds(queue_time_),
      has_token
          ? absl::StrFormat(" ttft_ms=%.1f", Milliseconds(first_token_at_ - prepared_.arrival))
          : "",
      Milliseconds(now - prepared_.arrival),
      status.ok() ? "" : " cause=" + service::LogValue(std::string(status.message())));
}

}  // namespace router
