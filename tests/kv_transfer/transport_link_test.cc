// What every transport must do with its links, run for each by name: making, using in both
// directions, fencing, closing; and what UCX has to say before there is one.

#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kv_transfer/contract_fixture.h"

namespace kv_transfer {
namespace {

using absl::StatusCode;

class TransportLinkTest : public TransportContractTest {};

TEST_P(TransportLinkTest, FenceEndsThePairAndTheNextConnectWorks) {
  int num_cut = 0;
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    Blocks source(24, 1 << 20), destination(24, 1 << 20);
    source.Fill(8);
    Promised<IncomingResult> ended;
    const TransferId id = Expect(*a_, *b_, destination, ended);
    const uint64_t before = b_->transport->received();
    const auto outgoing = StartOutgoingTransfer(a_->transport.get(), b_->epoch, id, 1);
    for (int32_t i = 0; i < source.size(); ++i) outgoing->SendBlock(i, source[i]);
    ASSERT_TRUE(b_->transport->WaitForReceived(before + round));
    // Now and then by the sender.
    Side& fencing = round % 3 == 2 ? *a_ : *b_;
    Side& fenced = round % 3 == 2 ? *b_ : *a_;
    ASSERT_TRUE(fencing.transport->Fence(fenced.epoch, absl::Seconds(10)).ok());
    if (&fencing == b_.get()) {
      EXPECT_TRUE(ended.Wait(absl::ZeroDuration()).has_value()) << "OnPeerLost comes before OK";
      destination.Poison();
    }
    const auto result = ended.Wait();
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->status.code(), StatusCode::kAborted) << result->status;
    Promised<OutgoingResult> drained;
    outgoing->Finish([drained](OutgoingResult r) { drained.Set(r); });
    const auto sent = drained.Wait();
    ASSERT_TRUE(sent.has_value()) << "a send never ended";
    num_cut += !sent->status.ok();
    if (&fencing == b_.get()) {
      EXPECT_EQ(destination.Foreign(), 0);
    }

    // Alternately from either side; the other one may not have noticed the fence yet.
    ASSERT_TRUE((round % 2 == 0 ? Connect(*a_, *b_) : Connect(*b_, *a_)).ok());
    ASSERT_TRUE((round % 2 == 0 ? Connect(*b_, *a_) : Connect(*a_, *b_)).ok());
    Blocks again(3, 70000), arrived(3, 70000);
    again.Fill(9);
    Promised<IncomingResult> again_ended;
    const TransferId again_id = Expect(*a_, *b_, arrived, again_ended);
    const OutgoingResult again_sent = a_->SendAll(b_->epoch, again_id, again);
    ASSERT_TRUE(again_sent.status.ok()) << again_sent.status;
    EXPECT_TRUE(b_->incoming->Announce(again_id, again_sent.blocks, again_sent.bytes).ok());
    EXPECT_TRUE(again_ended.Wait().value().status.ok());
    EXPECT_TRUE(arrived.HavePattern(9));
  }
  EXPECT_GT(num_cut, 0) << "no transfer was fenced midway";
  EXPECT_TRUE(b_->transport->Fence(Epoch::Random(), absl::Seconds(1)).ok());
}

