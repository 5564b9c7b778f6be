#include "router/worker_link.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ferry/v1/worker.pb.h"
#include "service/process.h"

namespace router {
namespace {

constexpr int kSuspectAfter = 3;  // heartbeats missed
constexpr int kDeadAfter = 5;
// Every 50 ms by default: several routers see each other only in these (bench/routing_policies).
constexpr int kReportsPerHeartbeat = 20;
constexpr absl::Duration kFirstBackOff = absl::Milliseconds(100);
constexpr absl::Duration kMaxBackOff = absl::Milliseconds(500);
constexpr absl::Duration kInfoTimeout = absl::Seconds(2);
constexpr size_t kEpochBytes = 16;
// What a worker may state, so that sums of a few such numbers stay numbers.
constexpr int32_t kMostOfACount = 1 << 28;
constexpr double kMostOfAnything = 1e12;

int32_t Bounded(uint64_t count) {
  return static_cast<int32_t>(std::min<uint64_t>(count, kMostOfACount));
}

LinkRole RoleOf(ferry::v1::WorkerRole role) {
  switch (role) {
    case ferry::v1::WORKER_ROLE_PREFILL:
      return LinkRole::kPrefill;
    case ferry::v1::WORKER_ROLE_DECODE:
      return LinkRole::kDecode;
    case ferry::v1::WORKER_ROLE_BOTH:
      return LinkRole::kBoth;
    default:
      return LinkRole::kUnknown;
  }
}

WorkerFacts FactsOf(const ferry::v1::WorkerInfo& info, const std::string& address) {
  const LinkRole role = RoleOf(info.role());
  const char* const kind = role == LinkRole::kPrefill ? "prefill worker " : "decode worker ";
  return {.epoch = info.epoch(),
          .role = role,
          .model = info.model(),
          .tokenizer_hash = info.tokenizer_hash(),
          .profile = pairing::ProfileOf(info, absl::StrCat(kind, address)),
          .block_size = static_cast<int32_t>(info.block_size()),
          .block_bytes = static_cast<int64_t>(info.block_bytes()),
          .num_blocks = static_cast<int32_t>(info.num_blocks()),
          .num_state_slots = static_cast<int32_t>(info.num_state_slots()),
          .max_seqs = static_cast<int32_t>(info.max_seqs()),
          .max_model_len = static_cast<int32_t>(info.max_model_len()),
          .hash_seed = info.hash_seed(),
          .prefill_tokens_per_s = info.prefill_tokens_per_s(),
          .prefill_s_per_token2 = info.prefill_s_per_token2(),
          .decode_step_ms = info.decode_step_ms(),
          .decode_step_ms_per_seq = info.decode_step_ms_per_seq()};
}

// Numbers with which no decision can be made are a worker's that is broken.
absl::Status CheckFacts(const WorkerFacts& facts, const std::string& address) {
  const auto unusable = [&](auto&&... words) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", address, ": its GetInfo is unusable: ", words...));
  };
  if (facts.epoch.size() != kEpochBytes || facts.role == LinkRole::kUnknown) {
    return unusable("epoch of ", facts.epoch.size(), " bytes, role ", LinkRoleName(facts.role));
  }
  struct Number {
    const char* name;
    double value;
    double least = 0;
    double most = kMostOfACount;
  };
  for (const Number& number : std::initializer_list<Number>{
           {.name = "block_size", .value = 1.0 * facts.block_size, .least = 1},
           {.name = "num_blocks", .value = 1.0 * facts.num_blocks},
           {.name = "num_state_slots", .value = 1.0 * facts.num_state_slots},
           {.name = "max_seqs", .value = 1.0 * facts.max_seqs},
           {.name = "max_model_len", .value = 1.0 * facts.max_model_len},
           {.name = "block_bytes", .value = 1.0 * facts.block_bytes, .most = kMostOfAnything},
           {.name = "prefill_tokens_per_s",
           .value = facts.prefill_tokens_per_s,
           .most = kMostOfAnything},
           {.name = "prefill_s_per_token2",
           .value = facts.prefill_s_per_token2,
           .most = kMostOfAnything},
           {.name = "decode_step_ms", .value = facts.decode_step_ms, .most = kMostOfAnything},
           {.name = "decode_step_ms_per_seq",
           .value = facts.decode_step_ms_per_seq,
           .most = kMostOfAnything}}) {
    if (number.value >= number.least && number.value <= number.most) continue;  // not NaN either
    return unusable(number.name, " ", number.value, " is not within ", number.least, " to ",
                    number.most);
  }
  return absl::OkStatus();
}

int32_t Used(const ferry::v1::KvBlockCounts& counts) {
  return Bounded(uint64_t{counts.active()} + counts.reserved() + counts.held() +
                 counts.quarantined());
}

WorkerLoad LoadOf(const ferry::v1::LoadReport& report) {
  const double step_ms = report.step_ms();
  return {.waiting_tokens = Bounded(report.waiting_tokens()),
          .waiting_requests = Bounded(report.waiting_requests()),
          .running_requests = Bounded(report.running_requests()),
          .used_blocks = Used(report.kv_blocks()),
          .used_state_slots = Used(report.state_slots()),
          .step_ms = step_ms >= 0 && step_ms <= kMostOfAnything ? step_ms : 0};
}

PrefixIndex::Frame FrameOf(const ferry::v1::KvEventFrame& proto) {
  PrefixIndex::Frame frame = {.epoch = proto.epoch(),
                              .seq = proto.seq(),
                              .events = {},
                              .snapshot = proto.snapshot(),
                              .snapshot_end = proto.snapshot_end(),
                              .heartbeat = proto.heartbeat()};
  frame.events.reserve(proto.events_size());
  for (const auto& event : proto.events()) {
    using Kind = PrefixIndex::Event::Kind;
    if (event.has_cleared()) {
      frame.events.push_back({.kind = Kind::kCleared, .hash = {}});
      continue;
    }
    const std::string& raw = event.has_stored() ? event.stored().hash() : event.removed();
    if (raw.size() != block_hash::BlockHash().bytes.size()) continue;  // not a hash of ours
    frame.events.push_back({.kind = event.has_stored() ? Kind::kStored : Kind::kRemoved,
                            .hash = block_hash::BlockHash::FromBytes(raw),
                            .resumable = !event.stored().not_resumable()});
  }
  return frame;
}

}  // namespace

