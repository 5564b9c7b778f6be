// Observer: asks the router as a client does, and judges what it sees: every request ends once, in
// time, with the oracle's text or an error.  It knows the public API only.
//
// Thread-safe.

#ifndef TESTS_CHAOS_OBSERVER_H_
#define TESTS_CHAOS_OBSERVER_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "ferry/v1/inference.grpc.pb.h"
#include "tests/integration/requests.h"

namespace chaos {

// A request and the oracle's tokens, by branch.
struct Question {
  ferry::v1::GenerateRequest request;
  std::vector<std::vector<int32_t>> expected;
};
Question MakeQuestion(integration::SingleEngine& oracle, const integration::Ask& ask,
                      uint32_t num_branches = 1);

// How a client behaves, and what may come of it.
struct Manner {
  absl::Duration deadline = absl::Seconds(60);
  bool deadline_is_routers = false;  // the call states none; the router's default is `deadline`
  int leaves_after = -1;             // messages; -1: it stays
  const std::atomic<bool>* leave = nullptr;                    // it leaves when this becomes true
  std::function<void(size_t num_tokens)> on_tokens = nullptr;  // called with every message
  bool may_run_out = false;                                    // the deadline may well pass
  bool may_be_refused = false;                                 // the queue may be full
  bool may_fail = false;  // nobody may be left who could serve it
};

struct Outcome {
  absl::Status status;
  size_t num_tokens = 0;
  absl::Duration took;
  ferry::v1::GenerateSummary summary;
};

// Sums over requests.
struct Tally {
  int64_t requests = 0;
  std::map<std::string, int64_t> endings;  // by status code
  int64_t lost = 0, wrong = 0, late = 0;
  absl::Duration longest = absl::ZeroDuration();        // until a request ended
  absl::Duration worst_overrun = absl::ZeroDuration();  // beyond a deadline
  std::vector<std::string> faults_found;                // the first few, in words

  void Add(const Tally& other);
};

class Observer final {
 public:
  explicit Observer(const std::string& router_address);
  ~Observer();
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  // Returns when the request has ended, at the latest long after its deadline.
  Outcome Ask(const Question& question, const Manner& manner);

  // What has been seen since the last call.
  Tally Take();
  // While the router is away: requests may end UNAVAILABLE, those under way included.  Returns when
  // the router can be reached if somebody is there again.
  void SetNobodyThere(bool nobody_there);
  // Until the router can be connected to, at most `timeout`.
  void WaitForRouter(absl::Duration timeout);
  // Until `count` more requests have ended; false: `timeout` has passed first.
  bool WaitForEnds(int64_t count, absl::Duration timeout);

 private:
  struct Call;
  void Judge(const Question& question, const Manner& manner, const Call& call,
             const Outcome& outcome);
  void Watch();

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<ferry::v1::Inference::Stub> stub_;
  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  Tally tally_;
  std::set<Call*> calls_;
  int64_t num_ended_ = 0;
  absl::Duration asleep_ = absl::ZeroDuration();  // while this process could not run
  bool nobody_there_ = false;
  bool stop_ = false;
  std::thread watch_;  // last
};

}  // namespace chaos

#endif  // TESTS_CHAOS_OBSERVER_H_