TEST_P(TransportLinkTest, AbortPeerEndsAllItsTransfersOnly) {
  const std::unique_ptr<Side> c = MakeSide();
  ASSERT_TRUE(Connect(*c, *b_).ok());
  Blocks lost(2, 100), lost_too(2, 100), kept(2, 100), source(2, 100);
  source.Fill(10);
  Promised<IncomingResult> lost_ended, lost_too_ended, kept_ended;
  Expect(*a_, *b_, lost, lost_ended);
  Expect(*a_, *b_, lost_too, lost_too_ended);
  const TransferId kept_id = Expect(*c, *b_, kept, kept_ended);
  b_->incoming->AbortPeer(a_->epoch, absl::UnavailableError("its stream broke"));
  EXPECT_EQ(lost_ended.Wait().value().status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(lost_too_ended.Wait().value().status.code(), StatusCode::kUnavailable);
  const OutgoingResult sent = c->SendAll(b_->epoch, kept_id, source);
  EXPECT_TRUE(sent.status.ok()) << sent.status;
  EXPECT_TRUE(b_->incoming->Announce(kept_id, sent.blocks, sent.bytes).ok());
  EXPECT_TRUE(kept_ended.Wait().value().status.ok());
}

TEST_P(TransportLinkTest, ManyTransfersInBothDirections) {
  constexpr int kTransfers = 40;
  struct One {
    std::unique_ptr<Blocks> source, destination;
    Promised<IncomingResult> ended;
  };
  std::vector<std::unique_ptr<One>> all;
  for (int i = 0; i < kTransfers; ++i) {
    all.push_back(std::make_unique<One>());
    One& one = *all.back();
    std::vector<size_t> lengths(1 + i % 7);
    for (size_t j = 0; j < lengths.size(); ++j) lengths[j] = 1000 + 37 * i + 9001 * j;
    one.source = std::make_unique<Blocks>(lengths);
    one.source->Fill(100 * i);
    one.destination = std::make_unique<Blocks>(lengths);
    Side& from = i % 2 == 0 ? *a_ : *b_;
    Side& to = i % 2 == 0 ? *b_ : *a_;
    const TransferId id = Expect(from, to, *one.destination, one.ended);
    const auto outgoing = StartOutgoingTransfer(from.transport.get(), to.epoch, id, 1);
    for (int32_t b = 0; b < one.source->size(); ++b) outgoing->SendBlock(b, (*one.source)[b]);
    outgoing->Finish([&to, id](OutgoingResult result) {
      EXPECT_TRUE(result.status.ok()) << result.status;
      EXPECT_TRUE(to.incoming->Announce(id, result.blocks, result.bytes).ok());
    });
  }
  for (int i = 0; i < kTransfers; ++i) {
    const auto result = all[i]->ended.Wait();
    ASSERT_TRUE(result.has_value()) << i;
    EXPECT_TRUE(result->status.ok()) << result->status;
    EXPECT_TRUE(all[i]->destination->HavePattern(100 * i)) << i;
  }
  for (const Side* side : {a_.get(), b_.get()}) {
    EXPECT_EQ(side->incoming->counts().receiving, 0);
    EXPECT_EQ(side->transport->stats().messages_refused, 0u);
    EXPECT_EQ(side->transport->stats().messages_failed, 0u);
  }
}

TEST_P(TransportLinkTest, CloseEndsEverySendAndTransfer) {
  Blocks source(40, 1 << 20), destination(40, 1 << 20);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  std::atomic<int> num_done{0};
  for (int32_t i = 0; i < source.size(); ++i) {
    a_->transport->Send(b_->epoch, a_->HeaderTo(*b_, id, i, 1 << 20), source[i],
                        [&](absl::Status) { ++num_done; });
  }
  a_->transport->Close();
  EXPECT_EQ(num_done, source.size());
  EXPECT_EQ(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, id, 0, 1 << 20), source[0]).code(),
            StatusCode::kUnavailable);
  EXPECT_TRUE(a_->transport->Fence(b_->epoch, absl::Seconds(1)).ok());
  const auto result = ended.Wait();  // the peer notices, or its stall timeout does
  ASSERT_TRUE(result.has_value());
  EXPECT_FALSE(result->status.ok());
}

TEST_P(TransportLinkTest, ConnectNamesWhatIsWrong) {
  std::vector<LinkAddress> other = b_->transport->addresses();
  for (LinkAddress& address : other) address.kind = "carrier pigeon";
  EXPECT_EQ(a_->transport->Connect(Epoch::Random(), other, absl::Seconds(1)).code(),
            StatusCode::kFailedPrecondition);
  // Another process at the address that was meant for this epoch.
  const absl::Status wrong =
      a_->transport->Connect(Epoch::Random(), b_->transport->addresses(), absl::Seconds(5));
  EXPECT_EQ(wrong.code(), StatusCode::kUnavailable) << wrong;
  // Nobody.
  std::unique_ptr<Side> gone = MakeSide();
  const std::vector<LinkAddress> gone_addresses = gone->transport->addresses();
  const Epoch gone_epoch = gone->epoch;
  gone.reset();
  const absl::Status nobody =
      a_->transport->Connect(gone_epoch, gone_addresses, absl::Milliseconds(500));
  EXPECT_EQ(nobody.code(), StatusCode::kUnavailable) << nobody;
  // Bytes that are no address, or not quite one.
  std::vector<std::string> damaged = {"", "x", std::string(200, '\0'), std::string(200, '\xff')};
  for (const LinkAddress& address : b_->transport->addresses()) {
    const std::string& good = address.worker_address;
    for (size_t i = 0; i < good.size(); i += 7) {
      damaged.push_back(good.substr(0, i));
      damaged.push_back(good);
      damaged.back()[i] ^= 0x10;
    }
    for (const std::string& bad : damaged) {
      const LinkAddress there = {
          .kind = address.kind, .host_id = address.host_id, .worker_address = bad, .listener = bad};
      EXPECT_FALSE(a_->transport->Connect(Epoch::Random(), {there}, absl::Seconds(1)).ok());
    }
  }
  // None of it hurt the link that works, and connecting again is a no-op.
  EXPECT_TRUE(Connect(*a_, *b_).ok());
  Blocks source(1, 1000), destination(1, 1000);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  const OutgoingResult sent = a_->SendAll(b_->epoch, id, source);
  EXPECT_TRUE(sent.status.ok()) << sent.status;
  // The destination goes only when nothing lands in it any more.
  EXPECT_TRUE(b_->incoming->Announce(id, 1, 1000).ok());
  ASSERT_TRUE(ended.Wait().has_value());
}

