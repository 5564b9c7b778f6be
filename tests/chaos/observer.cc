#include "tests/chaos/observer.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "status/grpc_status.h"
#include "tests/chaos/stream_model.h"

namespace chaos {
namespace {

constexpr absl::Duration kGrace = absl::Seconds(1);    // after the deadline
constexpr absl::Duration kGiveUp = absl::Seconds(30);  // after the deadline: it never ends
constexpr absl::Duration kTick = absl::Milliseconds(10);
constexpr size_t kMaxFaultsToTell = 20;
constexpr absl::Duration kReachLimit = absl::Seconds(30);

// A router that has come back is looked for again at once.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

struct Observer::Call {
  grpc::ClientContext context;
  absl::Time start = absl::Now();
  absl::Time give_up = absl::InfiniteFuture();
  absl::Duration asleep_before;
  bool given_up = false;
  bool nobody_there = false;  // at some time
  const std::atomic<bool>* leave = nullptr;
  std::string wrong;
};

Question MakeQuestion(integration::SingleEngine& oracle, const integration::Ask& ask,
                      uint32_t num_branches) {
  Question question = {.request = integration::ToRequest(ask), .expected = {}};
  if (num_branches > 1) question.request.mutable_sampling()->set_n(num_branches);
  for (uint32_t branch = 0; branch < num_branches; ++branch) {
    question.expected.push_back(integration::Expected(oracle, ask, branch));
  }
  return question;
}

void Tally::Add(const Tally& other) {
  requests += other.requests;
  for (const auto& [ending, count] : other.endings) endings[ending] += count;
  lost += other.lost;
  wrong += other.wrong;
  late += other.late;
  longest = std::max(longest, other.longest);
  worst_overrun = std::max(worst_overrun, other.worst_overrun);
  faults_found.insert(faults_found.end(), other.faults_found.begin(), other.faults_found.end());
}

Observer::Observer(const std::string& router_address)
    : channel_(MakeChannel(router_address)),
      stub_(ferry::v1::Inference::NewStub(channel_)),
      watch_([this] { Watch(); }) {}

Observer::~Observer() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  watch_.join();
}

// A machine that is busy with other things is no router that is late.
void Observer::Watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const absl::Time before = absl::Now();
    changed_.wait_for(lock, absl::ToChronoNanoseconds(kTick));
    const absl::Time now = absl::Now();
    if (now - before > 5 * kTick) asleep_ += now - before - kTick;
    for (Call* call : calls_) {
      call->given_up |= now >= call->give_up;
      const bool leaves = call->leave != nullptr && *call->leave;
      if (call->given_up || leaves) call->context.TryCancel();
    }
  }
}

Outcome Observer::Ask(const Question& question, const Manner& manner) {
  Call call;
  if (!manner.deadline_is_routers) {
    call.context.set_deadline(absl::ToChronoTime(call.start + manner.deadline));
  }
  {
    std::lock_guard lock(mutex_);
    call.give_up = call.start + manner.deadline + kGiveUp;
    call.asleep_before = asleep_;
    call.nobody_there = nobody_there_;
    call.leave = manner.leave;
    calls_.insert(&call);
  }
  StreamModel model(static_cast<size_t>(question.request.tokens().ids_size()), question.expected);
  Outcome outcome;
  const auto stream = stub_->Generate(&call.context, question.request);
  ferry::v1::GenerateResponse message;
  int num_messages = 0;
  const auto leave_in_time = [&] {
    if (num_messages != manner.leaves_after) return;
    model.OnClientLeaves();
    call.context.TryCancel();
  };
  leave_in_time();
  while (stream->Read(&message)) {
    model.OnMessage(message);
    if (manner.on_tokens != nullptr) manner.on_tokens(model.num_tokens());
    if (message.has_summary()) outcome.summary = message.summary();
    ++num_messages;
    leave_in_time();
  }
  outcome.status = status::FromGrpc(stream->Finish());
  outcome.took = absl::Now() - call.start;
  outcome.num_tokens = model.num_tokens();
  if (manner.leave != nullptr && *manner.leave) model.OnClientLeaves();
  {
    std::lock_guard lock(mutex_);
    model.OnEnd(outcome.status, /*router_died=*/call.nobody_there);
  }
  call.wrong = model.wrong();
  Judge(question, manner, call, outcome);
  return outcome;
}

void Observer::Judge(const Question& question, const Manner& manner, const Call& call,
                     const Outcome& outcome) {
  std::lock_guard lock(mutex_);
  bool right_to_end = false;
  switch (outcome.status.code()) {
    case absl::StatusCode::kOk:
      right_to_end = true;
      break;
    case absl::StatusCode::kCancelled:
      right_to_end = manner.leaves_after >= 0 || (manner.leave != nullptr && *manner.leave);
      break;
    case absl::StatusCode::kResourceExhausted:
      // Or its deadline is foreseen to pass: told at once instead of then.
      right_to_end = outcome.num_tokens == 0 &&
                     (manner.may_be_refused ||
                      (manner.may_run_out && status::Reason(outcome.status) == status::kDeadline));
      break;
    case absl::StatusCode::kDeadlineExceeded:
      right_to_end = manner.may_run_out;
      break;
    case absl::StatusCode::kUnavailable:
      // Once by default an output goes on elsewhere; then it may break off.
      right_to_end = manner.may_fail || call.nobody_there || outcome.num_tokens > 0;
      break;
    default:
      break;
  }
  calls_.erase(const_cast<Call*>(&call));
  const absl::Duration overrun = outcome.took - (asleep_ - call.asleep_before) - manner.deadline;
  ++num_ended_;
  ++tally_.requests;
  ++tally_.endings[absl::StatusCodeToString(outcome.status.code())];
  tally_.longest = std::max(tally_.longest, outcome.took);
  tally_.worst_overrun = std::max(tally_.worst_overrun, overrun);
  const auto tell = [&](const std::string& what) {
    if (tally_.faults_found.size() >= kMaxFaultsToTell) return;
    tally_.faults_found.push_back(absl::StrCat(
        what, ": request of ", question.request.tokens().ids_size(), " tokens for ",
        question.request.sampling().max_tokens(), ", deadline ",
        absl::FormatDuration(manner.deadline), ", ended after ", absl::FormatDuration(outcome.took),
        " and ", outcome.num_tokens, " tokens with ", outcome.status.ToString()));
  };
  if (!call.wrong.empty() && !call.given_up) {
    ++tally_.wrong;
    tell(absl::StrCat("wrong (", call.wrong, ")"));
  }
  if (call.given_up || !right_to_end) {
    ++tally_.lost;
    tell(call.given_up ? "never ended" : "lost");
  } else if (overrun > kGrace) {
    ++tally_.late;
    tell("late");
  }
  changed_.notify_all();
}

void Observer::SetNobodyThere(bool nobody_there) {
  if (!nobody_there) WaitForRouter(kReachLimit);
  std::lock_guard lock(mutex_);
  nobody_there_ = nobody_there;
  for (Call* call : calls_) call->nobody_there |= nobody_there;
}

void Observer::WaitForRouter(absl::Duration timeout) {
  channel_->WaitForConnected(absl::ToChronoTime(absl::Now() + timeout));
}

Tally Observer::Take() {
  std::lock_guard lock(mutex_);
  return std::exchange(tally_, {});
}

bool Observer::WaitForEnds(int64_t count, absl::Duration timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                           [&, until = num_ended_ + count] { return num_ended_ >= until; });
}

}  // namespace chaos
