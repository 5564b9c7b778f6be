// FerrySystem: a whole Ferry of real processes for tests: prefill workers, decode workers and a
// router, all on ports of their own choosing; on loopback unless told otherwise.
//
// Thread-compatible, except that clients may be used from any thread.

#ifndef TESTS_INTEGRATION_FERRY_SYSTEM_H_
#define TESTS_INTEGRATION_FERRY_SYSTEM_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/ferry_client.h"
#include "ferry/v1/worker.grpc.pb.h"
#include "tests/integration/child_process.h"

namespace integration {

// Where a process of the system runs, and by which address the others call it.
struct Site {
  using Start = std::function<ChildProcess(const std::vector<std::string>& argv,
                                           const std::string& log_path)>;
  std::string ip = "127.0.0.1";  // it listens there on ports of its own choosing
  Start start = ChildProcess::Start;
  // Of a worker: "host:port" that stands for its own, a relay's for example.  Null: its own.
  std::function<std::string(const std::string& address)> front;
};

struct SystemOptions {
  std::string model_dir;
  int num_prefill = 1;
  int num_decode = 1;
  std::vector<std::string> prefill_flags;
  std::vector<std::string> decode_flags;
  std::vector<std::string> router_flags;
  // By name: "router", "prefill0", "decode1", ...  Null: all on loopback.
  std::function<Site(const std::string& name)> site;
};

// One worker process and a gRPC stub of it.
struct WorkerProcess {
  std::string binary;
  std::string name;  // unique in the system
  std::vector<std::string> flags;
  ChildProcess process;
  std::string ip;
  std::string address;  // where it listens
  std::string front;    // what the router knows it by
  int metrics_port = 0;
  std::unique_ptr<ferry::v1::Worker::Stub> stub;
};

class FerrySystem final {
 public:
  // Starts everything and waits until the router says that the model can be served by all workers.
  // Dies with the logs if that does not happen.
  static std::unique_ptr<FerrySystem> Start(const SystemOptions& options);
  // Stops everything with SIGTERM: router, prefill, decode; every process must exit with 0.
  ~FerrySystem();

  ferry::Client& client() { return *client_; }
  std::unique_ptr<ferry::Client> NewClient(absl::Duration timeout) const;
  WorkerProcess& prefill(int i) { return prefill_[i]; }
  WorkerProcess& decode(int i) { return decode_[i]; }
  ChildProcess& router() { return *router_; }
  const std::string& router_address() const { return router_address_; }
  const std::string& router_ip() const { return router_ip_; }
  int router_metrics_port() const { return router_metrics_port_; }
  // Of OpenAI's API.  REQUIRES: --http_listen is among the router's flags.
  int router_http_port() const;

  // Reads load reports of a worker until `done` accepts one; false when `timeout` passes first.
  static bool WaitForLoad(WorkerProcess& worker,
                          const std::function<bool(const ferry::v1::LoadReport&)>& done,
                          absl::Duration timeout);
  // Waits until no request runs anywhere and every block is free or cached: load reports and gauges
  // of every worker that lives, and of the router.  Returns what is wrong, or "".
  std::string WaitUntilIdle(absl::Duration timeout);

  // Kills a worker and starts another one at its address; returns when that serves.
  void Restart(WorkerProcess& worker);
  // Ends a worker as a supervisor does, with SIGTERM; it must end with 0.  Starts another one at
  // its address; returns when that serves.
  void Roll(WorkerProcess& worker);
  void RollRouter();
  void KillRouter();
  // Starts another router at the address of the one before; returns when it says that all workers
  // are ready.
  void RestartRouter();
  // A little while: `count` load reports of a worker that lives, 10 ms each.
  void LetReportsPass(int count);
  // Waits until the router says that all workers are ready.  Returns what it says instead, or "".
  std::string WaitUntilReady(absl::Duration timeout);
  // All that are to live: prefill workers first.
  std::vector<WorkerProcess*> Living();

  // A worker that a test has killed is not expected to stop cleanly.
  void ExpectDead(ChildProcess& process);

 private:
  FerrySystem() = default;
  WorkerProcess StartWorker(const std::string& binary, const std::string& name,
                            const std::vector<std::string>& flags, int port = 0);
  void StartAgain(WorkerProcess& worker);  // at its address
  void StartRouter(int port);
  Site SiteOf(const std::string& name) const;
  bool IsExpectedDead(const ChildProcess& process) const;
  std::string OccupiedGauges();  // what they say, or "" if nothing runs

  SystemOptions options_;
  std::string dir_;
  std::vector<WorkerProcess> prefill_;
  std::vector<WorkerProcess> decode_;
  std::unique_ptr<ChildProcess> router_;
  std::string router_address_;
  std::string router_ip_;
  int router_port_ = 0;
  int router_metrics_port_ = 0;
  std::unique_ptr<ferry::Client> client_;
  std::vector<pid_t> expected_dead_;
};

// The body of http://ip:port/metrics; "" if it cannot be read within seconds.
std::string ReadMetrics(int port, const std::string& ip = "127.0.0.1");
// The sum of a metric over its labels; nothing if it is not in `metrics`.  `name` may state labels.
std::optional<double> SumOf(const std::string& metrics, const std::string& name);

}  // namespace integration

#endif  // TESTS_INTEGRATION_FERRY_SYSTEM_H_
