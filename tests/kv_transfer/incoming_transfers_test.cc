// Random histories: whatever the network does, every transfer ends exactly once, an OK transfer has
// every byte, memory is never written after on_end, and nothing is left over.

#include "kv_transfer/incoming_transfers.h"

#include <atomic>
#include <optional>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kv_transfer/loopback_transport.h"
#include "tests/kv_transfer/side.h"

namespace kv_transfer {
namespace {

constexpr int kNumSenders = 3;
constexpr int kTransfersPerSender = 8;

struct OneTransfer {
  TransferId id = RandomId();
  int sender = 0;
  uint64_t seed = 0;
  std::unique_ptr<Blocks> source, destination;
  std::shared_ptr<OutgoingTransfer> outgoing;
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  std::atomic<bool> pattern_was_right{true};
};

class RandomHistory {
 public:
  explicit RandomHistory(uint64_t seed) : random_(seed), fault_random_(seed ^ 0x5a5a) {
    network_ = CreateLoopbackNetwork();
    receiver_ = MakeSide();
    for (int i = 0; i < kNumSenders; ++i) senders_.push_back(MakeSide());
    network_->SetFaults([this](const MessageHeader&) {
      std::lock_guard lock(mutex_);
      switch (fault_random_() % 24) {
        case 0:
          return LoopbackFault::kDrop;
        case 1:
          return LoopbackFault::kDelay;
        case 2:
        case 3:
          return LoopbackFault::kReorder;
        case 4:
        case 5:
          return LoopbackFault::kDuplicate;
        default:
          return LoopbackFault::kNone;
      }
    });
  }

  void Run() {
    std::vector<std::unique_ptr<OneTransfer>> transfers;
    for (int i = 0; i < kNumSenders * kTransfersPerSender; ++i) {
      transfers.push_back(Start(i % kNumSenders));
      if (random_() % 4 == 0) Disturb(*transfers[random_() % transfers.size()]);
    }
    int num_ok = 0;
    for (const auto& transfer : transfers) {
      // A message that is to go after the next one may be the last of all: the network is asked to
      // let go again and again, and rarely enough for stalls.
      std::optional<OutgoingResult> drained;
      for (int i = 0; i < 200 && !drained.has_value(); ++i) {
        drained = transfer->drained.Wait(absl::Milliseconds(100));
        network_->ReleaseDelayed();
      }
      const auto result = transfer->ended.Wait();
      ASSERT_TRUE(result.has_value()) << "a transfer did not end";
      ASSERT_TRUE(drained.has_value()) << "sends did not drain";
      num_ok += result->status.ok();
      if (result->status.ok()) {
        EXPECT_TRUE(transfer->pattern_was_right) << "an OK transfer lacked bytes";
        EXPECT_EQ(result->bytes, transfer->source->bytes());
        EXPECT_EQ(result->blocks, transfer->source->size());
      }
      EXPECT_EQ(transfer->outgoing->num_in_flight(), 0);
    }
    network_->ReleaseDelayed();
    for (const auto& sender : senders_) sender->transport->Close();
    receiver_->transport->Close();
    for (const auto& transfer : transfers) {
      EXPECT_EQ(transfer->ended.times(), 1);
      EXPECT_EQ(transfer->drained.times(), 1);
      EXPECT_EQ(transfer->destination->Foreign(), 0) << "written after on_end";
    }
    EXPECT_EQ(receiver_->incoming->counts().receiving, 0);
    EXPECT_EQ(receiver_->incoming->counts().quarantined, 0);
    num_ok_ = num_ok;
  }
  int num_ok() const { return num_ok_; }

 private:
  std::unique_ptr<Side> MakeSide() {
    const Epoch epoch = Epoch::Random();
    return std::make_unique<Side>(epoch, CreateLoopbackTransport(network_, epoch));
  }

