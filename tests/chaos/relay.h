// Relay: a TCP relay that stands between two processes and can delay, go silent, or break.
//
// Thread-safe; one thread moves the bytes.

#ifndef TESTS_CHAOS_RELAY_H_
#define TESTS_CHAOS_RELAY_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <thread>

#include "absl/time/time.h"

namespace chaos {

class Relay final {
 public:
  // Listens on a port of `ip` and forwards to `target` ("ip:port").  Dies if it cannot listen.
  Relay(const std::string& ip, const std::string& target);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  const std::string& address() const { return address_; }

  // Each of these holds when it returns.
  // Every byte that arrives from now on is that late, each way.
  void SetDelay(absl::Duration delay);
  // Half-open: connections stay and new ones are taken, but nothing crosses, not even their ends.
  void SetSilent(bool silent);
  // Resets all connections; new ones are served.
  void Break();

 private:
  struct Piece {
    absl::Time due;
    std::string bytes;
  };
  // One direction of a connection.
  struct Way {
    int from = -1, to = -1;
    std::deque<Piece> pieces;
    bool from_ended = false, to_ended = false;
  };
  struct Connection {
    int client = -1, server = -1;
    Way ways[2];
    bool broken = false;
  };

  void Main();
  void Accept();
  // What can be read is read, what is due is written; false: an error, the connection is over.
  bool Move(Way& way, absl::Time now, absl::Duration delay);
  void Wake();
  // Changes what the lock guards and waits until the thread has seen it.
  void Change(const std::function<void()>& change);

  const std::string target_;
  std::string address_;
  int listener_ = -1;
  int wake_ = -1;  // eventfd

  std::mutex mutex_;  // guards the next six
  std::condition_variable seen_;
  int64_t num_changes_ = 0, num_seen_ = 0;
  absl::Duration delay_ = absl::ZeroDuration();
  bool silent_ = false;
  bool break_ = false;
  bool stop_ = false;

  std::list<Connection> connections_;  // the thread's
  std::thread thread_;
};

}  // namespace chaos

#endif  // TESTS_CHAOS_RELAY_H_
