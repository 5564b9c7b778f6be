// The Dispatcher's refusals: a queue that is full, a first token that would come too late, workers
// that nobody can be sent to.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "router/dispatcher.h"
#include "status/grpc_status.h"
#include "status/public_message.h"

namespace router {
namespace {

// When to come back: never sooner than this, and after this where nothing is known.
constexpr absl::Duration kSoonest = absl::Milliseconds(100);
constexpr absl::Duration kUnknown = absl::Seconds(1);
// And, where it is an estimate, never later: a queue that would take longer is seldom the same one
// by then, workers come and clients leave.
constexpr absl::Duration kLatest = absl::Seconds(60);

// "no decode worker", "1 decode worker", "2 decode workers".
std::string Counted(int32_t count, const char* what) {
  return absl::StrCat(count == 0 ? "no" : absl::StrCat(count), " ", what, count > 1 ? "s" : "");
}

absl::Status ComeBack(absl::Status status, absl::Duration delay) {
  return status::WithRetryAfter(std::move(status), std::clamp(delay, kSoonest, kLatest));
}

// `workers`: sentences about some of them, for those who run them.
absl::Status NotServable(absl::StatusCode code, const std::string& message,
                         std::vector<std::string> workers) {
  const std::string more =
      workers.empty() ? "" : absl::StrCat("; ", WorkerRegistry::Joined(std::move(workers)));
  return status::WithPublicMessage(absl::Status(code, message + more), message);
}

absl::Status Unavailable(const std::string& message, std::vector<std::string> workers) {
  return ComeBack(NotServable(absl::StatusCode::kUnavailable, message, std::move(workers)),
                  kUnknown);
}

std::string Rounded(absl::Duration duration) {
  return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(1)));
}

absl::Status Late(const std::string& message, absl::Duration delay) {
  return ComeBack(status::WithReason(absl::ResourceExhaustedError(message), status::kDeadline),
                  delay);
}

}  // namespace

absl::Duration Dispatcher::MaxTtft(const Waiting& waiting) const {
  const absl::Duration stated = waiting.request->max_ttft;
  const absl::Duration max = stated > absl::ZeroDuration() ? stated : options_.max_ttft;
  return max > absl::ZeroDuration() ? max : absl::InfiniteDuration();
}

int64_t Dispatcher::TokensBefore(const Waiting& waiting) const {
  const bool needs_prefill =
      waiting.request->tokens.size() > static_cast<size_t>(options_.policy.local_prefill_tokens);
  return queue_.TokensBefore(waiting.entry, needs_prefill);
}

absl::Status Dispatcher::Enter(Waiting* waiting) {
  const WaitEstimate& estimate = estimates_[waiting->entry.model];
  const int64_t tokens = TokensBefore(*waiting);
  const absl::Duration wait = estimate.Wait(tokens);
  if (wait > absl::ZeroDuration()) {
    const absl::Duration foreseen = wait + estimate.FirstToken();
    const absl::Duration max_ttft = MaxTtft(*waiting);
    const absl::Duration budget = waiting->request->deadline - EventLoop::Now();
    if (foreseen > std::min(max_ttft, budget)) {
      return Late(
          absl::StrCat("the first token is foreseen in ", Rounded(foreseen), ", behind ", tokens,
                       " tokens of waiting requests: later than the ",
                       max_ttft <= budget ? absl::StrCat(Rounded(max_ttft), " allowed for it")
                                          : absl::StrCat("deadline in ", Rounded(budget))),
          foreseen - std::min(max_ttft, budget));
    }
  }
  if (absl::Status status = queue_.Enter(&waiting->entry); !status.ok()) {
    if (absl::IsInvalidArgument(status)) return status;
    // A tenant's rate is no estimate: whoever came back sooner would be refused again.
    const absl::Duration known = status::RetryAfter(status);
    if (known >= kLatest) return status;
    const absl::Duration delay = std::max(known, wait);
    return ComeBack(std::move(status), delay > absl::ZeroDuration() ? delay : kUnknown);
  }
  waiting_[&waiting->entry] = waiting;
  SchedulePump();
  return absl::OkStatus();
}

absl::Status Dispatcher::CheckTtft(const Waiting& waiting, const Choice& choice,
                                   const std::vector<WorkerView>& views, absl::Time now) const {
  const absl::Duration max_ttft = MaxTtft(waiting);
  if (waiting.entry.is_running || max_ttft == absl::InfiniteDuration()) return absl::OkStatus();
  // An idle worker is always tried, so that a prediction that is wrong can be seen to be.
  const WorkerView& computes = views[choice.prefill >= 0 ? choice.prefill : choice.decode];
  const auto estimate = estimates_.find(waiting.entry.model);
  if (computes.requests == 0 || estimate == estimates_.end()) return absl::OkStatus();
  const absl::Duration foreseen =
      now - waiting.request->arrival +
      estimate->second.Corrected(absl::Milliseconds(choice.predicted_ttft_ms));
  if (foreseen <= max_ttft) return absl::OkStatus();
  return Late(absl::StrCat("the first token is foreseen ", Rounded(foreseen),
                           " after the request's arrival: later than the ", Rounded(max_ttft),
                           " allowed for it"),
              foreseen - max_ttft);
}

