#include "tests/chaos/network.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "status/check.h"

namespace chaos {
namespace {

using integration::ChildProcess;

constexpr absl::Duration kCommandLimit = absl::Seconds(30);
constexpr char kOwnNamespace[] = "/proc/thread-self/ns/net";

// The calling thread, and what it starts, is in another namespace for as long as this lives.
class Visit {
 public:
  explicit Visit(int ns) : home_(open(kOwnNamespace, O_RDONLY | O_CLOEXEC)) {
    FERRY_CHECK(home_ >= 0 && setns(ns, CLONE_NEWNET) == 0) << std::strerror(errno);
  }
  ~Visit() {
    FERRY_CHECK(setns(home_, CLONE_NEWNET) == 0) << std::strerror(errno);
    close(home_);
  }

 private:
  const int home_;
};

// Who is not root becomes it in a user namespace, where the kernel allows that.
bool IsRoot() {
  const uid_t uid = geteuid();
  const gid_t gid = getegid();
  if (uid == 0) return true;
  if (unshare(CLONE_NEWUSER) != 0) return false;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << "0 " << uid << " 1";
  std::ofstream("/proc/self/gid_map") << "0 " << gid << " 1";
  return geteuid() == 0;
}

// A fresh namespace, which the calling thread is in afterwards; -1 if there is none.
int EnterNew() {
  return unshare(CLONE_NEWNET) == 0 ? open(kOwnNamespace, O_RDONLY | O_CLOEXEC) : -1;
}

int MakeNew() {
  const int home = open(kOwnNamespace, O_RDONLY | O_CLOEXEC);
  const int made = EnterNew();
  FERRY_CHECK(made >= 0 && setns(home, CLONE_NEWNET) == 0) << std::strerror(errno);
  close(home);
  return made;
}

}  // namespace

std::unique_ptr<Network> Network::Create(std::string* why_not) {
  const int hub = IsRoot() ? EnterNew() : -1;
  if (hub < 0) {
    *why_not = absl::StrCat("network namespaces cannot be made here (", std::strerror(errno),
                            "): run the chaos suite as root");
    return nullptr;
  }
  std::unique_ptr<Network> network(new Network(hub, integration::MakeTestDir()));
  std::ofstream("/proc/sys/net/ipv4/ip_forward") << 1;
  absl::Status ready = network->Try(hub, {"ip", "link", "set", "lo", "up"});
  if (ready.ok()) {
    ready = network->Try(hub, {"nft",
                               "add table ip chaos; add chain ip chaos probe; add rule ip "
                               "chaos probe numgen random mod 1000 < 1 drop"});
  }
  if (!ready.ok()) {
    *why_not = absl::StrCat("the chaos suite's network cannot be made here: ", ready.message());
    return nullptr;
  }
  return network;
}

Network::~Network() {
  for (const auto& [name, node] : nodes_) close(node.ns);
  close(hub_ns_);
}

absl::Status Network::Try(int ns, std::vector<std::string> command) const {
  const std::string said = absl::StrJoin(command, " ");
  command.insert(command.begin(), "/usr/bin/env");
  const std::string log = absl::StrCat(dir_, "/command.log");
  std::filesystem::remove(log);
  std::optional<ChildProcess> process;
  {
    const Visit visit(ns);
    process = ChildProcess::Start(command, log);
  }
  const std::optional<int> code = process->Wait(kCommandLimit);
  if (code == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "'", said, "' ", code.has_value() ? absl::StrCat("ended with ", *code) : "did not end", ": ",
      process->log()));
}

void Network::Run(int ns, std::vector<std::string> command) const {
  const absl::Status status = Try(ns, std::move(command));
  FERRY_CHECK(status.ok()) << status;
}

void Network::AwaitCarrier(int ns, const std::string& interface) const {
  const absl::Time limit = absl::Now() + kCommandLimit;
  while (true) {
    const absl::Status up =
        Try(ns, {"sh", "-c", absl::StrCat("ip link show ", interface, " | grep 'state UP'")});
    if (up.ok()) return;
    FERRY_CHECK(absl::Now() < limit) << up;
  }
}