  std::unique_ptr<OneTransfer> Start(int sender) {
    auto one = std::make_unique<OneTransfer>();
    one->sender = sender;
    one->seed = random_();
    std::vector<size_t> lengths(1 + random_() % 20);
    for (size_t& length : lengths) length = random_() % 8 == 0 ? 0 : random_() % 5000;
    one->source = std::make_unique<Blocks>(lengths);
    one->source->Fill(one->seed);
    one->destination = std::make_unique<Blocks>(lengths);
    Side& from = *senders_[sender];
    EXPECT_TRUE(from.transport
                    ->Connect(receiver_->epoch, receiver_->transport->addresses(), absl::Seconds(5))
                    .ok());
    IncomingSpec spec = SpecFor(one->id, from.epoch, *one->destination);
    spec.stall_timeout = absl::Milliseconds(40);
    spec.total_timeout = absl::Seconds(2);
    OneTransfer* const raw = one.get();
    EXPECT_TRUE(receiver_->incoming
                    ->Expect(std::move(spec),
                             [raw](IncomingResult result) {
                               if (result.status.ok()) {
                                 raw->pattern_was_right = raw->destination->HavePattern(raw->seed);
                               }
                               raw->destination->Poison();  // the memory is someone else's now
                               raw->ended.Set(std::move(result));
                             })
                    .ok());
    one->outgoing = StartOutgoingTransfer(from.transport.get(), receiver_->epoch, one->id, 1);
    for (int32_t i = 0; i < one->source->size(); ++i)
      one->outgoing->SendBlock(i, (*one->source)[i]);
    const auto drained = [this, raw](OutgoingResult result) {
      if (result.status.ok()) {
        // NotFound: it has ended by then.
        (void)receiver_->incoming->Announce(raw->id, result.blocks, result.bytes);
      }
      raw->drained.Set(std::move(result));
    };
    if (random_() % 10 == 0) {
      one->outgoing->Stop(absl::CancelledError("the client left"), drained);
    } else {
      one->outgoing->Finish(drained);
    }
    return one;
  }

  void Disturb(OneTransfer& transfer) {
    const Epoch& sender = senders_[transfer.sender]->epoch;
    switch (random_() % 6) {
      case 0:
        receiver_->incoming->Abort(transfer.id, absl::CancelledError("cancelled"),
                                   absl::Milliseconds(random_() % 10));
        break;
      case 1:
        receiver_->incoming->AbortPeer(sender, absl::UnavailableError("its stream broke"));
        break;
      case 2:
        EXPECT_TRUE(receiver_->transport->Fence(sender, absl::Seconds(5)).ok());
        break;
      case 3:
        EXPECT_TRUE(
            senders_[transfer.sender]->transport->Fence(receiver_->epoch, absl::Seconds(5)).ok());
        break;
      case 4:
        network_->ReleaseDelayed();
        break;
      case 5:
        // Suspended while its receives may be in progress, then fenced: they end all the same.
        network_->Suspend(sender);
        EXPECT_TRUE(receiver_->transport->Fence(sender, absl::Seconds(5)).ok());
        network_->Resume(sender);
        break;
    }
  }

