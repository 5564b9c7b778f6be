// Stage: a system at nodes of its own network, with a relay before every worker, the observer, and
// clients that keep it busy.
//
// Thread-compatible: the main thread's.

#ifndef TESTS_CHAOS_STAGE_H_
#define TESTS_CHAOS_STAGE_H_

#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/chaos/gauges.h"
#include "tests/chaos/meddler.h"
#include "tests/chaos/network.h"
#include "tests/chaos/observer.h"
#include "tests/chaos/relay.h"
#include "tests/integration/ferry_system.h"

namespace chaos {

// This process's network; main() makes it.
Network& OwnNetwork();

struct StageOptions {
  std::string model_dir;
  std::string links = "tcp";  // between workers; shm crosses from node to node as well
  int num_prefill = 2;
  int num_decode = 2;
  std::vector<std::string> prefill_flags = {"--num_blocks", "60"};
  std::vector<std::string> decode_flags = {"--num_blocks", "60"};
  std::vector<std::string> router_flags = {"--local_prefill_tokens", "40"};
  bool meddle = false;  // calls to decode workers pass a Meddler
  // What stands in front of a node's command line; null: nothing.
  std::function<std::vector<std::string>(const std::string& name)> wrap;
};

// Of a request that states no deadline of its own.
inline constexpr absl::Duration kRouterDeadline = absl::Seconds(2);

class Stage final {
 public:
  // With times of seconds instead of minutes: a fault shall be over soon.
  explicit Stage(const StageOptions& options);
  ~Stage();

  integration::FerrySystem& system() { return *system_; }
  Observer& observer() { return *observer_; }
  Network& network() { return OwnNetwork(); }
  // Between a worker and whoever calls it; the cache goes another way.
  Relay& relay(const integration::WorkerProcess& worker) { return *relays_.at(worker.address); }

  int64_t num_repeated() const;  // by the meddlers

  // `num_clients` ask `questions` at random, until Calm(): one in eight leaves, two hurry.
  void Busy(const std::vector<Question>& questions, int num_clients, uint64_t seed);
  // No client asks any more; returns when all requests have ended.
  void Calm();
  // Until this many requests have ended, at most so long.
  void Let(int64_t ends, absl::Duration limit);
  // Everything repaired: all processes run, all links are whole and the router says so; "" or what
  // is not so.
  std::string Repair();
  // Asks every question once; the system must be able to answer.
  void AskAll(const std::vector<Question>& questions);

 private:
  void BeClient(const std::vector<Question>& questions, uint64_t seed);

  std::map<std::string, std::unique_ptr<Relay>> relays_;      // by the worker's own address
  std::map<std::string, std::unique_ptr<Meddler>> meddlers_;  // the same
  std::unique_ptr<integration::FerrySystem> system_;
  std::unique_ptr<Observer> observer_;
  std::atomic<bool> busy_ = false;
  std::vector<std::thread> clients_;
};

}  // namespace chaos

#endif  // TESTS_CHAOS_STAGE_H_
