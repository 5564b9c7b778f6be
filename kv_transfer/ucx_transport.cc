#include "kv_transfer/ucx_transport.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kv_transfer/ucx_links.h"
#include "kv_transfer/ucx_worker.h"
#include "status/check.h"
#include "status/status_macros.h"

namespace kv_transfer {
namespace {

using Clock = std::chrono::steady_clock;

// How long the progress thread looks for work before it sleeps.
constexpr auto kSpin = std::chrono::microseconds(50);
// The same while a message is on its way: copying a block between processes, or a segment of 512
// KiB into a socket, takes longer than kSpin, and to be woken after each costs shared memory a
// tenth of its bandwidth.
constexpr auto kSpinMoving = std::chrono::milliseconds(1);
// It wakes at least so often: UCX sends its keepalives only while it is progressed.
constexpr int kTickMs = 100;
// Between two tries to renew a worker.
constexpr auto kRenewalPause = std::chrono::seconds(1);

// An answer of the progress thread that a caller waits for.  Shared, because the caller may give up
// first.
template <typename T>
class Reply {
 public:
  void Set(T value) {
    std::lock_guard lock(mutex_);
    value_ = std::move(value);
    set_.notify_all();
  }
  std::optional<T> Take(absl::Duration timeout) {
    std::unique_lock lock(mutex_);
    set_.wait_for(lock, absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24))),
                  [&] { return value_.has_value(); });
    return std::exchange(value_, std::nullopt);
  }

 private:
  std::mutex mutex_;  // guards value_
  std::condition_variable set_;
  std::optional<T> value_;
};

class UcxTransport final : public Transport {
 public:
  explicit UcxTransport(const UcxOptions& options)
      : links_(options.epoch, &counters_, &device_memory_), enter_thread_(options.enter_thread) {
    event_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    FERRY_CHECK(event_fd_ >= 0) << "no event descriptor";
  }

  absl::Status Start(const UcxOptions& options) {
    UcxOptions own = options;
    if (enter_thread_) enter_thread_();
    for (const std::string& kind : options.link_kinds) {
      ASSIGN_OR_RETURN(std::unique_ptr<UcxWorker> worker,
                       UcxWorker::Create(kind, own, links_.handlers()));
      // UCX takes connections over TCP for every kind, so no two can have one port.
      if (!worker->address().listener.empty() && own.listen_port > 0) ++own.listen_port;
      workers_.push_back(std::move(worker));
    }
    if (workers_.empty()) return absl::InvalidArgumentError("no link kinds");
    TakeAddresses();
    thread_ = std::thread([this] { Run(); });
    thread_id_ = thread_.get_id();
    return absl::OkStatus();
  }

  ~UcxTransport() override {
    Close();
    workers_.clear();
    close(event_fd_);
  }

  std::vector<LinkAddress> addresses() const override {
    std::lock_guard lock(mutex_);
    return addresses_;
  }

  absl::Status Register(absl::Span<std::byte> region, MemoryKind kind) override {
    if (kind == MemoryKind::kDevice) {
      device_memory_.Add(region);
      return absl::OkStatus();
    }
    return Ask<absl::Status>(absl::InfiniteDuration(),
                             [this, region](auto answer) {
                               absl::Status status;
                               for (const auto& worker : workers_)
                                 status.Update(worker->Register(region));
                               answer(std::move(status));
                             })
        .value_or(ClosedError());
  }

  void SetSink(ReceiveSink* sink) override {
    Ask<bool>(absl::InfiniteDuration(), [this, sink](auto answer) {
      links_.SetSink(sink);
      answer(true);
    });
  }

  absl::Status Connect(const Epoch& peer, absl::Span<const LinkAddress> peer_addresses,
                       absl::Duration timeout) override {
    std::vector<std::pair<UcxWorker*, LinkAddress>> ways = CommonLinks(peer_addresses);
    if (ways.empty()) return NoCommonLink(peer_addresses);
    const Clock::time_point deadline = Clock::now() + absl::ToChronoNanoseconds(timeout);
    absl::Status failure;
    for (size_t i = 0; i < ways.size(); ++i) {
      // A kind that does not work leaves time for the next one.
      const absl::Duration left =
          absl::FromChrono(deadline - Clock::now()) / static_cast<double>(ways.size() - i);
      auto& [worker, address] = ways[i];
      std::optional<absl::Status> status =
          Ask<absl::Status>(left, [this, peer, worker = worker, address = address](auto answer) {
            links_.Connect(peer, worker, address, std::move(answer));
          });
      if (!status.has_value()) {
        Ask<bool>(absl::InfiniteDuration(), [this, peer](auto answer) {
          links_.CancelConnect(peer);
          answer(true);
        });
        status =
            absl::UnavailableError(absl::StrCat("no answer within ", absl::FormatDuration(left)));
      }
      if (status->ok()) return absl::OkStatus();
      failure = absl::UnavailableError(
          absl::StrCat("connecting to ", peer.ToHex(), " over ", address.kind,
                       address.listener.empty() ? "" : " at ", address.listener, ": ",
                       std::string(status->message())));
    }
    return failure;
  }