const char* LinkStateName(LinkState state) {
  switch (state) {
    case LinkState::kConnecting:
      return "connecting";
    case LinkState::kServing:
      return "serving";
    case LinkState::kDraining:
      return "draining";
    case LinkState::kSuspect:
      return "suspect";
    case LinkState::kDead:
      return "dead";
    case LinkState::kGone:
      return "gone";
  }
  return "unknown";
}

WorkerLink::WorkerLink(WorkerSlot slot, const Options& options, EventLoop* loop,
                       std::shared_ptr<OutstandingCalls> outstanding, PrefixIndex* index,
                       Listener* listener)
    : slot_(slot),
      options_(options),
      loop_(loop),
      outstanding_(std::move(outstanding)),
      index_(index),
      listener_(listener),
      back_off_(kFirstBackOff) {}

WorkerLink::~WorkerLink() { Stop(); }

void WorkerLink::Start() { Connect(); }

void WorkerLink::Stop() {
  stopped_ = true;
  CloseStreams();
}

void WorkerLink::Leave() {
  leaving_ = true;
  SetAvailability();
}

void WorkerLink::Stay() {
  leaving_ = false;
  SetAvailability();
}

void WorkerLink::SetAvailability() {
  if (state_ != LinkState::kServing && state_ != LinkState::kDraining) return;
  const LinkState state =
      leaving_ || reports_draining_ ? LinkState::kDraining : LinkState::kServing;
  if (state == state_) return;
  SetState(state);
  listener_->OnWorkerChanged(this);
}

void WorkerLink::Remove() {
  Stop();
  facts_ = WorkerFacts();
  load_ = WorkerLoad();
  trouble_ = absl::OkStatus();
  SetState(LinkState::kGone);
}

