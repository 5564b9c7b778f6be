// What a transport must do when the other process dies, stands still or is replaced.  Each case has
// a real second process.  FERRY_CHAOS_ROUNDS repeats the destructive ones.

#include <malloc.h>

#include <cstdlib>
#include <functional>

#include "gtest/gtest.h"
#include "tests/kv_transfer/peer_process.h"
#include "tests/kv_transfer/side.h"
#include "tests/kv_transfer/ucx_of_test.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// GCC brings this function of the sanitizers' runtime, but not the header that declares it.
extern "C" size_t __sanitizer_get_current_allocated_bytes();
#endif

namespace kv_transfer {
namespace {

using absl::StatusCode;

constexpr int32_t kNumBlocks = 48;
constexpr size_t kBlockBytes = 64 * 27 * 1152;  // a block of 27 layers in bfloat16

int Rounds() {
  const char* const rounds = std::getenv("FERRY_CHAOS_ROUNDS");
  return rounds == nullptr ? 3 : std::max(1, std::atoi(rounds));
}

// Of this process, by its allocator.
int64_t BytesInUse() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return static_cast<int64_t>(__sanitizer_get_current_allocated_bytes());
#else
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
#endif
}

class PeerProcessTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const Epoch epoch = Epoch::Random();
    auto transport = MakeUcx(GetParam(), epoch, copies_.get());
    ASSERT_TRUE(transport.ok()) << transport.status();
    side_ = std::make_unique<Side>(epoch, *std::move(transport));
    peer_ = std::make_unique<PeerProcess>(GetParam());
    destination_ = std::make_unique<Blocks>(kNumBlocks, kBlockBytes);
    Connect();
  }

  // What still ends then writes to destination_.
  void TearDown() override { side_.reset(); }

  // As a handshake does it: we connect to the peer, and then it to us.
  void Connect() {
    const absl::Status status =
        side_->transport->Connect(peer_->epoch(), {peer_->address()}, absl::Seconds(10));
    ASSERT_TRUE(status.ok()) << status;
    peer_->Tell("connect " + FormatAddress(side_->epoch, side_->transport->addresses().front()));
    ASSERT_EQ(peer_->Read("connect "), "OK");
  }

  // Expects a transfer into destination_ and makes the peer send it.  At its end the memory is
  // poisoned in the callback itself: it is reused at once.  `before_send` runs when it is expected.
  Promised<IncomingResult> StartReceiving(uint64_t seed, absl::Duration stall = absl::Seconds(60),
                                          const std::function<void()>& before_send = nullptr) {
    IncomingSpec spec = SpecFor(RandomId(), peer_->epoch(), *destination_);
    spec.stall_timeout = stall;
    transfer_id_ = spec.transfer_id;
    const std::string what = IdHex() + " " + std::to_string(kNumBlocks) + " " +
                             std::to_string(kBlockBytes) + " " + std::to_string(seed);
    peer_->Tell("prepare " + what);  // so that the clock below runs for the transfer alone
    peer_->Read("prepared");
    const Promised<IncomingResult> ended;
    EXPECT_TRUE(side_->incoming
                    ->Expect(std::move(spec),
                             [this, ended](IncomingResult result) {
                               if (!result.status.ok()) destination_->Poison();
                               ended.Set(std::move(result));
                             })
                    .ok());
    if (before_send) before_send();
    peer_->Tell("send " + what);
    return ended;
  }
  // A whole transfer from the peer, every byte checked.
  void ReceiveAll(uint64_t seed) {
    const Promised<IncomingResult> ended = StartReceiving(seed);
    ASSERT_EQ(peer_->Read("sent "), "OK " + std::to_string(kNumBlocks));
    EXPECT_TRUE(side_->incoming->Announce(transfer_id_, kNumBlocks, kNumBlocks * kBlockBytes).ok());
    const auto result = ended.Wait();
    ASSERT_TRUE(result.has_value());
    EXPECT_TRUE(result->status.ok()) << result->status;
    EXPECT_TRUE(destination_->HavePattern(seed));
    destination_->Poison();
  }
  std::string IdHex() const { return Epoch{transfer_id_}.ToHex(); }

  const std::unique_ptr<kernels::DeviceCopies> copies_ = TestMemory::Get().MakeCopies();
  std::unique_ptr<Side> side_;
  std::unique_ptr<Blocks> destination_;
  std::unique_ptr<PeerProcess> peer_;
  TransferId transfer_id_{};
};