  std::mt19937_64 random_;
  std::mutex mutex_;  // guards fault_random_
  std::mt19937_64 fault_random_;
  std::shared_ptr<LoopbackNetwork> network_;
  std::unique_ptr<Side> receiver_;
  std::vector<std::unique_ptr<Side>> senders_;
  int num_ok_ = 0;
};

TEST(IncomingTransfersTest, RandomHistoriesEndEveryTransferOnceAndLeaveNothing) {
  int num_ok = 0;
  constexpr int kSeeds = 20;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomHistory history(seed);
    history.Run();
    if (HasFatalFailure()) return;
    num_ok += history.num_ok();
  }
  // Otherwise the histories would only show failures.
  EXPECT_GT(num_ok, kSeeds);
  EXPECT_LT(num_ok, kSeeds * kNumSenders * kTransfersPerSender);
}

// What has been started and does not end is stuck, whatever the sender says.
TEST(IncomingTransfersTest, HeartbeatsDoNotHideAStuckReceive) {
  const auto network = CreateLoopbackNetwork();
  network->SetFaults([](const MessageHeader& header) {
    return header.kind == MessageKind::kBlock ? LoopbackFault::kDelay : LoopbackFault::kNone;
  });
  const auto new_side = [&] {
    const Epoch epoch = Epoch::Random();
    return std::make_unique<Side>(epoch, CreateLoopbackTransport(network, epoch));
  };
  const auto sender = new_side(), receiver = new_side();
  ASSERT_TRUE(sender->transport
                  ->Connect(receiver->epoch, receiver->transport->addresses(), absl::Seconds(5))
                  .ok());
  Blocks source(1, 100), destination(1, 100);
  const TransferId id = RandomId();
  IncomingSpec spec = SpecFor(id, sender->epoch, destination);
  spec.stall_timeout = absl::Milliseconds(200);
  Promised<IncomingResult> ended;
  ASSERT_TRUE(receiver->incoming
                  ->Expect(std::move(spec),
                           [ended](IncomingResult result) { ended.Set(std::move(result)); })
                  .ok());
  const auto outgoing = StartOutgoingTransfer(sender->transport.get(), receiver->epoch, id, 1);
  outgoing->SendBlock(0, source[0]);
  const absl::Time start = absl::Now();
  while (!ended.Wait(absl::Milliseconds(10)).has_value()) {
    ASSERT_LT(absl::Now() - start, absl::Seconds(20));
    outgoing->SendHeartbeat();
  }
  EXPECT_THAT(std::string(ended.Wait()->status.message()), testing::HasSubstr("stalled"));
  network->ReleaseDelayed();
}

// Here nobody knows a peer's slots.
TEST(IncomingTransfersTest, WhatIsBetweenStagedTransportsIsRefused) {
  const auto network = CreateLoopbackNetwork();
  const Epoch epochs[] = {Epoch::Random(), Epoch::Random()};
  Side sender(epochs[0], CreateLoopbackTransport(network, epochs[0]));
  Side receiver(epochs[1], CreateLoopbackTransport(network, epochs[1]));
  ASSERT_TRUE(
      sender.transport->Connect(receiver.epoch, receiver.transport->addresses(), absl::Seconds(5))
          .ok());
  Blocks destination(1, 100);
  IncomingSpec spec = SpecFor(RandomId(), sender.epoch, destination);
  MessageHeader header = sender.HeaderTo(receiver, spec.transfer_id, 0, 100);
  Promised<IncomingResult> ended;
  ASSERT_TRUE(receiver.incoming
                  ->Expect(std::move(spec),
                           [ended](IncomingResult result) { ended.Set(std::move(result)); })
                  .ok());
  header.slot = 1;
  EXPECT_EQ(sender.SendAndWait(receiver.epoch, header, {}).code(), absl::StatusCode::kAborted);
  header.slot = 0;
  header.length = 0;
  for (const MessageKind kind :
       {MessageKind::kSlotsMapped, MessageKind::kSlotRead, MessageKind::kSlotRefused}) {
    header.kind = kind;
    EXPECT_EQ(sender.SendAndWait(receiver.epoch, header, {}).code(), absl::StatusCode::kAborted);
  }
  EXPECT_EQ(ended.times(), 0);
  EXPECT_EQ(destination.Foreign(), 0);
}

TEST(IncomingTransfersTest, WhatDidNotArriveIsNamed) {
  const auto network = CreateLoopbackNetwork();
  const Epoch epoch = Epoch::Random(), sender = Epoch::Random();
  Side receiver(epoch, CreateLoopbackTransport(network, epoch));
  for (const MessageKind kind : {MessageKind::kBlock, MessageKind::kStateSlot}) {
    Blocks destination(2, 100);
    IncomingSpec spec = SpecFor(RandomId(), sender, destination);
    spec.blocks = {destination[0]};
    spec.state_slot = destination[1];
    MessageHeader header;
    header.transfer_id = spec.transfer_id;
    header.attempt = spec.attempt;
    header.kind = kind;
    header.receiver_epoch = epoch;
    header.length = 100;
    Promised<IncomingResult> ended;
    ASSERT_TRUE(receiver.incoming
                    ->Expect(std::move(spec),
                             [ended](IncomingResult result) { ended.Set(std::move(result)); })
                    .ok());
    // As the transport reports it.
    ASSERT_TRUE(receiver.transport->OnOffer(sender, header).ok());
    receiver.transport->OnReceived(sender, header, absl::CancelledError("the endpoint closed"));
    const auto result = ended.Wait();
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->status.message(), kind == MessageKind::kBlock
                                            ? "block 0: the endpoint closed"
                                            : "state slot: the endpoint closed");
  }
}

TEST(LoopbackNetworkTest, ALinkIsMadeAnewWhenBothSidesHaveHeardThatTheOneBeforeIsGone) {
  const auto network = CreateLoopbackNetwork();
  const Epoch a = Epoch::Random(), b = Epoch::Random();
  Side fencing(a, CreateLoopbackTransport(network, a));
  Side fenced(b, CreateLoopbackTransport(network, b));
  const auto connect = [&](absl::Duration timeout) {
    return fencing.transport->Connect(b, fenced.transport->addresses(), timeout);
  };
  ASSERT_TRUE(connect(absl::Seconds(10)).ok());
  network->Suspend(b);
  ASSERT_TRUE(fencing.transport->Fence(b, absl::Seconds(10)).ok());
  EXPECT_EQ(connect(absl::ZeroDuration()).code(), absl::StatusCode::kUnavailable);
  network->Resume(b);
  EXPECT_TRUE(connect(absl::Seconds(10)).ok());
}

}  // namespace
}  // namespace kv_transfer
