// What every transport must do, run for each by name.  Both ends live in this process; the cases
// that need a process of its own are in peer_process_test.cc.

#include <atomic>
#include <cstdio>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kv_transfer/loopback_transport.h"
#include "kv_transfer/ucx_transport.h"
#include "tests/kv_transfer/side.h"

namespace kv_transfer {
namespace {

using absl::StatusCode;

class TransportContractTest : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Side> MakeSide() {
    const Epoch epoch = Epoch::Random();
    if (GetParam() == "loopback") {
      return std::make_unique<Side>(epoch, CreateLoopbackTransport(network_, epoch));
    }
    UcxOptions options;
    options.epoch = epoch;
    options.link_kinds = {GetParam()};
    options.listen_ip = "127.0.0.1";
    auto transport = CreateUcxTransport(options);
    if (!transport.ok()) {
      ADD_FAILURE() << transport.status();
      abort();
    }
    return std::make_unique<Side>(epoch, *std::move(transport));
  }
  static absl::Status Connect(Side& from, Side& to) {
    return from.transport->Connect(to.epoch, to.transport->addresses(), absl::Seconds(10));
  }
  void SetUp() override {
    a_ = MakeSide();
    b_ = MakeSide();
    ASSERT_TRUE(Connect(*a_, *b_).ok());
    ASSERT_TRUE(Connect(*b_, *a_).ok());
  }
  // Expects a transfer from `from` at `to`.
  static TransferId Expect(Side& from, Side& to, Blocks& destination,
                           const Promised<IncomingResult>& ended,
                           absl::Duration stall = absl::Seconds(20)) {
    IncomingSpec spec = SpecFor(RandomId(), from.epoch, destination);
    const TransferId id = spec.transfer_id;
    spec.stall_timeout = stall;
    EXPECT_TRUE(to.incoming
                    ->Expect(std::move(spec),
                             [ended](IncomingResult result) { ended.Set(std::move(result)); })
                    .ok());
    return id;
  }

  std::shared_ptr<LoopbackNetwork> network_ = CreateLoopbackNetwork();
  std::unique_ptr<Side> a_, b_;
};

TEST_P(TransportContractTest, WrittenBlocksAreReadableAtTheReceiver) {
  // Sizes below, at and above any eager threshold, and one above kMaxMessageBytes, which goes in
  // parts.
  const std::vector<size_t> lengths = {1,       63,      4096,    8257,    65536,
                                       1 << 20, 1990656, 4497408, 8 << 20, (20 << 20) + 7};
  Blocks source(lengths), destination(lengths);
  source.Fill(1);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  const OutgoingResult sent = a_->SendAll(b_->epoch, id, source);
  ASSERT_TRUE(sent.status.ok()) << sent.status;
  EXPECT_EQ(sent.bytes, source.bytes());
  EXPECT_EQ(sent.blocks, source.size());
  EXPECT_TRUE(b_->incoming->Announce(id, sent.blocks, sent.bytes).ok());
  const auto result = ended.Wait();
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->status.ok()) << result->status;
  EXPECT_EQ(result->bytes, source.bytes());
  EXPECT_EQ(result->blocks, source.size());
  EXPECT_TRUE(destination.HavePattern(1));
  EXPECT_EQ(b_->transport->stats().bytes_received, source.bytes());
  EXPECT_EQ(a_->transport->stats().bytes_sent, source.bytes());
}

TEST_P(TransportContractTest, LinkHasAName) {
  EXPECT_THAT(a_->transport->LinkName(b_->epoch), testing::StartsWith(GetParam()));
  EXPECT_EQ(a_->transport->LinkName(Epoch::Random()), "");
  RecordProperty("link", a_->transport->LinkName(b_->epoch));
  std::printf("link: %s\n", a_->transport->LinkName(b_->epoch).c_str());
}

TEST_P(TransportContractTest, EndsOnlyWhenAnnouncedAndComplete) {
  Blocks source(2, 5000), destination(2, 5000);
  source.Fill(2);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  // Announced before the last block: the RPC may overtake the data.
  EXPECT_TRUE(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, id, 1, 5000), source[1]).ok());
  EXPECT_TRUE(b_->incoming->Announce(id, 2, 10000).ok());
  EXPECT_EQ(b_->incoming->counts().receiving, 1);
  EXPECT_EQ(ended.times(), 0);
  EXPECT_TRUE(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, id, 0, 5000), source[0]).ok());
  const auto result = ended.Wait();
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->status.ok());
  EXPECT_TRUE(destination.HavePattern(2));
}

TEST_P(TransportContractTest, ZeroLengthBlockArrives) {
  const std::vector<size_t> lengths = {0, 100, 0};
  Blocks source(lengths), destination(lengths);
  source.Fill(3);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  const OutgoingResult sent = a_->SendAll(b_->epoch, id, source);
  EXPECT_TRUE(b_->incoming->Announce(id, sent.blocks, sent.bytes).ok());
  const auto result = ended.Wait();
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->status.ok()) << result->status;
  EXPECT_EQ(result->blocks, 3);
  EXPECT_EQ(result->bytes, 100u);
}