TEST_P(PeerProcessTest, BlocksOfAnotherProcessArrive) {
  std::printf("link: %s\n", side_->transport->LinkName(peer_->epoch()).c_str());
  for (uint64_t seed = 1; seed <= 3; ++seed) ReceiveAll(seed);
}

TEST_P(PeerProcessTest, BlocksReachAnotherProcessWhileItSendsToo) {
  Blocks source(kNumBlocks, kBlockBytes);
  source.Fill(11);
  transfer_id_ = RandomId();
  peer_->Tell("expect " + IdHex() + " " + std::to_string(kNumBlocks) + " " +
              std::to_string(kBlockBytes) + " 11");
  ASSERT_EQ(peer_->Read("expecting", absl::Seconds(30)), "");
  const TransferId to_peer = transfer_id_;
  const Promised<IncomingResult> ended = StartReceiving(12);
  const OutgoingResult sent = side_->SendAll(peer_->epoch(), to_peer, source);
  EXPECT_TRUE(sent.status.ok()) << sent.status;
  EXPECT_EQ(peer_->Read("sent "), "OK " + std::to_string(kNumBlocks));
  EXPECT_TRUE(side_->incoming->Announce(transfer_id_, kNumBlocks, kNumBlocks * kBlockBytes).ok());
  EXPECT_TRUE(ended.Wait().value().status.ok());
  EXPECT_TRUE(destination_->HavePattern(12));
  peer_->Tell("announce " + Epoch{to_peer}.ToHex() + " " + std::to_string(kNumBlocks) + " " +
              std::to_string(kNumBlocks * kBlockBytes));
  EXPECT_EQ(peer_->Read("ended "), "OK " + std::to_string(kNumBlocks));
}

TEST_P(PeerProcessTest, KilledSenderEndsItsTransfers) {
  for (int round = 0; round < Rounds(); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const uint64_t before = side_->transport->received();
    const Promised<IncomingResult> ended = StartReceiving(20 + round);
    ASSERT_TRUE(side_->transport->WaitForReceived(before + 1 + round % 16));
    const absl::Time killed = absl::Now();
    peer_->Kill();
    const auto result = ended.Wait();
    ASSERT_TRUE(result.has_value()) << "the transfer outlives its sender";
    EXPECT_EQ(result->status.code(), StatusCode::kAborted) << result->status;
    std::printf("%s: noticed %.0f ms after the kill, %d blocks had arrived\n", GetParam().c_str(),
                absl::ToDoubleMilliseconds(absl::Now() - killed), result->blocks);
    EXPECT_EQ(destination_->Foreign(), 0);
    EXPECT_EQ(side_->incoming->counts().quarantined, 0);
    EXPECT_EQ(side_->transport->LinkName(peer_->epoch()), "");
    // Its successor is another peer, over the same transport.
    peer_ = std::make_unique<PeerProcess>(GetParam());
    Connect();
    if (HasFatalFailure()) return;
    ReceiveAll(40 + round);
    if (HasFatalFailure()) return;
  }
}