void WorkerLink::CloseStreams() {
  info_call_.reset();
  load_stream_.reset();
  kv_stream_.reset();
  loop_->CancelTimer(std::exchange(reconnect_timer_, 0));
  loop_->CancelTimer(std::exchange(heartbeat_timer_, 0));
  loop_->CancelTimer(std::exchange(kv_timer_, 0));
}

void WorkerLink::SetState(LinkState state) {
  if (state_ == state) return;
  spdlog::info("worker={} state={} was={} role={} model={} epoch={}", options_.address,
               LinkStateName(state), LinkStateName(state_), LinkRoleName(facts_.role),
               service::LogValue(facts_.model), absl::BytesToHexString(facts_.epoch));
  state_ = state;
}

void WorkerLink::Connect() {
  CloseStreams();
  // New channels: those that were connected may not know yet that nobody is there any more.
  client_ = WorkerClient::Create(options_.address, options_.tls, options_.cancel_ack, loop_,
                                 outstanding_);
  Ask();
}

void WorkerLink::Ask() {
  info_call_ = client_->GetInfo(kInfoTimeout, [this](absl::StatusOr<ferry::v1::WorkerInfo> info) {
    OnInfo(std::move(info));
  });
}

void WorkerLink::OnInfo(absl::StatusOr<ferry::v1::WorkerInfo> info) {
  if (stopped_) return;
  WorkerFacts facts;
  if (info.ok()) facts = FactsOf(*info, options_.address);
  const absl::Status status = info.ok() ? CheckFacts(facts, options_.address) : info.status();
  if (!status.ok()) {
    // Once, not at every try.
    spdlog::log(status.code() == trouble_.code() ? spdlog::level::debug : spdlog::level::warn,
                "worker={} unreachable cause={}", options_.address,
                service::LogValue(std::string(status.message())));
    const bool is_first = trouble_.ok() && facts_.epoch.empty();
    trouble_ = status;
    Lost(status);
    if (is_first) listener_->OnWorkerChanged(this);  // nobody waits for its first answer any more
    ReconnectLater();
    return;
  }
  trouble_ = absl::OkStatus();
  if (facts.epoch != facts_.epoch) {
    if (facts.hash_seed != options_.hash_seed) {
      spdlog::warn(
          "worker={} role={} hash_seed={} router_hash_seed={} its cached blocks cannot be found: "
          "--hash_seed must be the same in the whole system",
          options_.address, LinkRoleName(facts.role), facts.hash_seed, options_.hash_seed);
    }
    if (!facts_.epoch.empty()) {
      Lost(absl::UnavailableError(absl::StrCat("worker ", options_.address, " has restarted")));
    }
    facts_ = std::move(facts);
    load_ = WorkerLoad();
    index_->StartWorker(slot_, facts_.epoch, facts_.num_blocks, facts_.num_state_slots > 0);
  }
  back_off_ = kFirstBackOff;
  last_report_ = loop_->AwakeNow();

  ferry::v1::WatchLoadRequest request;
  request.set_interval_ms(static_cast<uint32_t>(
      std::max<int64_t>(1, absl::ToInt64Milliseconds(options_.heartbeat) / kReportsPerHeartbeat)));
  load_stream_ = client_->WatchLoad(
      request, {.on_message = [this](const ferry::v1::LoadReport& report) { OnLoad(report); },
                .on_end = [this](const absl::Status& status) { Broken(status); }});
  if (shares_hashes()) OpenKvEvents();
  heartbeat_timer_ = loop_->After(options_.heartbeat, [this] { CheckHeartbeat(); });
  listener_->OnWorkerChanged(this);
}

void WorkerLink::OnLoad(const ferry::v1::LoadReport& report) {
  if (report.epoch() != facts_.epoch) {
    Broken(absl::UnavailableError(absl::StrCat("worker ", options_.address, " has restarted")));
    return;
  }
  load_ = LoadOf(report);
  last_report_ = loop_->AwakeNow();
  const LinkState before = state_;
  reports_draining_ = report.state() == ferry::v1::WORKER_STATE_DRAINING;
  SetState(leaving_ || reports_draining_ ? LinkState::kDraining : LinkState::kServing);
  load_stream_->ReadNext();
  listener_->OnLoadReport(this);
  if (before != state_) listener_->OnWorkerChanged(this);
}

