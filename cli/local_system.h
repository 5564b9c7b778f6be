// LocalSystem: a whole Ferry system as processes on this machine: router, prefill and decode
// workers on loopback, found by their port files, supervised, ended in order.
//
// Owned by the main thread, which must have called service::BlockTerminationSignals.

#ifndef CLI_LOCAL_SYSTEM_H_
#define CLI_LOCAL_SYSTEM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/child_process.h"
#include "client/ferry_client.h"
#include "service/grpc_server.h"

namespace cli {

struct LocalSystemOptions {
  std::string model_dir;
  std::string bin_dir;  // holds ferry-router, ferry-prefill, ferry-decode
  int32_t num_prefill = 1;
  int32_t num_decode = 1;
  bool role_both = false;  // decode workers may prefill, too
  int32_t port = 8500;     // of the router on 127.0.0.1; 0: any
  // Of OpenAI's API over HTTP on 127.0.0.1; 0: any; absent: there is none.
  std::optional<int32_t> http_port = {};
  // Of every process, and of their calls of each other: made for 127.0.0.1.  All three or none.
  service::TlsOptions tls = {};
  std::vector<std::string> worker_flags = {};  // for every worker, e.g. "--dtype=float32"
  std::vector<std::string> prefill_flags = {};
  std::vector<std::string> decode_flags = {};
  std::vector<std::string> router_flags = {};
  absl::Duration ready_timeout = absl::Seconds(600);
  absl::Duration stop_limit = absl::Seconds(130);  // for each process; then SIGKILL
  std::string log_path = {};                       // empty: the processes' lines go to stderr
  std::string port_file = {};  // may be empty: written by who started the system
};

class LocalSystem final {
 public:
  // Starts everything and returns when the router can serve the model.  What can be wrong with the
  // options is said before any process is started.
  // Errors: of a child that ended, naming it and its last line; kFailedPrecondition when the
  // workers do not fit each other; kCancelled when a termination signal came; kDeadlineExceeded.
  // Nothing is left running then.
  static absl::StatusOr<std::unique_ptr<LocalSystem>> Start(const LocalSystemOptions& options);
  // Kills what still runs.
  ~LocalSystem();

  const std::string& model_name() const { return model_name_; }
  const std::string& address() const { return router_address_; }
  // 0 if there is no HTTP.
  int32_t http_port() const { return http_port_; }
  // Of a client of the router.
  ferry::ClientOptions client_options() const;
  // "127.0.0.1:port" -> "prefill-0"
  const std::map<std::string, std::string>& names_by_address() const { return names_by_address_; }

  // Returns when a termination signal came (OK) or a child has ended (its error).
  absl::Status WaitForEnd();
  // Ends router, prefill workers, decode workers, in that order.  A second termination signal
  // kills. Errors: names the children that had to be killed or ended badly.
  absl::Status Stop();

 private:
  explicit LocalSystem(LocalSystemOptions options);
  absl::Status CheckOptions() const;
  absl::Status StartAll();
  absl::Status StartWorkers(const char* kind, int32_t count,
                            const std::vector<std::string>& kind_flags,
                            std::vector<std::unique_ptr<ChildProcess>>& children);
  absl::Status StartRouter();
  absl::Status WaitUntilReady();
  absl::StatusOr<std::unique_ptr<ChildProcess>> StartChild(const std::string& name,
                                                           const std::string& binary,
                                                           std::vector<std::string> flags);
  // Of the child, when it has written its port file, which has a line "KEY=port".
  absl::StatusOr<int32_t> WaitForPort(const std::string& name, const std::string& key);
  // "127.0.0.1:port" of its gRPC server.
  absl::StatusOr<std::string> WaitForAddress(const std::string& name);
  absl::Status CheckChildren();
  void StopGroup(std::vector<std::unique_ptr<ChildProcess>>& children,
                 std::vector<std::string>& problems);

  const LocalSystemOptions options_;
  std::string model_name_;
  std::string run_dir_;  // port files; removed at the end
  int log_fd_ = 2;
  absl::Time ready_deadline_;
  std::string router_address_;
  int32_t http_port_ = 0;
  std::map<std::string, std::string> names_by_address_;
  std::vector<std::unique_ptr<ChildProcess>> routers_;  // one
  std::vector<std::unique_ptr<ChildProcess>> prefills_;
  std::vector<std::unique_ptr<ChildProcess>> decodes_;
};

// The directory of this executable.
std::string OwnDirectory();

}  // namespace cli

#endif  // CLI_LOCAL_SYSTEM_H_
