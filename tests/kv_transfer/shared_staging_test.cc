// Staging over slots that both sides have mapped (transport_contract_test.cc runs the contract):
// the receiver copies out of the sender's slot, so it is lent until the receiver says that it is
// read.

#include <fstream>

#include "gmock/gmock.h"
#include "tests/kv_transfer/staged_fixture.h"

namespace kv_transfer {
namespace {

using absl::StatusCode;

// Mappings of such slots in this process.
int NumMapped() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("ferry-slots") != line.npos;
  return count;
}

class SharedStagingTest : public StagedFixture {
 protected:
  static constexpr uint16_t kSlots = 4;
  SharedStagingTest() : StagedFixture(kSlots) {}

  // A lost peer's slots are unmapped behind the copies that were started before.
  static void AwaitUnmapping(fakes::HostCopies& copies) {
    Promised<absl::Status> settled;
    copies.Settle([settled](absl::Status status) { settled.Set(std::move(status)); });
    ASSERT_TRUE(settled.Wait().has_value());
  }
};

TEST_F(SharedStagingTest, TheLinkSaysSo) {
  EXPECT_EQ(a_->transport->LinkName(b_->epoch), "loopback+shared");
  EXPECT_EQ(b_->transport->LinkName(a_->epoch), "loopback+shared");
  EXPECT_EQ(NumMapped(), 4) << "two of their own, two of the other";
}

TEST_F(SharedStagingTest, ASlotIsLentUntilItIsRead) {
  b_copies_->Hold();
  Blocks source(3 * kSlots, kSlotBytes), destination(3 * kSlots, kSlotBytes);
  source.Fill(1);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  const TransferId id = Start(source, destination, ended, drained);
  ASSERT_TRUE(b_copies_->WaitForHeld(kSlots));
  EXPECT_FALSE(b_copies_->WaitForHeld(kSlots + 1, kMoment)) << "there are no more slots";
  EXPECT_FALSE(drained.Wait(absl::ZeroDuration()).has_value());
  EXPECT_EQ(destination.Foreign(), 0);
  b_copies_->Release();
  ExpectArrival(*b_, id, destination, 1, ended, drained);
  EXPECT_EQ(a_->transport->stats().bytes_sent, source.bytes());
  EXPECT_EQ(b_->transport->stats().bytes_received, source.bytes());
}

// A page is not reused while a copy to it may still run, though its bytes are the peer's.
TEST_F(SharedStagingTest, FenceStandsOnlyBehindTheLastCopy) {
  b_copies_->Hold();
  Blocks source(2, kSlotBytes), destination(2, kSlotBytes);
  source.Fill(2);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  ASSERT_TRUE(b_copies_->WaitForHeld(2));
  EXPECT_EQ(b_->transport->Fence(a_->epoch, kMoment).code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(drained.Wait().value().status.code(), StatusCode::kUnavailable) << "none was answered";
  EXPECT_EQ(ended.times(), 0) << "its blocks would be reused";
  AwaitUnmapping(*a_copies_);
  EXPECT_EQ(NumMapped(), 3) << "the copies still read the sender's slots";
  b_copies_->Release();
  ASSERT_TRUE(b_->transport->Fence(a_->epoch, absl::Seconds(10)).ok());
  EXPECT_EQ(ended.Wait(absl::ZeroDuration())->status.code(), StatusCode::kAborted);
  destination.Poison();
  ASSERT_TRUE(Connect(*b_, *a_).ok());
  EXPECT_EQ(destination.Foreign(), 0);
}

// Its slots are lent again at once: what the receiver still reads there nobody confirms.
TEST_F(SharedStagingTest, AFencedReceiversSlotsServeTheNextLink) {
  b_copies_->Hold();
  Blocks source(2 * kSlots, kSlotBytes), destination(2 * kSlots, kSlotBytes);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  ASSERT_TRUE(b_copies_->WaitForHeld(kSlots));
  ASSERT_TRUE(a_->transport->Fence(b_->epoch, absl::Seconds(10)).ok());
  EXPECT_EQ(drained.Wait(absl::ZeroDuration())->status.code(), StatusCode::kUnavailable);
  b_copies_->Release();
  EXPECT_EQ(ended.Wait().value().status.code(), StatusCode::kAborted);
  ConnectBoth(*a_, *b_);
  EXPECT_EQ(a_->transport->LinkName(b_->epoch), "loopback+shared");
  source.Fill(3);
  destination.Poison();
  Promised<IncomingResult> again;
  Promised<OutgoingResult> sent;
  const TransferId id = Start(source, destination, again, sent);
  const OutgoingResult result = sent.Wait().value();
  ASSERT_TRUE(result.status.ok()) << result.status;
  ASSERT_TRUE(b_->incoming->Announce(id, result.blocks, result.bytes).ok());
  EXPECT_TRUE(again.Wait().value().status.ok());
  EXPECT_TRUE(destination.HavePattern(3));
}

TEST_F(SharedStagingTest, AReceiverThatStandsStillKeepsNoOtherWaiting) {
  const std::unique_ptr<fakes::HostCopies> c_copies = fakes::CreateHostCopies();
  const std::unique_ptr<Side> c = MakeSide(c_copies.get());
  ConnectBoth(*a_, *c);
  b_copies_->Hold();
  Blocks stuck(kSlots, kSlotBytes), nowhere(kSlots, kSlotBytes);
  Promised<IncomingResult> stuck_ended;
  Promised<OutgoingResult> stuck_drained;
  Start(stuck, nowhere, stuck_ended, stuck_drained);
  ASSERT_TRUE(b_copies_->WaitForHeld(kSlots));
  Blocks source(9, kSlotBytes), destination(9, kSlotBytes);
  source.Fill(4);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  const TransferId id = Start(*a_, *c, source, destination, ended, drained);
  ExpectArrival(*c, id, destination, 4, ended, drained);
  EXPECT_FALSE(stuck_drained.Wait(absl::ZeroDuration()).has_value());
  b_copies_->Release();
  EXPECT_TRUE(stuck_drained.Wait().value().status.ok());
}

TEST_F(SharedStagingTest, ADeadPeersSlotsAreUnmapped) {
  ASSERT_EQ(NumMapped(), 4);
  network_->Kill(a_->epoch);
  ASSERT_TRUE(b_->transport->WaitForLost(1));
  AwaitUnmapping(*b_copies_);
  a_.reset();
  AwaitUnmapping(*a_copies_);
  EXPECT_EQ(NumMapped(), 1);
}

TEST_F(SharedStagingTest, SlotsThatCannotBeOpenedAreDoneWithout) {
  std::vector<LinkAddress> addresses = a_->transport->addresses();
  const std::unique_ptr<Side> c = MakeSide(b_copies_.get());
  for (LinkAddress& address : addresses) address.slots += "0";  // the name of no memory
  ASSERT_TRUE(c->transport->Connect(a_->epoch, addresses, absl::Seconds(10)).ok());
  EXPECT_EQ(c->transport->LinkName(a_->epoch), "loopback+staged");
  Blocks source(20, kSlotBytes), destination(20, kSlotBytes);
  source.Fill(5);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  const TransferId id = Start(*a_, *c, source, destination, ended, drained);
  ExpectArrival(*c, id, destination, 5, ended, drained);
}

TEST_F(SharedStagingTest, ACopyThatFailsFailsItsTransferAndGivesItsSlotBack) {
  b_copies_->Fail(absl::InternalError("the device is gone"));
  Blocks source(2 * kSlots, kSlotBytes), destination(2 * kSlots, kSlotBytes);
  Promised<IncomingResult> ended;
  Promised<OutgoingResult> drained;
  Start(source, destination, ended, drained);
  EXPECT_EQ(ended.Wait().value().status.code(), StatusCode::kAborted);
  EXPECT_TRUE(drained.Wait().has_value());
}

}  // namespace
}  // namespace kv_transfer