Network::Node& Network::Reach(const std::string& name) {
  const auto known = nodes_.find(name);
  if (known != nodes_.end()) return known->second;
  const size_t number = nodes_.size() + 1;
  Node node = {.ip = absl::StrCat("10.0.", number, ".2"),
               .hub_ip = absl::StrCat("10.0.", number, ".1"),
               .interface = absl::StrCat("node", number),
               .ns = MakeNew()};
  const std::string there = absl::StrCat("/proc/", getpid(), "/fd/", node.ns);
  Run(hub_ns_, {"ip", "link", "add", node.interface, "type", "veth", "peer", "name", "eth0",
                "netns", there});
  Run(hub_ns_, {"ip", "address", "add", node.hub_ip + "/24", "dev", node.interface});
  Run(hub_ns_, {"ip", "link", "set", node.interface, "up"});
  Run(node.ns, {"ip", "address", "add", node.ip + "/24", "dev", "eth0"});
  Run(node.ns, {"ip", "link", "set", "eth0", "up"});
  Run(node.ns, {"ip", "link", "set", "lo", "up"});
  Run(node.ns, {"ip", "route", "add", "default", "via", node.hub_ip});
  AwaitCarrier(node.ns, "eth0");
  return nodes_.emplace(name, std::move(node)).first->second;
}

const std::string& Network::ip(const std::string& node) { return Reach(node).ip; }

integration::Site Network::SiteOf(const std::string& name, const std::vector<std::string>& wrap) {
  const Node& node = Reach(name);
  integration::Site site;
  site.ip = node.ip;
  site.start = [ns = node.ns, wrap](const std::vector<std::string>& argv, const std::string& log) {
    // UCX looks for interfaces in /sys, which must be mounted in the namespace that it shall tell
    // of.  Each of these becomes the next one, so that the process started is the one to signal.
    std::vector<std::string> command = {"/usr/bin/env",
                                        "setpriv",
                                        "--pdeathsig",
                                        "KILL",
                                        "unshare",
                                        "--mount",
                                        "sh",
                                        "-c",
                                        "mount -t sysfs sysfs /sys && exec \"$@\"",
                                        "sh"};
    command.insert(command.end(), wrap.begin(), wrap.end());
    command.insert(command.end(), argv.begin(), argv.end());
    const Visit visit(ns);
    return ChildProcess::Start(command, log);
  };
  return site;
}

void Network::SetLink(const std::string& name, bool up) {
  Node& node = Reach(name);
  if (node.up == up) return;
  node.up = up;
  Run(hub_ns_, {"ip", "link", "set", node.interface, up ? "up" : "down"});
  if (up) AwaitCarrier(hub_ns_, node.interface);
}

void Network::Cut(const std::string& a, const std::string& b) {
  cuts_.emplace_back(ip(a), ip(b));
  ApplyRules();
}

void Network::Lose(const std::string& node, int per_mille) {
  losses_[ip(node)] = per_mille;
  ApplyRules();
}

void Network::Heal() {
  for (auto& [name, node] : nodes_) SetLink(name, true);
  cuts_.clear();
  losses_.clear();
  ApplyRules();
}

void Network::ApplyRules() {
  // Nodes talk through the hub, this process from it.
  std::string rules = "add table ip chaos; flush table ip chaos;";
  for (const char* hook : {"forward", "input", "output"}) {
    const std::string chain = absl::StrCat(" ip chaos ", hook, " ");
    absl::StrAppend(&rules, "add chain", chain, "{ type filter hook ", hook, " priority 0; };");
    for (const auto& [a, b] : cuts_) {
      absl::StrAppend(&rules, "add rule", chain, "ip saddr ", a, " ip daddr ", b, " drop;");
      absl::StrAppend(&rules, "add rule", chain, "ip saddr ", b, " ip daddr ", a, " drop;");
    }
    for (const auto& [address, per_mille] : losses_) {
      for (const char* side : {"saddr", "daddr"}) {
        absl::StrAppend(&rules, "add rule", chain, "ip ", side, " ", address,
                        " numgen random mod 1000 < ", per_mille, " drop;");
      }
    }
  }
  Run(hub_ns_, {"nft", rules});
}

}  // namespace chaos
