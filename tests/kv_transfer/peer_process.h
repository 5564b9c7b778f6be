// PeerProcess: a kv_transfer_peer that a test starts, talks to, stops, kills and reaps.

#ifndef TESTS_KV_TRANSFER_PEER_PROCESS_H_
#define TESTS_KV_TRANSFER_PEER_PROCESS_H_

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kv_transfer/transport.h"

namespace kv_transfer {

inline std::string ToHex(const std::string& bytes) {
  return bytes.empty() ? "-" : absl::BytesToHexString(bytes);
}
inline std::string FromHex(const std::string& hex) {
  return hex == "-" ? "" : absl::HexStringToBytes(hex);
}
inline std::string FormatAddress(const Epoch& epoch, const LinkAddress& address) {
  return epoch.ToHex() + " " + address.kind + " " + ToHex(address.host_id) + " " +
         ToHex(address.worker_address) + " " + ToHex(address.listener) + " " + ToHex(address.slots);
}
inline std::pair<Epoch, LinkAddress> ParseAddress(std::istream& words) {
  std::string epoch, kind, host_id, worker_address, listener, slots;
  words >> epoch >> kind >> host_id >> worker_address >> listener >> slots;
  return {*Epoch::FromBytes(FromHex(epoch)),
          {.kind = kind,
           .host_id = FromHex(host_id),
           .worker_address = FromHex(worker_address),
           .listener = FromHex(listener),
           .slots = FromHex(slots)}};
}

class PeerProcess {
 public:
  // Starts the program that was built beside this test.
  explicit PeerProcess(const std::string& kind) {
    char self[PATH_MAX] = "";
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    std::string program(self, length > 0 ? length : 0);
    program = program.substr(0, program.rfind('/')) + "/kv_transfer_peer";
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) abort();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    std::string kind_argument = kind;
    char* const arguments[] = {program.data(), kind_argument.data(), nullptr};
    if (posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environ) != 0) abort();
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_peer_ = in[1];
    from_peer_ = out[0];
    Tell("address");
    std::istringstream words(Read("address "));
    std::tie(epoch_, address_) = ParseAddress(words);
  }
  ~PeerProcess() {
    Kill();
    close(to_peer_);
    close(from_peer_);
  }
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  const Epoch& epoch() const { return epoch_; }
  const LinkAddress& address() const { return address_; }

  void Tell(const std::string& command) {
    const std::string line = command + "\n";
    size_t written = 0;
    while (written < line.size()) {
      const ssize_t got = write(to_peer_, line.data() + written, line.size() - written);
      if (got <= 0) return;
      written += got;
    }
  }
  // The rest of the next line that starts with `start`; other lines are passed over.  Empty after
  // the timeout or the peer's end.
  std::string Read(const std::string& start, absl::Duration timeout = absl::Seconds(30)) {
    const absl::Time deadline = absl::Now() + timeout;
    while (true) {
      for (size_t end = buffer_.find('\n'); end != std::string::npos; end = buffer_.find('\n')) {
        const std::string line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        if (line.rfind(start, 0) == 0) return line.substr(start.size());
      }
      pollfd wait{.fd = from_peer_, .events = POLLIN, .revents = 0};
      const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
      if (left_ms <= 0 || poll(&wait, 1, static_cast<int>(left_ms)) <= 0) return "";
      char chunk[4096];
      const ssize_t got = read(from_peer_, chunk, sizeof(chunk));
      if (got <= 0) return "";
      buffer_.append(chunk, got);
    }
  }
  void Stop() {
    kill(pid_, SIGSTOP);
    AwaitSignal();
  }
  // Until it really stands still, or is dead.  False: it ended in another way.
  bool AwaitSignal() {
    int status = 0;
    waitpid(pid_, &status, WUNTRACED);
    if (!WIFSTOPPED(status)) pid_ = 0;
    return WIFSTOPPED(status) || WIFSIGNALED(status);
  }
  void Continue() { kill(pid_, SIGCONT); }
  // Kills and reaps it: an unreaped process on shared memory would count as alive.
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  int to_peer_ = -1, from_peer_ = -1;
  std::string buffer_;
  Epoch epoch_;
  LinkAddress address_;
};

}  // namespace kv_transfer

#endif  // TESTS_KV_TRANSFER_PEER_PROCESS_H_
