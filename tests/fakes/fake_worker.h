// FakeWorker: a worker process as the router sees it: real gRPC services in this process, with
// scripted behaviour.  By default a decode worker answers every request with `output`, and a
// prefill worker "transfers" by telling the decode worker of the request directly.
//
// Thread-safe.

#ifndef TESTS_FAKES_FAKE_WORKER_H_
#define TESTS_FAKES_FAKE_WORKER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "block_hash/block_hash.h"
#include "ferry/v1/worker.pb.h"

namespace fakes {

// What a worker sends for one Decode call.
class DecodeCall {
 public:
  virtual ~DecodeCall() = default;
  const ferry::v1::DecodeRequest request;

  virtual void Push(const ferry::v1::DecodeEvent& event) = 0;
  virtual void End(const absl::Status& status) = 0;
  virtual bool broken() const = 0;  // the router has gone or cancelled

  void Accept();
  // One token per byte, each branch on its own.
  void Tokens(uint32_t branch, const std::string& bytes,
              ferry::v1::FinishReason finish = ferry::v1::FINISH_REASON_UNSPECIFIED);
  void Done(uint32_t cached_tokens = 0);
  // Tokens of every branch with `finish`, Done, end.
  void Answer(const std::string& bytes,
              ferry::v1::FinishReason finish = ferry::v1::FINISH_REASON_LENGTH);

 protected:
  explicit DecodeCall(const ferry::v1::DecodeRequest& r) : request(r) {}
};

class PrefillCall {
 public:
  virtual ~PrefillCall() = default;
  const ferry::v1::PrefillRequest request;

  virtual void Push(const ferry::v1::PrefillEvent& event) = 0;
  virtual void End(const absl::Status& status) = 0;
  virtual bool broken() const = 0;

  void Accept();
  void Started();
  void Held(absl::Duration lease);
  void Done(double prefill_ms = 0);

 protected:
  explicit PrefillCall(const ferry::v1::PrefillRequest& r) : request(r) {}
};

class FakeWorker {
 public:
  struct Options {
    ferry::v1::WorkerRole role = ferry::v1::WORKER_ROLE_DECODE;
    std::string model = "m";
    std::string tokenizer_hash = "";
    uint32_t block_size = 64;
    uint32_t num_blocks = 1000;
    uint32_t num_state_slots = 0;  // 0: its model keeps no state per sequence
    uint32_t max_seqs = 0;         // 0: not stated
    uint32_t max_model_len = 4096;
    uint64_t hash_seed = 0;
    std::vector<std::string> links = {"shm", "tcp"};
    std::string host_id = "host";
    int32_t port = 0;  // 0: any
  };
  // Lists every worker of a test by address, so that P finds D.
  using Directory = std::map<std::string, FakeWorker*>;

  // Listens at once.  `directory` must outlive the worker.
  FakeWorker(const Options& options, Directory* directory);
  ~FakeWorker();  // Kill()

  // Everything ends at once, as with kill -9.  The port may be used by another FakeWorker then.
  void Kill();
  const std::string& address() const { return address_; }
  int32_t port() const { return port_; }
  const std::string& epoch() const { return epoch_; }

  // Script.  Set before the first request; called on gRPC threads; must not block.
  std::string output = "hello";
  double slowness = 0;  // a prompt's prefill_ms over what GetInfo states; 0: prefill_ms is not told
  // What it says of itself may be changed to anything before it goes out.
  std::function<void(ferry::v1::WorkerInfo*)> on_info;
  std::function<void(ferry::v1::LoadReport*)> on_report;
  std::function<void(std::shared_ptr<DecodeCall>)> on_decode;
  std::function<void(std::shared_ptr<PrefillCall>)> on_prefill;
  std::function<absl::Status(const ferry::v1::PushHeldRequest&)> on_push_held;
  std::function<absl::Status(const ferry::v1::RenewLeaseRequest&)> on_renew;
  // What `on_decode` and `on_prefill` are by default.
  void DefaultDecode(const std::shared_ptr<DecodeCall>& call);
  void DefaultPrefill(const std::shared_ptr<PrefillCall>& call);
  // The blocks of (request, attempt) have arrived here: an open default Decode call answers.
  // False if there is none.
  bool Deliver(const ferry::v1::RequestKey& key);

  // Load and life.
  void SetLoad(uint64_t waiting_tokens, uint32_t running, uint32_t used_blocks);
  void SetState(ferry::v1::WorkerState state);
  void PauseReports(bool paused);  // as if stopped by a signal: nothing breaks, nothing comes

  // Cache events.
  void Store(const std::vector<block_hash::BlockHash>& chain);
  void SkipFrame();  // the next frame is lost on the way: a gap
  void ForgetLog();  // what was said can only be told as a snapshot

  // What has been heard.  Snapshots of growing lists.
  std::vector<ferry::v1::DecodeRequest> decodes() const;
  std::vector<ferry::v1::PrefillRequest> prefills() const;
  std::vector<ferry::v1::RequestKey> cancels() const;
  std::vector<absl::Duration> cancel_limits() const;  // how long the caller of each waits
  std::vector<ferry::v1::PushHeldRequest> pushes() const;
  int num_renewals() const;
  int num_broken() const;  // streams that the router ended before they were done
  std::vector<uint64_t> kv_watch_starts() const;  // from_seq of every WatchKvEvents
  // Waits until `condition` holds, looking after everything heard; false after 20 s.
  bool WaitFor(const std::function<bool()>& condition) const;

  class Services;  // the gRPC side

 private:
  friend class Services;
  void Heard();  // wakes WaitFor

  const Options options_;
  Directory* const directory_;
  std::string address_;
  int32_t port_ = 0;
  std::string epoch_;
  std::unique_ptr<Services> services_;
};

}  // namespace fakes

#endif  // TESTS_FAKES_FAKE_WORKER_H_
