// What every transport must do, run for each by name: what arrives, what is refused and how a
// transfer ends.  Links are in transport_link_test.cc; the cases that need a process of its own in
// peer_process_test.cc.

#include <atomic>
#include <cstdio>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kv_transfer/contract_fixture.h"

namespace kv_transfer {
namespace {

using absl::StatusCode;

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
  EXPECT_THAT(a_->transport->LinkName(b_->epoch), testing::StartsWith(LinkKindOf(GetParam())));
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
  // A transfer expected from someone else.
  Blocks theirs(1, 3000);
  Promised<IncomingResult> theirs_ended;
  IncomingSpec spec = SpecFor(RandomId(), Epoch::Random(), theirs);
  const TransferId their_id = spec.transfer_id;
  // (Expect also orders our looks at `destination` before what is written next, for TSan.)
  ASSERT_TRUE(
      b_->incoming->Expect(spec, [theirs_ended](IncomingResult r) { theirs_ended.Set(r); }).ok());
  EXPECT_EQ(b_->incoming->Expect(spec, nullptr).code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, their_id, 0, 3000), source[0]).code(),
            StatusCode::kAborted);
  EXPECT_EQ(theirs.Foreign(), 0);
  // A duplicate of an arrived block leaves what arrived first.
  EXPECT_TRUE(a_->SendAndWait(b_->epoch, right, source[0]).ok());
  Blocks other(1, 3000);
  EXPECT_EQ(a_->SendAndWait(b_->epoch, right, other[0]).code(), StatusCode::kAborted);
  // None of it disturbed the transfer.
  EXPECT_EQ(ended.times(), 0);
  EXPECT_TRUE(a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, id, 1, 3000), source[0]).ok());
  EXPECT_TRUE(b_->incoming->Announce(id, 2, 6000).ok());
  EXPECT_TRUE(ended.Wait().value().status.ok());
  EXPECT_TRUE(destination.BlockHasPattern(0, 5));
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
  EXPECT_EQ(destination.BlockForeign(1), 0);
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

INSTANTIATE_TEST_SUITE_P(
    All, TransportContractTest,
    testing::ValuesIn(OfTestMemory({"loopback", "shm", "tcp", "loopback_staged", "shm_staged",
                                    "tcp_staged", "loopback_shared", "shm_shared"})),
    [](const auto& info) { return info.param; });

}  // namespace
}  // namespace kv_transfer