// What UCX and this transport keep of a peer that has died in the middle of a transfer: some
// hundred bytes over shared memory, nothing over sockets.
TEST_P(PeerProcessTest, KilledPeersLeaveNoMemoryBehind) {
  constexpr int kWarm = 10;  // UCX's pools grow to what is in flight at once
  constexpr int kKilled = 20;
  constexpr int64_t kMostBytesEach = 4096;
  int64_t before = 0;
  for (int round = 0; round < kWarm + kKilled; ++round) {
    if (round == kWarm) before = BytesInUse();
    const uint64_t received = side_->transport->received();
    const Promised<IncomingResult> ended = StartReceiving(round);
    ASSERT_TRUE(side_->transport->WaitForReceived(received + 1 + round % 4));
    peer_->Kill();
    ASSERT_TRUE(ended.Wait().has_value());
    peer_ = std::make_unique<PeerProcess>(GetParam());
    Connect();
    if (HasFatalFailure()) return;
  }
  const int64_t each = (BytesInUse() - before) / kKilled;
  std::printf("%s: %ld bytes a killed peer\n", GetParam().c_str(), static_cast<long>(each));
  EXPECT_LT(each, kMostBytesEach);
}

TEST_P(PeerProcessTest, KilledReceiverEndsOurSends) {
  Blocks source(kNumBlocks, kBlockBytes);
  for (int round = 0; round < Rounds(); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    transfer_id_ = RandomId();
    peer_->Tell("expect " + IdHex() + " " + std::to_string(kNumBlocks) + " " +
                std::to_string(kBlockBytes) + " 1");
    peer_->Read("expecting");
    const auto outgoing =
        StartOutgoingTransfer(side_->transport.get(), peer_->epoch(), transfer_id_, 1);
    for (int32_t i = 0; i < kNumBlocks; ++i) outgoing->SendBlock(i, source[i]);
    // Stopped first, so that the sends are surely in flight when it dies.
    peer_->Stop();
    peer_->Kill();
    Promised<OutgoingResult> drained;
    outgoing->Finish([drained](OutgoingResult result) { drained.Set(std::move(result)); });
    const auto result = drained.Wait();
    ASSERT_TRUE(result.has_value()) << "sends to a dead process never end";
    if (result->blocks < kNumBlocks) {
      EXPECT_EQ(result->status.code(), StatusCode::kUnavailable) << result->status;
    }
    peer_ = std::make_unique<PeerProcess>(GetParam());
    Connect();
    if (HasFatalFailure()) return;
  }
}

TEST_P(PeerProcessTest, FenceOfASuspendedWriterMakesItsBlocksReusable) {
  int num_cut = 0;
  for (int round = 0; round < Rounds(); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const uint64_t before = side_->transport->received();
    const Promised<IncomingResult> ended = StartReceiving(60 + round);
    ASSERT_TRUE(side_->transport->WaitForReceived(before + round % 24));
    peer_->Stop();
    const absl::Time start = absl::Now();
    const absl::Status fenced = side_->transport->Fence(peer_->epoch(), absl::Seconds(20));
    ASSERT_TRUE(fenced.ok()) << fenced;
    std::printf("%s: fenced a suspended writer in %.1f ms\n", GetParam().c_str(),
                absl::ToDoubleMilliseconds(absl::Now() - start));
    const auto result = ended.Wait(absl::ZeroDuration());
    ASSERT_TRUE(result.has_value()) << "the fence was answered before the transfer's end";
    EXPECT_EQ(result->status.code(), StatusCode::kAborted);
    num_cut += result->blocks < kNumBlocks;
    destination_->Poison();  // reused at once
    peer_->Continue();
    // It goes on where it stood, notices and gives up.
    const std::string sent = peer_->Read("sent ");
    EXPECT_FALSE(sent.empty()) << "the writer's sends never end";
    EXPECT_EQ(destination_->Foreign(), 0) << "bytes landed after the fence";
    Connect();
    if (HasFatalFailure()) return;
    ReceiveAll(80 + round);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(num_cut, 0) << "no transfer was cut midway";
}

TEST_P(PeerProcessTest, StallOfASuspendedWriterEndsItsTransferSafely) {
  for (int round = 0; round < Rounds(); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const uint64_t before = side_->transport->received();
    const Promised<IncomingResult> ended = StartReceiving(100 + round, absl::Seconds(1));
    ASSERT_TRUE(side_->transport->WaitForReceived(before + 1 + round % 8));
    peer_->Stop();
    const auto result = ended.Wait();  // its callback has poisoned the memory
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->status.code(), StatusCode::kAborted) << result->status;
    peer_->Continue();
    EXPECT_FALSE(peer_->Read("sent ").empty()) << "the writer's sends never end";
    EXPECT_EQ(destination_->Foreign(), 0);
    EXPECT_EQ(side_->incoming->counts().quarantined, 0);
    Connect();
    if (HasFatalFailure()) return;
    ReceiveAll(120 + round);
    if (HasFatalFailure()) return;
  }
}