TEST_P(TransportLinkTest, BothSidesMayConnectAtTheSameTime) {
  for (int round = 0; round < 10; ++round) {
    const std::unique_ptr<Side> c = MakeSide();
    const std::unique_ptr<Side> d = MakeSide();
    std::thread other([&] { EXPECT_TRUE(Connect(*d, *c).ok()); });
    EXPECT_TRUE(Connect(*c, *d).ok());
    other.join();
    for (const auto& [from, to] : {std::pair(c.get(), d.get()), std::pair(d.get(), c.get())}) {
      Blocks source(2, 50000), destination(2, 50000);
      source.Fill(round);
      Promised<IncomingResult> ended;
      const TransferId id = Expect(*from, *to, destination, ended);
      const OutgoingResult sent = from->SendAll(to->epoch, id, source);
      ASSERT_TRUE(sent.status.ok()) << sent.status;
      EXPECT_TRUE(to->incoming->Announce(id, sent.blocks, sent.bytes).ok());
      EXPECT_TRUE(ended.Wait().value().status.ok());
      EXPECT_TRUE(destination.HavePattern(round));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, TransportLinkTest,
    testing::ValuesIn(OfTestMemory({"loopback", "shm", "tcp", "loopback_staged", "shm_staged",
                                    "tcp_staged", "loopback_shared", "shm_shared"})),
    [](const auto& info) { return info.param; });

// RDMA: where there are devices the suite above should be run with "rc" too; here it says what is
// not run.
TEST(RdmaTest, IsExercisedOnlyWhereDevicesExist) {
  UcxOptions options;
  options.epoch = Epoch::Random();
  options.link_kinds = {"rc"};
  options.listen_ip = "127.0.0.1";
  const auto transport = CreateUcxTransport(options);
  if (transport.ok()) {
    GTEST_SKIP() << "NOT EXERCISED: rc has devices here, but no second host to talk to";
  }
  EXPECT_EQ(transport.status().code(), StatusCode::kUnavailable);
  GTEST_SKIP() << "NOT EXERCISED: link kind rc: " << transport.status();
}

// Local addresses of this process's listening IPv4 sockets as /proc has them: 0100007F is
// 127.0.0.1.
std::set<std::string> ListeningAddresses() {
  std::set<std::string> own;  // inodes
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.rfind("socket:[", 0) == 0) own.insert(target.substr(8, target.size() - 9));
  }
  std::set<std::string> addresses;
  std::ifstream table("/proc/self/net/tcp");
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
    words >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
        timeout >> inode;
    if (state == "0A" && own.count(inode) > 0) addresses.insert(local.substr(0, local.find(':')));
  }
  return addresses;
}

// A peer may write to memory: it may come by the address that was asked for and by no other.
TEST(UcxTransportTest, ListensOnNoOtherInterface) {
  UcxOptions options;
  options.epoch = Epoch::Random();
  options.link_kinds = {"shm", "tcp"};
  options.listen_ip = "127.0.0.1";
  const auto transport = CreateUcxTransport(options);
  ASSERT_TRUE(transport.ok()) << transport.status();
  EXPECT_THAT(ListeningAddresses(), testing::ElementsAre("0100007F"));
}

// As tcp and rc do: UCX takes connections over TCP for both.
TEST(UcxTransportTest, KindsThatListenHavePortsOneBehindTheOther) {
  UcxOptions options;
  options.epoch = Epoch::Random();
  options.listen_ip = "127.0.0.1";
  options.link_kinds = {"tcp", "shm", "tcp"};
  // Two free ports in a row are found by trying.
  for (options.listen_port = 23000; options.listen_port < 23100; options.listen_port += 2) {
    const auto transport = CreateUcxTransport(options);
    if (!transport.ok()) continue;
    const std::vector<LinkAddress> addresses = (*transport)->addresses();
    ASSERT_EQ(addresses.size(), 3u);
    EXPECT_EQ(addresses[0].listener, absl::StrCat("127.0.0.1:", options.listen_port));
    EXPECT_EQ(addresses[1].listener, "");
    EXPECT_EQ(addresses[2].listener, absl::StrCat("127.0.0.1:", options.listen_port + 1));
    return;
  }
  FAIL() << "no two ports are free";
}

TEST(UcxTransportTest, RefusesBadOptionsInWords) {
  UcxOptions options;
  options.epoch = Epoch::Random();
  options.link_kinds = {"smoke"};
  EXPECT_EQ(CreateUcxTransport(options).status().code(), StatusCode::kInvalidArgument);
  options.link_kinds = {"tcp"};
  options.listen_ip = "not an ip";
  EXPECT_EQ(CreateUcxTransport(options).status().code(), StatusCode::kInvalidArgument);
  options.listen_ip = "192.0.2.1";  // nobody's
  const auto unavailable = CreateUcxTransport(options);
  EXPECT_EQ(unavailable.status().code(), StatusCode::kUnavailable);
  EXPECT_THAT(std::string(unavailable.status().message()), testing::HasSubstr("192.0.2.1"));
}

}  // namespace
}  // namespace kv_transfer
