// The two streams a router opens to every worker: LoadWatch and KvEventWatch.  One reactor class
// each; at most one write is outstanding, and what is written next is asked for when a write has
// ended: a slow reader gets the newest load report and, if the ring has moved on, a snapshot.
//
// A Ticker drives their clocks.  Thread-safe.

#ifndef WORKER_WATCH_STREAMS_H_
#define WORKER_WATCH_STREAMS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "ferry/v1/worker.pb.h"
#include "grpcpp/support/server_callback.h"
#include "worker/kv_event_log.h"
#include "worker/worker_service.h"

namespace worker {

// Calls each member at the time it asked for, on one thread.
class Ticker final {
 public:
  // Returns when it wants to be called next; must not block, and must not call Add or Remove.
  using Member = std::function<absl::Time(absl::Time now)>;

  Ticker();
  ~Ticker();
  // The member is called at once, and until Remove has returned.
  int64_t Add(Member member);
  void Remove(int64_t id);
  // Calls every member now.
  void Wake();

 private:
  struct Entry {
    Member member;
    absl::Time due;
  };
  void Run();

  std::mutex mutex_;  // guards everything below but thread_
  std::condition_variable changed_;
  bool stopping_ = false;
  bool woken_ = false;
  int64_t next_id_ = 1;
  absl::flat_hash_map<int64_t, Entry> members_;
  std::thread thread_;
};

// Deletes itself when the call is done.
class LoadWatch final : public grpc::ServerWriteReactor<ferry::v1::LoadReport> {
 public:
  LoadWatch(const WorkerControl* control, Ticker* ticker, absl::Duration interval,
            std::function<void(LoadWatch*)> on_done);
  void Start();
  // Ends the stream with UNAVAILABLE, after a last report.
  void Stop();

 private:
  absl::Time Tick(absl::Time now);
  void WriteNext();  // REQUIRES: mutex_ is held.
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  const WorkerControl* const control_;
  Ticker* const ticker_;
  const absl::Duration interval_;
  const std::function<void(LoadWatch*)> on_done_;
  int64_t ticker_id_ = 0;

  std::mutex mutex_;  // guards everything below
  bool report_due_ = false;
  bool writing_ = false;
  bool broken_ = false;
  bool ending_ = false;
  bool finished_ = false;
  uint64_t seq_ = 0;
  ferry::v1::LoadReport report_;
};

// Deletes itself when the call is done.
class KvEventWatch final : public grpc::ServerWriteReactor<ferry::v1::KvEventFrame> {
 public:
  KvEventWatch(const KvEventLog* log, Ticker* ticker, std::string epoch, uint64_t from_seq,
               std::function<void(KvEventWatch*)> on_done);
  void Start();
  void Stop();

 private:
  absl::Time Tick(absl::Time now);
  void WriteNext();                            // REQUIRES: mutex_ is held.
  void Queue(const KvEventLog::Frame& frame);  // REQUIRES: mutex_ is held.
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  const KvEventLog* const log_;
  Ticker* const ticker_;
  const std::string epoch_;
  const std::function<void(KvEventWatch*)> on_done_;
  int64_t ticker_id_ = 0;
  int64_t subscription_ = 0;

  std::mutex mutex_;  // guards everything below
  uint64_t next_seq_;
  uint64_t written_seq_ = 0;
  absl::Time last_write_ = absl::InfinitePast();
  bool heartbeat_due_ = false;
  bool writing_ = false;
  bool ending_ = false;
  bool finished_ = false;
  std::deque<ferry::v1::KvEventFrame> queue_;
  ferry::v1::KvEventFrame frame_;
};

}  // namespace worker

#endif  // WORKER_WATCH_STREAMS_H_