absl::Status Dispatcher::TooLate(const Waiting& waiting) const {
  const absl::Duration max_ttft = MaxTtft(waiting);
  const auto estimate = estimates_.find(waiting.entry.model);
  const absl::Duration wait =
      estimate == estimates_.end() ? kUnknown : estimate->second.Wait(TokensBefore(waiting));
  return Late(absl::StrCat("no worker had room within the ", Rounded(max_ttft),
                           " allowed for the first token"),
              wait);
}

void Dispatcher::OnFirstToken(const Waiting& waiting, const Placement& placement,
                              absl::Duration observed) {
  estimates_[waiting.entry.model].OnFirstToken(absl::Milliseconds(placement.predicted_ttft_ms),
                                               observed);
}

bool Dispatcher::IsLastResort(const Waiting& waiting, absl::Time now) const {
  const absl::Duration passed = now - waiting.unplaceable_since_;
  return passed >= std::min(options_.worker_wait, (waiting.request->deadline - now) / 2);
}

bool Dispatcher::MayBePlaceableYet(const Waiting& waiting, absl::Time now) const {
  const RequestView view = waiting.request->view();
  if (!waiting.request->model->lengths().Holds(view.prompt_tokens, view.total_tokens)) return false;
  const absl::Duration wait = registry_->AllServe() ? options_.grace : options_.worker_wait;
  return now - waiting.unplaceable_since_ < wait;
}

absl::Status Dispatcher::Unplaceable(const Waiting& waiting) const {
  const ModelAssets& model = *waiting.request->model;
  const WorkerRegistry::Ready ready = registry_->ReadyWorkers(model);
  const RequestView view = waiting.request->view();
  const int64_t tokens = view.prompt_tokens;
  const LengthLimits lengths = model.lengths();
  // The door let it in: since then a worker has come back that takes less than before.
  if (tokens > waiting.request->num_prompt_tokens() && !lengths.Holds(tokens, view.total_tokens)) {
    return Unavailable(
        absl::StrCat("the output cannot go on: no worker takes the ", tokens, " tokens so far"),
        registry_->Away());
  }
  if (tokens > lengths.prompt()) return PromptTooLong(tokens, lengths);
  if (!lengths.Holds(tokens, view.total_tokens)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prompt has ", tokens, " tokens, with the output asked for ", view.total_tokens,
        ": the context of ", lengths.TotalFor(tokens), " is passed"));
  }
  if (ready.decode == 0) {
    std::vector<std::string> reasons = registry_->UnusedWorkers();
    for (std::string& one : registry_->Away()) reasons.push_back(std::move(one));
    const std::vector<std::string> served = registry_->ServedModelNames();
    return status::WithReason(
        Unavailable(
            absl::StrCat("no decode worker serves model ", model.name, " now; models served now: ",
                         served.empty() ? "none" : absl::StrJoin(served, ", ")),
            std::move(reasons)),
        status::kNoWorker);
  }
  std::string message = absl::StrCat(
      "no pair of workers can serve a prompt of ", tokens, " tokens for model ", model.name,
      " now: ", Counted(ready.decode, "decode worker"), ", ", Counted(ready.prefill, "worker"),
      ready.prefill > 1 ? " that prefill" : " that prefills", " any length");
  const std::vector<std::string> misfits = registry_->Misfits(model);
  const WorkerLimits limits = model.worker_limits();
  std::vector<std::string> away;
  if (limits.serving_context > 0 && !limits.serving.Holds(tokens, view.total_tokens)) {
    if (tokens > limits.serving.prompt()) {
      absl::StrAppend(&message, "; the longest prompt that they take has ", limits.serving.prompt(),
                      " tokens");
    } else {
      absl::StrAppend(&message, "; with its output it has ", view.total_tokens,
                      ", they take at most ", limits.serving.TotalFor(tokens));
    }
    away = registry_->AwayFor(model, view);
    if (!away.empty()) absl::StrAppend(&message, "; workers that take more are away");
  }
  if (away.empty()) away = registry_->Away();
  if (ready.prefill == 0 && misfits.empty()) {
    absl::StrAppend(&message,
                    "; start a ferry-prefill, or a ferry-decode with --role=both, that is named in "
                    "--workers");
  } else if (ready.prefill == 0) {
    absl::StrAppend(&message, "; workers that prefill are there, but fit none that decodes");
  }
  std::vector<std::string> workers;
  for (std::vector<std::string> sentences : {away, misfits}) {
    if (!sentences.empty()) workers.push_back(WorkerRegistry::Joined(std::move(sentences)));
  }
  if (ready.prefill > 0 || misfits.empty()) {
    return Unavailable(message, std::move(workers));
  }
  // Only a restart of a worker mends that.
  return status::WithReason(
      NotServable(absl::StatusCode::kFailedPrecondition, message, std::move(workers)),
      status::kIncompatible);
}

}  // namespace router