void WorkerLink::OpenKvEvents() {
  kv_timer_ = 0;
  ferry::v1::WatchKvEventsRequest request;
  request.set_epoch(facts_.epoch);
  request.set_from_seq(index_->next_seq(slot_));
  kv_stream_ = client_->WatchKvEvents(
      request, {.on_message = [this](const ferry::v1::KvEventFrame& frame) { OnKvFrame(frame); },
                .on_end =
                    [this](const absl::Status& status) {
                      spdlog::debug("worker={} cache events ended cause={}", options_.address,
                                    service::LogValue(std::string(status.message())));
                      // Load and life are WatchLoad's; without this stream the view only grows
                      // stale.
                      kv_timer_ = loop_->After(options_.heartbeat, [this] { OpenKvEvents(); });
                    }});
}

void WorkerLink::OnKvFrame(const ferry::v1::KvEventFrame& frame) {
  switch (index_->Apply(slot_, FrameOf(frame), EventLoop::Now())) {
    case PrefixIndex::Applied::kApplied:
      kv_stream_->ReadNext();
      return;
    case PrefixIndex::Applied::kGap:
      spdlog::warn("worker={} cache events missing expected_seq={} seq={}", options_.address,
                   index_->next_seq(slot_), frame.seq());
      // Ask again from what is missing: a replay or a snapshot comes.  Not at once, so that a
      // worker that skips every time does not keep us busy.
      kv_stream_.reset();
      kv_timer_ = loop_->After(kFirstBackOff, [this] { OpenKvEvents(); });
      return;
    case PrefixIndex::Applied::kOtherEpoch:
      Broken(absl::UnavailableError(absl::StrCat("worker ", options_.address, " has restarted")));
      return;
  }
}

void WorkerLink::Suspect(const absl::Status& cause) {
  if (state_ != LinkState::kServing && state_ != LinkState::kDraining) return;
  doubt_ = cause;
  SetState(LinkState::kSuspect);
  listener_->OnWorkerChanged(this);
}

void WorkerLink::Broken(const absl::Status& cause) {
  if (stopped_) return;
  spdlog::debug("worker={} broken cause={}", options_.address,
                service::LogValue(std::string(cause.message())));
  doubt_ = cause;
  if (state_ != LinkState::kDead) SetState(LinkState::kSuspect);
  listener_->OnWorkerChanged(this);
  // Who is there now?  Not from inside a callback of the stream that Connect closes.
  loop_->CancelTimer(reconnect_timer_);
  reconnect_timer_ = loop_->After(absl::ZeroDuration(), [this] { Connect(); });
}

void WorkerLink::Lost(const absl::Status& cause) {
  if (facts_.epoch.empty() || state_ == LinkState::kDead) return;
  doubt_ = cause;
  SetState(LinkState::kDead);
  listener_->OnWorkerLost(this, facts_.epoch, cause);
  listener_->OnWorkerChanged(this);
}

void WorkerLink::ReconnectLater() {
  loop_->CancelTimer(reconnect_timer_);
  // Over the same channels, which go on trying: of one that is let go of in the middle of a try
  // gRPC keeps the connection, should there be one in the end (service/abandoned_channels.h).
  reconnect_timer_ = loop_->After(back_off_, [this] { Ask(); });
  back_off_ = std::min(back_off_ * 2, kMaxBackOff);
}

void WorkerLink::CheckHeartbeat() {
  const absl::Duration silence = loop_->AwakeNow() - last_report_;
  const absl::Status silent = absl::UnavailableError(
      absl::StrCat("worker ", options_.address, " has been silent for ",
                   absl::FormatDuration(absl::Trunc(silence, absl::Milliseconds(1)))));
  if (silence >= kDeadAfter * options_.heartbeat) {
    Lost(silent);
    Connect();
    return;
  }
  if (silence >= kSuspectAfter * options_.heartbeat) Suspect(silent);
  heartbeat_timer_ = loop_->After(options_.heartbeat / 2, [this] { CheckHeartbeat(); });
}

}  // namespace router
