// The suite's own network: what it breaks is broken, what it repairs is whole, and nothing stays.

#include "tests/chaos/network.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/chaos/relay.h"
#include "tests/chaos/stage.h"

namespace chaos {
namespace {

using integration::ChildProcess;

// A program at `node` that serves one answer a connection.
class NetworkTest : public testing::Test {
 protected:
  NetworkTest() : dir_(integration::MakeTestDir()) {}

  // Whether a process at `from` can connect to `address` ("ip:port") and reads "hello" there.
  bool Reaches(const std::string& from, const std::string& address) {
    const std::string port = address.substr(address.rfind(':') + 1);
    const std::string ip = address.substr(0, address.rfind(':'));
    ChildProcess process = OwnNetwork().SiteOf(from).start(
        {"python3", "-c",
         "import socket,sys\n"
         "s=socket.create_connection((sys.argv[1],int(sys.argv[2])),timeout=2)\n"
         "sys.exit(0 if s.recv(5)==b'hello' else 1)",
         ip, port},
        dir_ + "/client.log");
    return process.Wait(absl::Seconds(30)) == 0;
  }
  // Starts a server at `node`; its address.
  std::string Serve(const std::string& node) {
    const std::string ports = absl::StrCat(dir_, "/", node, ".ports");
    servers_.push_back(OwnNetwork().SiteOf(node).start(
        {"python3", "-c",
         "import os,socket,sys\n"
         "s=socket.create_server((sys.argv[1],0))\n"
         "open(sys.argv[2]+'.tmp','w').write('port=%d\\n'%s.getsockname()[1])\n"
         "os.rename(sys.argv[2]+'.tmp',sys.argv[2])\n"
         "while True:\n"
         "  c,_=s.accept(); c.sendall(b'hello'); c.close()",
         OwnNetwork().ip(node), ports},
        dir_ + "/server.log"));
    return absl::StrCat(OwnNetwork().ip(node), ":",
                        integration::WaitForPort(ports, "port", absl::Seconds(30)).value());
  }

  const std::string dir_;
  std::vector<ChildProcess> servers_;
};

TEST_F(NetworkTest, LinksGoDownAndPairsAreCutAndAllIsRepaired) {
  Network& network = OwnNetwork();
  const std::string server = Serve("a");
  EXPECT_TRUE(Reaches("b", server));
  EXPECT_TRUE(Reaches("c", server));
  network.SetLink("a", false);
  EXPECT_FALSE(Reaches("b", server));
  network.SetLink("a", true);
  EXPECT_TRUE(Reaches("b", server));
  network.Cut("a", "b");
  EXPECT_FALSE(Reaches("b", server));
  EXPECT_TRUE(Reaches("c", server));
  network.Lose("c", 999);
  EXPECT_FALSE(Reaches("c", server));
  network.Heal();
  EXPECT_TRUE(Reaches("b", server));
  EXPECT_TRUE(Reaches("c", server));
}

TEST_F(NetworkTest, ARelayDelaysFallsSilentAndBreaks) {
  const std::string server = Serve("a");
  Relay relay(OwnNetwork().hub_ip("a"), server);
  EXPECT_TRUE(Reaches("b", relay.address()));
  relay.SetDelay(absl::Milliseconds(300));
  const absl::Time start = absl::Now();
  EXPECT_TRUE(Reaches("b", relay.address()));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  relay.SetDelay(absl::ZeroDuration());
  relay.SetSilent(true);
  EXPECT_FALSE(Reaches("b", relay.address()));
  relay.SetSilent(false);
  EXPECT_TRUE(Reaches("b", relay.address()));
}

// A process at a node has the node's interfaces and no others, also where UCX looks for them.
TEST_F(NetworkTest, ANodeIsAlone) {
  ChildProcess process = OwnNetwork().SiteOf("a").start(
      {"sh", "-c", "test \"$(ls /sys/class/net | tr '\\n' ' ')\" = 'eth0 lo '"}, dir_ + "/ls.log");
  EXPECT_EQ(process.Wait(absl::Seconds(30)), 0) << process.log();
}

}  // namespace
}  // namespace chaos