TEST_P(TransportContractTest, StateSlotArrivesBesideTheBlocks) {
  Blocks source(2, 4000), destination(2, 4000);
  source.Fill(4);
  IncomingSpec spec = SpecFor(RandomId(), a_->epoch, destination);
  spec.blocks = {destination[0]};
  spec.state_slot = destination[1];
  const TransferId id = spec.transfer_id;
  Promised<IncomingResult> ended;
  ASSERT_TRUE(
      b_->incoming->Expect(std::move(spec), [ended](IncomingResult r) { ended.Set(r); }).ok());
  const auto outgoing = StartOutgoingTransfer(a_->transport.get(), b_->epoch, id, 1);
  outgoing->SendBlock(0, source[0]);
  outgoing->SendStateSlot(source[1]);
  Promised<OutgoingResult> drained;
  outgoing->Finish([drained](OutgoingResult r) { drained.Set(r); });
  const auto sent = drained.Wait();
  ASSERT_TRUE(sent.has_value());
  EXPECT_EQ(sent->blocks, 1);
  EXPECT_EQ(sent->bytes, 8000u);
  EXPECT_TRUE(b_->incoming->Announce(id, 1, 8000).ok());
  const auto result = ended.Wait();
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE(result->status.ok()) << result->status;
  EXPECT_TRUE(destination.HavePattern(4));
}

// Every wrong message is refused, counted, told to the sender, and touches no byte.
TEST_P(TransportContractTest, StaleAndUnknownMessagesAreRefused) {
  Blocks destination(2, 3000);
  Blocks source(1, 3000);
  source.Fill(5);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  const MessageHeader right = a_->HeaderTo(*b_, id, 0, 3000);
  std::vector<std::pair<const char*, MessageHeader>> wrong(8, {"", right});
  wrong[0] = {"stale epoch", right};
  wrong[0].second.receiver_epoch = Epoch::Random();
  wrong[1] = {"unknown transfer", right};
  wrong[1].second.transfer_id = RandomId();
  wrong[2] = {"stale attempt", right};
  wrong[2].second.attempt = 0;
  wrong[3] = {"index out of range", right};
  wrong[3].second.index = 2;
  wrong[4] = {"wrong length", right};
  wrong[4].second.length = 2999;
  wrong[5] = {"no slot expected", right};
  wrong[5].second.kind = MessageKind::kStateSlot;
  wrong[6] = {"part out of range", right};
  wrong[6].second.part = 1;
  wrong[7] = {"largest index", right};
  wrong[7].second.index = 0xffffffff;
  uint64_t num_refused = 0;
  for (const auto& [what, header] : wrong) {
    const absl::Status status =
        a_->SendAndWait(b_->epoch, header, source[0].subspan(0, header.length));
    EXPECT_EQ(status.code(), StatusCode::kAborted) << what << ": " << status;
    EXPECT_EQ(b_->transport->stats().messages_refused, ++num_refused) << what;
    EXPECT_EQ(destination.Foreign(), 0) << what;
  }
  // A duplicate of an arrived block leaves what arrived first.
  EXPECT_TRUE(a_->SendAndWait(b_->epoch, right, source[0]).ok());
  Blocks other(1, 3000);
  EXPECT_EQ(a_->SendAndWait(b_->epoch, right, other[0]).code(), StatusCode::kAborted);
  EXPECT_TRUE(HasPattern(destination[0], 5));
  // A transfer expected from someone else.
  Blocks theirs(1, 3000);
  Promised<IncomingResult> theirs_ended;
  IncomingSpec spec = SpecFor(RandomId(), Epoch::Random(), theirs);
  const TransferId their_id = spec.transfer_id;
  ASSERT_TRUE(
      b_->incoming->Expect(spec, [theirs_ended](IncomingResult r) { theirs_ended.Set(r); }).ok());
  EXPECT_EQ(b_->incoming->Expect(spec, nullptr).code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, their_id, 0, 3000), source[0]).code(),
            StatusCode::kAborted);
  EXPECT_EQ(theirs.Foreign(), 0);
  // None of it disturbed the transfer.
  EXPECT_EQ(ended.times(), 0);
  EXPECT_TRUE(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, id, 1, 3000), source[0]).ok());
  EXPECT_TRUE(b_->incoming->Announce(id, 2, 6000).ok());
  EXPECT_TRUE(ended.Wait().value().status.ok());
}