  std::string LinkName(const Epoch& peer) const override {
    return Ask<std::string>(absl::InfiniteDuration(),
                            [this, peer](auto answer) { answer(links_.LinkName(peer)); })
        .value_or("");
  }

  bool TakesDeviceMemory(const Epoch& peer) const override { return device_memory_.TakenBy(peer); }

  void Send(const Epoch& peer, const MessageHeader& header, absl::Span<const std::byte> data,
            std::function<void(absl::Status)> done) override {
    const bool fits =
        header.following() == data.size() && data.size() <= static_cast<size_t>(kMaxMessageBytes);
    const bool posted = Post([this, peer, header, data, done, fits] {
      if (fits) {
        links_.Send(peer, header, data, done);
      } else {
        ++counters_.messages_failed;
        done(absl::InvalidArgumentError(
            absl::StrCat("message of ", data.size(), " bytes, header says ", header.length)));
      }
    });
    if (!posted) done(ClosedError());
  }

  absl::Status Fence(const Epoch& peer, absl::Duration timeout) override {
    ++counters_.fences;
    const auto fenced = Ask<bool>(timeout, [this, peer](auto answer) {
      links_.Fence(peer, absl::UnavailableError("fenced"), [answer] { answer(true); });
    });
    if (fenced.has_value()) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(
        "receives of ", peer.ToHex(), " have not ended within ", absl::FormatDuration(timeout)));
  }

  TransportStats stats() const override {
    return {.bytes_sent = counters_.bytes_sent,
            .bytes_received = counters_.bytes_received,
            .messages_sent = counters_.messages_sent,
            .messages_received = counters_.messages_received,
            .messages_refused = counters_.messages_refused,
            .messages_failed = counters_.messages_failed,
            .fences = counters_.fences};
  }

  void Close() override {
    if (!thread_.joinable()) return;
    {
      std::lock_guard lock(mutex_);
      accepting_ = false;
    }
    stop_ = true;
    Wake();
    thread_.join();
  }

 private:
  static absl::Status ClosedError() { return absl::UnavailableError("the transport is closed"); }

  // Runs `command` on the progress thread.  False: the transport is closed.
  bool Post(std::function<void()> command) const {
    {
      std::lock_guard lock(mutex_);
      if (!accepting_) return false;
      commands_.push_back(std::move(command));
      has_commands_ = true;  // within the lock: Close sees every command that was accepted
    }
    Wake();
    return true;
  }

  // Runs `command(answer)` on the progress thread and waits for `answer` to be called.  Nothing: it
  // was not in time.  After Close the answer is that there is nothing left to do: Fence is OK.
  template <typename T, typename Command>
  std::optional<T> Ask(absl::Duration timeout, Command command) const {
    FERRY_CHECK(std::this_thread::get_id() != thread_id_) << "called from a callback";
    auto reply = std::make_shared<Reply<T>>();
    const std::function<void(T)> answer = [reply](T value) { reply->Set(std::move(value)); };
    if (!Post([command, answer] { command(answer); })) {
      if constexpr (std::is_same_v<T, absl::Status>) return ClosedError();
      return T{};
    }
    return reply->Take(timeout);
  }

  void Wake() const {
    // Pairs with the store in Sleep: either we see that it sleeps, or it sees has_commands_.
    if (sleeping_) eventfd_write(event_fd_, 1);
  }

  std::vector<std::pair<UcxWorker*, LinkAddress>> CommonLinks(
      absl::Span<const LinkAddress> peer_addresses) const {
    std::vector<std::pair<UcxWorker*, LinkAddress>> ways;  // our order, best first
    for (const auto& worker : workers_) {
      for (const LinkAddress& address : peer_addresses) {
        const bool same_host = address.host_id == worker->host_id();
        if (address.kind == worker->kind() && (address.kind != "shm" || same_host)) {
          ways.emplace_back(worker.get(), address);
        }
      }
    }
    return ways;
  }

  absl::Status NoCommonLink(absl::Span<const LinkAddress> peer_addresses) const {
    std::vector<std::string> ours, theirs;
    for (const auto& worker : workers_) ours.push_back(worker->kind());
    for (const LinkAddress& address : peer_addresses) theirs.push_back(address.kind);
    return absl::FailedPreconditionError(absl::StrCat(
        "no common link kind: this process has ", absl::StrJoin(ours, ","), ", the peer ",
        absl::StrJoin(theirs, ","), "; shm is for processes of one host"));
  }

  // The progress thread.

  bool RunCommands() {
    if (!has_commands_.exchange(false)) return false;
    std::vector<std::function<void()>> commands;
    {
      std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (const auto& command : commands) command();
    return true;
  }

  void Run() {
    if (enter_thread_) enter_thread_();
    Clock::time_point last_work = Clock::now();
    bool closing = false;
    while (true) {
      const Clock::time_point now = Clock::now();
      bool worked = RunCommands();
      for (const auto& worker : workers_) worked |= worker->Progress(now);
      worked |= links_.Advance();
      for (const auto& worker : workers_) {
        if (worker->blocked() && !closing) worked |= Renew(worker.get(), now);
      }
      if (stop_ && !has_commands_) {
        if (!closing) links_.CloseAll();
        closing = true;
        if (links_.empty()) return;
      }
      if (worked) {
        last_work = now;
      } else if (const auto idle = now - last_work;
                 idle > kSpinMoving || (idle > kSpin && !links_.moving())) {
        Sleep();
      }
    }
  }

  // Moves a worker whose queue is blocked to a new one.  Blocks for some milliseconds.
  bool Renew(UcxWorker* worker, Clock::time_point now) {
    if (!links_.Leave(worker) || now < next_renewal_) return false;
    next_renewal_ = now + kRenewalPause;
    const absl::Status status = worker->Renew();
    TakeAddresses();
    links_.Resume(worker, status);
    return true;
  }

  void TakeAddresses() {
    std::lock_guard lock(mutex_);
    addresses_.clear();
    for (const auto& worker : workers_) {
      if (worker->handle() != nullptr) addresses_.push_back(worker->address());
    }
  }

  void Sleep() {
    std::vector<pollfd>& waits = poll_;
    waits.clear();
    waits.push_back({.fd = event_fd_, .events = POLLIN, .revents = 0});
    sleeping_ = true;
    bool may_sleep = !has_commands_;
    for (const auto& worker : workers_) {
      if (!may_sleep) break;
      if (worker->handle() == nullptr) continue;
      // Busy: something arrived since the last progress.
      may_sleep = ucp_worker_arm(worker->handle()) == UCS_OK;
      waits.push_back({.fd = worker->event_fd(), .events = POLLIN, .revents = 0});
    }
    if (may_sleep) {
      // While links close their state is looked at often; it changes without an event.
      poll(waits.data(), waits.size(), links_.closing() ? 1 : kTickMs);
    }
    sleeping_ = false;
    eventfd_t ignored = 0;
    if (may_sleep && (waits.front().revents & POLLIN) != 0) eventfd_read(event_fd_, &ignored);
  }

  UcxCounters counters_;
  DeviceMemory device_memory_;
  UcxLinks links_;                                   // the progress thread's
  std::vector<std::unique_ptr<UcxWorker>> workers_;  // best kind first; the progress thread's
  std::vector<pollfd> poll_;                         // the progress thread's
  Clock::time_point next_renewal_;                   // the progress thread's
  const std::function<void()> enter_thread_;
  int event_fd_ = -1;
  mutable std::mutex mutex_;  // guards addresses_, commands_ and accepting_
  std::vector<LinkAddress> addresses_;
  mutable std::vector<std::function<void()>> commands_;
  bool accepting_ = true;
  mutable std::atomic<bool> has_commands_{false};
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stop_{false};
  std::thread thread_;         // Close's
  std::thread::id thread_id_;  // thread_'s: others ask for it while Close joins; set by Start
};

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> CreateUcxTransport(const UcxOptions& options) {
  auto transport = std::make_unique<UcxTransport>(options);
  RETURN_IF_ERROR(transport->Start(options));
  return transport;
}

}  // namespace kv_transfer
