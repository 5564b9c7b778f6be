// The start of a Ferry process, up to the moment it serves: what can be wrong with its flags is
// said before anything slow, and SIGTERM or SIGINT ends it at once.

#ifndef SERVICE_STARTUP_H_
#define SERVICE_STARTUP_H_

#include <string>
#include <thread>

#include "absl/status/status.h"
#include "service/grpc_server.h"

namespace service {

// Flags that every server has.
struct StartFlags {
  std::string listen;          // host:port
  std::string metrics_listen;  // host:port
  std::string port_file;       // may be empty
  TlsOptions tls;
};

// Binds both ports, reads and uses the TLS files, opens the port file, and raises the limit of open
// files to what the system allows.  Leaves nothing behind.
// Errors: kUnavailable or kInvalidArgument, one sentence that names the value.
absl::Status CheckStart(const StartFlags& flags);

// Raises the soft limit of open files to the hard one.  Errors: kUnavailable if that is too low for
// a process with a few peers.
absl::Status RaiseOpenFileLimit();

// While it lives, a termination signal ends the process with status 0 after one log line: there is
// nothing yet to drain, and loading a checkpoint may take minutes.  A signal that comes as it goes
// is left to WaitForTermination.  REQUIRES: BlockTerminationSignals was called.
class EndOnSignal final {
 public:
  EndOnSignal();
  ~EndOnSignal();
  EndOnSignal(const EndOnSignal&) = delete;
  EndOnSignal& operator=(const EndOnSignal&) = delete;

 private:
  int signal_fd_;
  int stop_fd_;
  std::thread thread_;
};

}  // namespace service

#endif  // SERVICE_STARTUP_H_