TEST_P(TransportContractTest, SendChecksItsArguments) {
  Blocks source(1, 100);
  const MessageHeader header = a_->HeaderTo(*b_, RandomId(), 0, 99);
  EXPECT_EQ(a_->SendAndWait(b_->epoch, header, source[0]).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(
      a_->SendAndWait(Epoch::Random(), a_->HeaderTo(*b_, RandomId(), 0, 100), source[0]).code(),
      StatusCode::kUnavailable);
}

TEST_P(TransportContractTest, DroppedDataNeverCountsAsArrived) {
  // Block 1 is refused at the receiver (it names another attempt), and the sender announces all the
  // same.
  Blocks source(3, 2000), destination(3, 2000);
  source.Fill(6);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended, absl::Milliseconds(200));
  for (uint32_t i = 0; i < 3; ++i) {
    MessageHeader header = a_->HeaderTo(*b_, id, i, 2000);
    if (i == 1) header.attempt = 7;
    (void)a_->SendAndWait(b_->epoch, header, source[i]);
  }
  EXPECT_TRUE(b_->incoming->Announce(id, 3, 6000).ok());
  const auto result = ended.Wait();
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->status.code(), StatusCode::kAborted) << result->status;
  EXPECT_EQ(result->blocks, 2);
  EXPECT_EQ(result->bytes, 4000u);
  EXPECT_EQ(CountForeign(destination[1]), 0);
}

TEST_P(TransportContractTest, AnnouncingOtherNumbersIsDataLoss) {
  Blocks destination(2, 100);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  EXPECT_EQ(b_->incoming->Announce(id, 1, 100).code(), StatusCode::kDataLoss);
  EXPECT_EQ(ended.Wait().value().status.code(), StatusCode::kDataLoss);
  EXPECT_EQ(b_->incoming->Announce(id, 2, 200).code(), StatusCode::kNotFound);
  EXPECT_EQ(ended.times(), 1);
}

TEST_P(TransportContractTest, SilentTransferEndsAtItsDeadlineAndLeavesTheLink) {
  Blocks source(1, 100), destination(1, 100);
  Promised<IncomingResult> stalled;
  const absl::Time start = absl::Now();
  const TransferId id = Expect(*a_, *b_, destination, stalled, absl::Milliseconds(100));
  EXPECT_EQ(stalled.Wait().value().status.code(), StatusCode::kAborted);
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(100));
  // Too late now.
  EXPECT_EQ(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, id, 0, 100), source[0]).code(),
            StatusCode::kAborted);
  EXPECT_EQ(destination.Foreign(), 0);
  // No receive had started: nothing was fenced, the link still works.
  EXPECT_EQ(b_->transport->stats().fences, 0u);
  IncomingSpec spec = SpecFor(RandomId(), a_->epoch, destination);
  spec.total_timeout = absl::Milliseconds(100);
  Promised<IncomingResult> late;
  ASSERT_TRUE(b_->incoming->Expect(spec, [late](IncomingResult r) { late.Set(r); }).ok());
  EXPECT_TRUE(
      a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, spec.transfer_id, 0, 100), source[0]).ok());
  EXPECT_EQ(late.Wait().value().status.code(), StatusCode::kAborted);  // never announced
}

TEST_P(TransportContractTest, ASlowSenderIsWaitedForWhileItsHeartbeatsCome) {
  constexpr absl::Duration kStall = absl::Milliseconds(500);
  Blocks source(1, 3000), destination(1, 3000);
  source.Fill(9);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended, kStall);
  const auto outgoing = StartOutgoingTransfer(a_->transport.get(), b_->epoch, id, /*attempt=*/1);
  const absl::Time start = absl::Now();
  while (absl::Now() - start < 3 * kStall) {
    outgoing->SendHeartbeat();
    ASSERT_FALSE(ended.Wait(kStall / 20).has_value()) << ended.Wait()->status;
  }
  outgoing->SendBlock(0, source[0]);
  Promised<OutgoingResult> drained;
  outgoing->Finish([drained](OutgoingResult result) { drained.Set(std::move(result)); });
  const OutgoingResult sent = drained.Wait().value();
  EXPECT_TRUE(sent.status.ok()) << sent.status;
  EXPECT_EQ(sent.blocks, 1);
  EXPECT_EQ(sent.bytes, 3000u);
  outgoing->SendHeartbeat();  // too late, and harmless
  EXPECT_TRUE(b_->incoming->Announce(id, sent.blocks, sent.bytes).ok());
  EXPECT_TRUE(ended.Wait().value().status.ok());
  EXPECT_TRUE(destination.HavePattern(9));
}

