// Network: a small network of this process's own: nodes in network namespaces, each joined by a
// veth pair to a hub, which is where this process's own sockets are and which routes between the
// nodes.
//
// The namespaces have no names: they live as long as this process or a process in them, and every
// process that is started in a node dies with the thread that started it.  So nothing is left
// behind, also after a crash, and suites that run at the same time do not see each other.
//
// Thread-compatible.  Needs root, or a kernel that lets users make namespaces, and `ip` and `nft`.

#ifndef TESTS_CHAOS_NETWORK_H_
#define TESTS_CHAOS_NETWORK_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "tests/integration/ferry_system.h"

namespace chaos {

class Network final {
 public:
  // Makes the hub and moves the calling thread into it, and with it every thread that it starts
  // later; null, with one sentence in `why_not`, where that cannot be done.
  // REQUIRES: called by the main thread before gRPC is used.
  static std::unique_ptr<Network> Create(std::string* why_not);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // What starts a process at a node, which is made for the first process of this name.  The
  // processes die with the thread that starts them.  `wrap` stands in front of the command.
  integration::Site SiteOf(const std::string& node, const std::vector<std::string>& wrap = {});
  const std::string& ip(const std::string& node);
  // The hub's address on a node's link: where a relay of this process may listen.
  std::string hub_ip(const std::string& node) { return Reach(node).hub_ip; }

  // Without carrier, as with a cable pulled out.
  void SetLink(const std::string& node, bool up);
  // Packets between two nodes vanish, both ways; nobody is told.
  void Cut(const std::string& a, const std::string& b);
  // So do this many of a thousand of a node's packets, each way.
  void Lose(const std::string& node, int per_mille);
  // All links are up and lose nothing.
  void Heal();

 private:
  struct Node {
    std::string ip, hub_ip, interface;  // interface: the hub's end
    int ns = -1;
    bool up = true;
  };
  Network(int hub_ns, std::string dir) : hub_ns_(hub_ns), dir_(std::move(dir)) {}
  Node& Reach(const std::string& node);
  // Runs a command in a namespace to its end.
  absl::Status Try(int ns, std::vector<std::string> command) const;
  void Run(int ns, std::vector<std::string> command) const;  // dies with what went wrong
  // The kernel tells programs of a carrier a little later than it is there.
  void AwaitCarrier(int ns, const std::string& interface) const;
  void ApplyRules();

  const int hub_ns_;
  const std::string dir_;  // logs of commands
  std::map<std::string, Node> nodes_;
  std::vector<std::pair<std::string, std::string>> cuts_;  // addresses
  std::map<std::string, int> losses_;                      // per mille, by address
};

}  // namespace chaos

#endif  // TESTS_CHAOS_NETWORK_H_
