#include "worker/watch_streams.h"

#include <algorithm>
#include <utility>

#include "steady_time/steady_time.h"

namespace worker {
namespace {

constexpr absl::Duration kHeartbeat = absl::Seconds(1);
// Events of a snapshot in one message: what the router takes in at once, while its decisions wait.
constexpr size_t kEventsPerFrame = 64;

grpc::Status Ending() { return {grpc::StatusCode::UNAVAILABLE, "worker is shutting down"}; }

void FillEvent(const engine::BlockEvent& from, ferry::v1::KvEvent* to) {
  if (from.stored) {
    to->mutable_stored()->set_hash(std::string(from.hash.view()));
    to->mutable_stored()->set_parent(std::string(from.parent.view()));
    to->mutable_stored()->set_not_resumable(!from.resumable);
  } else {
    to->set_removed(std::string(from.hash.view()));
  }
}

}  // namespace

Ticker::Ticker() : thread_([this] { Run(); }) {}

Ticker::~Ticker() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

int64_t Ticker::Add(Member member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_[next_id_] = Entry{std::move(member), absl::InfinitePast()};
  changed_.notify_all();
  return next_id_++;
}

void Ticker::Remove(int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.erase(id);
}

void Ticker::Wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

void Ticker::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    const absl::Time now = steady_time::Now();
    const bool all = std::exchange(woken_, false);
    absl::Time next = absl::InfiniteFuture();
    for (auto& [id, entry] : members_) {
      if (all || entry.due <= now) entry.due = entry.member(now);
      next = std::min(next, entry.due);
    }
    if (next == absl::InfiniteFuture()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, steady_time::ToChrono(next));
    }
  }
}

LoadWatch::LoadWatch(const WorkerControl* control, Ticker* ticker, absl::Duration interval,
                     std::function<void(LoadWatch*)> on_done)
    : control_(control), ticker_(ticker), interval_(interval), on_done_(std::move(on_done)) {}

void LoadWatch::Start() {
  ticker_id_ = ticker_->Add([this](absl::Time now) { return Tick(now); });
}

absl::Time LoadWatch::Tick(absl::Time now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  report_due_ = true;
  WriteNext();
  return now + interval_;
}

void LoadWatch::WriteNext() {
  if (writing_ || finished_) return;
  if (report_due_ && !broken_) {
    report_due_ = false;
    writing_ = true;
    report_.Clear();
    control_->FillLoad(&report_);
    report_.set_seq(++seq_);
    StartWrite(&report_);
  } else if (ending_) {
    finished_ = true;
    Finish(Ending());
  }
}

void LoadWatch::Stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  report_due_ = report_due_ || !ending_;
  ending_ = true;
  WriteNext();
}

void LoadWatch::OnWriteDone(bool ok) {
  const std::lock_guard<std::mutex> lock(mutex_);
  writing_ = false;
  if (!ok) broken_ = ending_ = true;
  WriteNext();
}

void LoadWatch::OnCancel() {
  const std::lock_guard<std::mutex> lock(mutex_);
  broken_ = ending_ = true;
  WriteNext();
}

void LoadWatch::OnDone() {
  ticker_->Remove(ticker_id_);
  on_done_(this);
  delete this;
}

KvEventWatch::KvEventWatch(const KvEventLog* log, Ticker* ticker, std::string epoch,
                           uint64_t from_seq, std::function<void(KvEventWatch*)> on_done)
    : log_(log),
      ticker_(ticker),
      epoch_(std::move(epoch)),
      on_done_(std::move(on_done)),
      next_seq_(std::max<uint64_t>(from_seq, 1)) {
  written_seq_ = next_seq_ - 1;
}

void KvEventWatch::Start() {
  subscription_ = log_->Subscribe([this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    WriteNext();
  });
  ticker_id_ = ticker_->Add([this](absl::Time now) { return Tick(now); });
}

absl::Time KvEventWatch::Tick(absl::Time now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (now - last_write_ >= kHeartbeat) heartbeat_due_ = true;
  WriteNext();
  // A write that has just happened puts the next heartbeat off.
  return std::max(now, last_write_) + kHeartbeat;
}

void KvEventWatch::Queue(const KvEventLog::Frame& frame) {
  size_t at = 0;
  do {
    const size_t end = std::min(frame.events.size(), at + kEventsPerFrame);
    ferry::v1::KvEventFrame& message = queue_.emplace_back();
    message.set_epoch(epoch_);
    message.set_seq(frame.seq);
    message.set_snapshot(frame.snapshot);
    message.set_snapshot_end(frame.snapshot && end == frame.events.size());
    // Only a snapshot may take several messages of one number.
    const size_t stop = frame.snapshot ? end : frame.events.size();
    for (; at < stop; ++at) FillEvent(frame.events[at], message.add_events());
  } while (at < frame.events.size());
}

void KvEventWatch::WriteNext() {
  if (writing_ || finished_) return;
  if (ending_) {
    finished_ = true;
    Finish(Ending());
    return;
  }
  if (queue_.empty()) {
    for (const KvEventLog::Frame& frame : log_->Read(next_seq_)) {
      Queue(frame);
      next_seq_ = frame.seq + 1;
    }
  }
  if (queue_.empty() && heartbeat_due_) {
    ferry::v1::KvEventFrame& message = queue_.emplace_back();
    message.set_epoch(epoch_);
    message.set_seq(written_seq_);
    message.set_heartbeat(true);
  }
  if (queue_.empty()) return;
  heartbeat_due_ = false;
  writing_ = true;
  last_write_ = steady_time::Now();
  frame_ = std::move(queue_.front());
  queue_.pop_front();
  written_seq_ = frame_.seq();
  StartWrite(&frame_);
}

void KvEventWatch::Stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ending_ = true;
  WriteNext();
}

void KvEventWatch::OnWriteDone(bool ok) {
  const std::lock_guard<std::mutex> lock(mutex_);
  writing_ = false;
  ending_ = ending_ || !ok;
  WriteNext();
}

void KvEventWatch::OnCancel() { Stop(); }

void KvEventWatch::OnDone() {
  log_->Unsubscribe(subscription_);
  ticker_->Remove(ticker_id_);
  on_done_(this);
  delete this;
}

}  // namespace worker