TEST_P(PeerProcessTest, PeerThatFencesUsIsNoticed) {
  peer_->Tell("fence " + side_->epoch.ToHex());
  EXPECT_EQ(peer_->Read("fence "), "OK");
  EXPECT_TRUE(side_->transport->WaitForLost(1));
  EXPECT_EQ(side_->transport->LinkName(peer_->epoch()), "");
  Connect();
  ReceiveAll(7);
}

// Over shared memory all peers share one queue of ours.
class SharedQueueTest : public PeerProcessTest {
 protected:
  // Another process takes a place in our queue, and the signal keeps it from filling it.
  std::unique_ptr<PeerProcess> BlockQueue(int signal) {
    auto other = std::make_unique<PeerProcess>(GetParam());
    other->Tell("tear " + std::to_string(signal) + " " +
                FormatAddress(side_->epoch, side_->transport->addresses().front()));
    EXPECT_TRUE(other->AwaitSignal()) << "its message was not torn";
    return other;
  }
  void ANewcomerSends(uint64_t seed) {
    const std::unique_ptr<PeerProcess> before = std::move(peer_);
    peer_ = std::make_unique<PeerProcess>(GetParam());
    Connect();
    if (!HasFatalFailure()) ReceiveAll(seed);
  }
};

TEST_P(SharedQueueTest, ProcessKilledInAMessageKeepsNobodyFromSending) {
  for (int round = 0; round < Rounds(); ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    absl::Time start;
    const auto block = [&] {
      BlockQueue(SIGKILL);
      start = absl::Now();
    };
    // What is sent then comes behind the empty place.
    const auto ended = StartReceiving(1, absl::Seconds(60), block).Wait();
    ASSERT_TRUE(ended.has_value()) << "the transfer never ends";
    EXPECT_EQ(ended->status.code(), StatusCode::kAborted) << ended->status;
    EXPECT_EQ(destination_->Foreign(), 0);
    Connect();
    if (HasFatalFailure()) return;
    ReceiveAll(2);
    if (HasFatalFailure()) return;
    std::printf("received %.0f ms after the kill\n",
                absl::ToDoubleMilliseconds(absl::Now() - start));
  }
}

TEST_P(SharedQueueTest, NewcomerWithTheBlockedQueuesAddressConnects) {
  BlockQueue(SIGKILL);
  ANewcomerSends(3);
}

TEST_P(SharedQueueTest, ProcessStoppedInAMessageKeepsNobodyFromSending) {
  const std::unique_ptr<PeerProcess> stopped = BlockQueue(SIGSTOP);
  ANewcomerSends(4);
  if (HasFatalFailure()) return;
  // It fills its place at last, where nobody looks any more.
  stopped->Continue();
  EXPECT_EQ(stopped->Read("tear "), "OK");
  ReceiveAll(5);
}

TEST_P(SharedQueueTest, QueueThatWorksIsKept) {
  const std::string address = side_->transport->addresses().front().worker_address;
  for (uint64_t seed = 1; seed <= 3; ++seed) ReceiveAll(seed);
  peer_->Kill();
  EXPECT_TRUE(side_->transport->WaitForLost(1));
  EXPECT_EQ(side_->transport->addresses().front().worker_address, address);
}

INSTANTIATE_TEST_SUITE_P(Ucx, SharedQueueTest, testing::Values("shm"),
                         [](const auto& info) { return info.param; });

INSTANTIATE_TEST_SUITE_P(Ucx, PeerProcessTest,
                         testing::ValuesIn(OfTestMemoryAndLinks({"shm", "tcp", "shm_staged",
                                                                 "tcp_staged", "shm_shared"})),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kv_transfer