TEST_P(TransportContractTest, AHeartbeatSpeaksForItsOwnTransferOnly) {
  Blocks destination(1, 100);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended, absl::Milliseconds(300));
  MessageHeader stale = a_->HeaderTo(*b_, id, 0, 0);
  stale.kind = MessageKind::kHeartbeat;
  stale.attempt = 7;
  MessageHeader other = stale;
  other.attempt = 1;
  other.transfer_id = RandomId();
  MessageHeader full = stale;
  full.attempt = 1;
  full.length = 100;
  std::vector<std::byte> bytes(100);
  const absl::Time start = absl::Now();
  while (!ended.Wait(absl::Milliseconds(10)).has_value()) {
    ASSERT_LT(absl::Now() - start, absl::Seconds(20));
    (void)a_->SendAndWait(b_->epoch, stale, {});
    (void)a_->SendAndWait(b_->epoch, other, {});
    (void)a_->SendAndWait(b_->epoch, full, bytes);
  }
  EXPECT_EQ(ended.Wait()->status.code(), StatusCode::kAborted);
  EXPECT_EQ(destination.Foreign(), 0);
}

TEST_P(TransportContractTest, AbortedTransferWritesNothingAfterItsEnd) {
  constexpr int kRounds = 20;
  int num_cut = 0;
  for (int round = 0; round < kRounds; ++round) {
    Blocks source(24, 1 << 20), destination(24, 1 << 20);
    source.Fill(7);
    const Promised<IncomingResult> ended;
    IncomingSpec spec = SpecFor(RandomId(), a_->epoch, destination);
    const TransferId id = spec.transfer_id;
    ASSERT_TRUE(b_->incoming
                    ->Expect(std::move(spec),
                             [&destination, ended](IncomingResult result) {
                               destination.Poison();  // reused at once
                               ended.Set(std::move(result));
                             })
                    .ok());
    const uint64_t before = b_->transport->received();
    const auto outgoing = StartOutgoingTransfer(a_->transport.get(), b_->epoch, id, 1);
    for (int32_t i = 0; i < source.size(); ++i) outgoing->SendBlock(i, source[i]);
    ASSERT_TRUE(b_->transport->WaitForReceived(before + round % 8));
    EXPECT_TRUE(b_->incoming->Abort(id, absl::CancelledError("client left"), absl::Seconds(1)));
    const auto result = ended.Wait();
    ASSERT_TRUE(result.has_value());
    EXPECT_EQ(result->status.code(), StatusCode::kCancelled);
    Promised<OutgoingResult> drained;
    outgoing->Finish([drained](OutgoingResult r) { drained.Set(r); });
    const auto sent = drained.Wait();
    ASSERT_TRUE(sent.has_value());
    // OK if everything had been accepted before: it says that the source is free, not that it
    // arrived.
    if (!sent->status.ok()) {
      EXPECT_EQ(sent->status.code(), StatusCode::kAborted) << sent->status;
    }
    num_cut += result->blocks < source.size();
    EXPECT_EQ(destination.Foreign(), 0) << "round " << round;
    EXPECT_FALSE(b_->incoming->Abort(id, absl::CancelledError("again"), absl::Seconds(1)));
  }
  EXPECT_EQ(b_->incoming->counts().quarantined, 0);
  EXPECT_GT(num_cut, 0) << "no transfer was aborted midway";
}

TEST_P(TransportContractTest, StoppedSenderDropsItsQueueAndDrains) {
  Blocks source(64, 1 << 20), destination(64, 1 << 20);
  Promised<IncomingResult> ended;
  const TransferId id = Expect(*a_, *b_, destination, ended);
  const auto outgoing = StartOutgoingTransfer(a_->transport.get(), b_->epoch, id, 1);
  for (int32_t i = 0; i < source.size(); ++i) outgoing->SendBlock(i, source[i]);
  Promised<OutgoingResult> drained;
  outgoing->Stop(absl::CancelledError("cancelled"),
                 [drained](OutgoingResult r) { drained.Set(r); });
  outgoing->SendBlock(0, source[0]);  // ignored
  const auto result = drained.Wait();
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->status.code(), StatusCode::kCancelled);
  EXPECT_LE(result->blocks, kSendWindow + 48);
  EXPECT_EQ(outgoing->num_in_flight(), 0);
  EXPECT_TRUE(b_->incoming->Abort(id, absl::CancelledError("cancelled"), absl::Seconds(1)));
  EXPECT_EQ(ended.Wait().value().status.code(), StatusCode::kCancelled);
}

TEST_P(TransportContractTest, FenceEndsThePairAndTheNextConnectWorks) {
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

TEST_P(TransportContractTest, AbortPeerEndsAllItsTransfersOnly) {
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

TEST_P(TransportContractTest, ManyTransfersInBothDirections) {
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

TEST_P(TransportContractTest, CloseEndsEverySendAndTransfer) {
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

TEST_P(TransportContractTest, ConnectNamesWhatIsWrong) {
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

TEST_P(TransportContractTest, BothSidesMayConnectAtTheSameTime) {
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

INSTANTIATE_TEST_SUITE_P(All, TransportContractTest, testing::Values("loopback", "shm", "tcp"),
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
