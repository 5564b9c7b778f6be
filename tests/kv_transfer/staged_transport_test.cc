// What staging adds to the contract (transport_contract_test.cc runs it whole): a device's copies
// count as the transport's own reads and writes.

#include "kv_transfer/staged_transport.h"

#include "tests/kv_transfer/staged_fixture.h"

namespace kv_transfer {
namespace {

using absl::StatusCode;

class StagedTransportTest : public StagedFixture {};

TEST_F(StagedTransportTest, TheLinkSaysSo) {
  EXPECT_EQ(a_->transport->LinkName(b_->epoch), "loopback+staged");
  EXPECT_EQ(a_->transport->LinkName(Epoch::Random()), "");
}

TEST_F(StagedTransportTest, ABlockHasNotArrivedBeforeItIsOnTheDevice) {
  b_copies_->Hold();
  Blocks source(3, kSlotBytes), destination(3, kSlotBytes);
  source.Fill(1);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  const TransferId id = Start(source, destination, ended, drained);
  ASSERT_TRUE(b_copies_->WaitForHeld(3));
  // The sender's memory is read no more.
  EXPECT_TRUE(drained.Wait().value().status.ok());
  ASSERT_TRUE(b_->incoming->Announce(id, 3, 3 * kSlotBytes).ok());
  EXPECT_EQ(ended.times(), 0);
  EXPECT_EQ(destination.Foreign(), 0);
  b_copies_->Release();
  EXPECT_TRUE(ended.Wait().value().status.ok());
  EXPECT_TRUE(destination.HavePattern(1));
}

// A page is not reused while a copy to it may still run.
TEST_F(StagedTransportTest, FenceStandsOnlyBehindTheLastCopy) {
  b_copies_->Hold();
  Blocks source(2, kSlotBytes), destination(2, kSlotBytes);
  source.Fill(2);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  ASSERT_TRUE(b_copies_->WaitForHeld(2));
  EXPECT_EQ(b_->transport->Fence(a_->epoch, kMoment).code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ended.times(), 0) << "its blocks would be reused";
  EXPECT_FALSE(b_->transport->WaitForLost(1, absl::ZeroDuration()));
  b_copies_->Release();
  ASSERT_TRUE(b_->transport->Fence(a_->epoch, absl::Seconds(10)).ok());
  ASSERT_TRUE(ended.Wait(absl::ZeroDuration()).has_value()) << "OnPeerLost comes before OK";
  EXPECT_EQ(ended.Wait()->status.code(), StatusCode::kAborted);
  destination.Poison();
  EXPECT_TRUE(Connect(*b_, *a_).ok());
  EXPECT_EQ(destination.Foreign(), 0);
}

// Nor while a copy from it may.
TEST_F(StagedTransportTest, ASendEndsOnlyBehindItsCopyAndThenGoesNowhere) {
  a_copies_->Hold();
  Blocks source(40, kSlotBytes), destination(40, kSlotBytes);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  ASSERT_TRUE(a_copies_->WaitForHeld(kSendWindow));
  ASSERT_TRUE(a_->transport->Fence(b_->epoch, absl::Seconds(10)).ok());
  EXPECT_FALSE(drained.Wait(absl::ZeroDuration()).has_value()) << "its blocks would be reused";
  // A later link has nothing of it.
  ASSERT_TRUE(Connect(*a_, *b_).ok());
  ASSERT_TRUE(Connect(*b_, *a_).ok());
  a_copies_->Release();
  EXPECT_EQ(drained.Wait().value().status.code(), StatusCode::kUnavailable);
  EXPECT_EQ(b_->transport->stats().messages_received, 0u);
  EXPECT_EQ(b_->transport->stats().messages_refused, 0u);
  EXPECT_EQ(destination.Foreign(), 0);
}

TEST_F(StagedTransportTest, ADeadPeersLinkIsLostBehindTheLastCopy) {
  b_copies_->Hold();
  Blocks source(2, kSlotBytes), destination(2, kSlotBytes);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  ASSERT_TRUE(b_copies_->WaitForHeld(2));
  network_->Kill(a_->epoch);
  EXPECT_EQ(b_->transport->Fence(a_->epoch, kMoment).code(), StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(b_->transport->WaitForLost(1, absl::ZeroDuration()));
  EXPECT_EQ(ended.times(), 0);
  b_copies_->Release();
  EXPECT_TRUE(b_->transport->WaitForLost(1));
  EXPECT_EQ(ended.Wait().value().status.code(), StatusCode::kAborted);
}

TEST_F(StagedTransportTest, ACopyToTheDeviceThatFailsFailsItsTransfer) {
  b_copies_->Fail(absl::InternalError("the device is gone"));
  Blocks source(2, kSlotBytes), destination(2, kSlotBytes);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  EXPECT_EQ(ended.Wait().value().status.code(), StatusCode::kAborted);
  EXPECT_TRUE(drained.Wait().has_value());
}

TEST_F(StagedTransportTest, ACopyFromTheDeviceThatFailsFailsItsSend) {
  a_copies_->Fail(absl::InternalError("the device is gone"));
  Blocks source(2, kSlotBytes), destination(2, kSlotBytes);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  EXPECT_EQ(drained.Wait().value().status.code(), StatusCode::kInternal);
  EXPECT_EQ(b_->transport->stats().messages_received, 0u);
}

TEST_F(StagedTransportTest, AMessageAboveASlotIsNotSent) {
  Blocks source(1, kSlotBytes + 1);
  const absl::Status status =
      a_->SendAndWait(b_->epoch, a_->HeaderTo(*b_, RandomId(), 0, kSlotBytes + 1), source[0]);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()), "message of 5001 bytes, slots have 5000");
}

// Many more messages than slots, in both directions.
TEST_F(StagedTransportTest, SlotsAreUsedAgain) {
  Blocks source(10 * kStagingSlotsPerPeer, kSlotBytes);
  Blocks destination(10 * kStagingSlotsPerPeer, kSlotBytes);
  source.Fill(3);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  const TransferId id = Start(source, destination, ended, drained);
  ExpectArrival(*b_, id, destination, 3, ended, drained);
}

}  // namespace
}  // namespace kv_transfer
