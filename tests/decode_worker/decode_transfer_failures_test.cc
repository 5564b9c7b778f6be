// Transfers that break, are cancelled or are not what they should be: the request ends with its
// cause, and whatever goes wrong, every block comes back.

#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "status/grpc_status.h"
#include "tests/decode_worker/transfer_fixture.h"

namespace decode_worker {
namespace {

using kv_transfer::LoopbackFault;
using ::testing::HasSubstr;

// Far longer than anything takes that must happen before it.
constexpr absl::Duration kStall = absl::Seconds(1);

TEST_F(DecodeTransferTest, CancelInEveryPhaseGivesEverythingBack) {
  Start();
  // Before the reservation.
  RequestSpec spec = Spec("before", 100, 3000);
  auto sink = harness_->Submit(spec);
  EXPECT_TRUE(scheduler().Cancel(spec.id, "test"));
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(harness_->WaitIdle());
  EXPECT_TRUE(harness_->notices().empty());

  // Reserved, nothing sent.
  spec = Spec("reserved", 100, 3000);
  sink = harness_->Submit(spec);
  ASSERT_TRUE(ReserveAndWait(scheduler(), CallFor(spec)).ok());
  EXPECT_TRUE(WaitFor([](const auto& now) { return now.blocks.reserved == 2; }));
  EXPECT_TRUE(scheduler().Cancel(spec.id, "test"));
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(harness_->WaitIdle());
  ASSERT_EQ(harness_->notices().size(), 1u);
  EXPECT_EQ(harness_->notices()[0].sender, prefill_->epoch());

  // Confirmed and running.
  spec = Spec("running", 101, 3000);
  sink = harness_->Submit(spec);
  ASSERT_TRUE(Push(spec).ok());
  sink->WaitTokens(2);
  EXPECT_TRUE(scheduler().Cancel(spec.id, "test"));
  const absl::Status status = sink->Wait();
  EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kCancelled);
  EXPECT_TRUE(harness_->WaitIdle());
  EXPECT_EQ(harness_->notices().size(), 1u);
}

TEST_F(DecodeTransferTest, BlocksStayInQuarantineWhileAReceiveIsOpen) {
  Start();
  harness_->network()->SetFaults(
      [](const kv_transfer::MessageHeader&) { return LoopbackFault::kDelay; });
  const RequestSpec spec = Spec("r", 200, 5);
  const auto sink = harness_->Submit(spec);
  prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  const auto outgoing = prefill_->Send(decode_epoch(), grant->transfer_id, 1, 0);
  // Fencing a stranger returns when the progress thread has passed every offer made so far.
  ASSERT_TRUE(harness_->runtime().transport->Fence(kv_transfer::Epoch::Random(), kPatience).ok());
  EXPECT_TRUE(scheduler().Cancel(spec.id, "test"));
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(WaitFor(
      [](const auto& now) { return now.blocks.quarantined == 4 && now.blocks.reserved == 0; }));
  std::promise<bool> drained;
  scheduler().AbortTransfer({.request = spec.id, .transfer_id = {}, .sender = prefill_->epoch()},
                            "test", [&](bool landed) { drained.set_value(landed); });
  harness_->network()->ReleaseDelayed();
  EXPECT_TRUE(drained.get_future().get());
}

TEST_F(DecodeTransferTest, StuckReceiveIsFencedAndTheSenderCanComeBack) {
  options_.worker.chunk_stall = kStall;
  Start();
  harness_->network()->SetFaults(
      [](const kv_transfer::MessageHeader&) { return LoopbackFault::kDelay; });
  RequestSpec spec = Spec("stuck", 200, 5);
  const auto stuck = harness_->Submit(spec);
  prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  const auto outgoing = prefill_->Send(decode_epoch(), grant->transfer_id, 1, 0);
  EXPECT_EQ(stuck->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(harness_->WaitIdle());
  kv_transfer::Transport& transport = *harness_->runtime().transport;
  EXPECT_EQ(transport.stats().fences, 1u);
  harness_->network()->SetFaults(nullptr);
  // The news of the lost link must not meet the next one's transfers: let the progress thread pass
  // it.
  ASSERT_TRUE(transport.Fence(kv_transfer::Epoch::Random(), kPatience).ok());

  spec = Spec("again", 200, 5);
  const auto sink = harness_->Submit(spec);
  EXPECT_EQ(ReserveAndWait(scheduler(), CallFor(spec)).status().code(),
            absl::StatusCode::kUnavailable);
  prefill_->Connect(harness_->runtime());
  ASSERT_TRUE(Push(spec).ok());
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
}

TEST_F(DecodeTransferTest, SenderThatStopsInMidTransferAbortsTheRequest) {
  options_.worker.chunk_stall = kStall;
  Start();
  const RequestSpec spec = Spec("r", 200, 5);
  const auto sink = harness_->Submit(spec);
  prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  const auto outgoing = prefill_->Send(decode_epoch(), grant->transfer_id, 1, 0, /*count=*/2);
  const absl::Status status = sink->Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("stalled"));
}

TEST_F(DecodeTransferTest, DroppedBlockIsNeverConfirmed) {
  options_.worker.chunk_stall = kStall;
  Start();
  harness_->network()->SetFaults([](const kv_transfer::MessageHeader& header) {
    return header.index == 1 ? LoopbackFault::kDrop : LoopbackFault::kNone;
  });
  const RequestSpec spec = Spec("r", 200, 5);
  const auto sink = harness_->Submit(spec);
  EXPECT_EQ(Push(spec).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(sink->tokens().empty());
}

TEST_F(DecodeTransferTest, DeadSenderAbortsTheRequest) {
  Start();
  const RequestSpec spec = Spec("r", 200, 5);
  const auto sink = harness_->Submit(spec);
  ASSERT_TRUE(ReserveAndWait(scheduler(), CallFor(spec)).ok());
  harness_->network()->Kill(prefill_->epoch());
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kAborted);
}

TEST_F(DecodeTransferTest, WrongAnnouncementAbortsTheRequest) {
  Start();
  const RequestSpec spec = Spec("r", 200, 5);
  const auto sink = harness_->Submit(spec);
  const std::vector<FirstToken> first = prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  prefill_->SendAll(decode_epoch(), grant->transfer_id, 1, 0);
  ConfirmCall wrong = Announcement(spec, *grant, first);
  --wrong.num_blocks;
  EXPECT_EQ(ConfirmAndWait(scheduler(), wrong).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kAborted);
}

TEST_F(DecodeTransferTest, WrongFirstTokensAbortTheRequest) {
  Start();
  int32_t i = 0;
  for (const std::vector<FirstToken>& wrong : {std::vector<FirstToken>{},
                                               {{.branch = 1, .sample = {}}},
                                               {{.branch = 0, .sample = {.token_id = 50}}}}) {
    const RequestSpec spec = Spec(absl::StrCat("r", i++), 100, 5);
    const auto sink = harness_->Submit(spec);
    const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
    ASSERT_TRUE(grant.ok());
    EXPECT_EQ(ConfirmAndWait(scheduler(), Announcement(spec, *grant, wrong)).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kAborted);
  }
}

TEST_F(DecodeTransferTest, AbortIsAlwaysAnswered) {
  Start();
  const RequestSpec spec = Spec("r", 200, 5);
  const auto abort = [&](const TransferRef& ref) {
    std::promise<bool> landed;
    scheduler().AbortTransfer(ref, "test", [&](bool any) { landed.set_value(any); });
    return landed.get_future().get();
  };
  const TransferRef ref{.request = spec.id, .transfer_id = {}, .sender = prefill_->epoch()};
  EXPECT_FALSE(abort(ref));  // unknown
  const auto sink = harness_->Submit(spec);
  prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  prefill_->SendAll(decode_epoch(), grant->transfer_id, 1, 0);
  EXPECT_TRUE(abort(ref));
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(harness_->notices().empty());  // the sender knows
  EXPECT_FALSE(abort(ref));
}

TEST_F(DecodeTransferTest, StrangersAndOldTransfersChangeNothing) {
  Start();
  const RequestSpec spec = Spec("r", 200, 5);
  const auto sink = harness_->Submit(spec);
  std::vector<FirstToken> first = prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  const kv_transfer::Epoch stranger = kv_transfer::Epoch::Random();
  kv_transfer::TransferId other = grant->transfer_id;
  other[0] ^= 1;
  std::vector<TransferRef> wrong;
  const auto add = [&](worker::RequestId request, std::optional<kv_transfer::TransferId> id,
                       const kv_transfer::Epoch& sender) {
    wrong.push_back({.request = std::move(request), .transfer_id = id, .sender = sender});
  };
  add(spec.id, std::nullopt, stranger);
  add(spec.id, grant->transfer_id, stranger);
  add(spec.id, other, prefill_->epoch());
  add({"r", 7}, grant->transfer_id, prefill_->epoch());
  add({"q", 1}, grant->transfer_id, prefill_->epoch());
  for (const TransferRef& ref : wrong) {
    std::promise<absl::Status> released;
    scheduler().ReleaseTransfer(ref, [&](const absl::Status& s) { released.set_value(s); });
    EXPECT_EQ(released.get_future().get().code(), absl::StatusCode::kNotFound);
    std::promise<bool> landed;
    scheduler().AbortTransfer(ref, "not mine", [&](bool any) { landed.set_value(any); });
    EXPECT_FALSE(landed.get_future().get()) << "answered, though the transfer goes on";
    ConfirmCall confirm = Announcement(spec, *grant, first);
    confirm.request = ref.request;
    confirm.sender = ref.sender;
    confirm.transfer_id = ref.transfer_id.value_or(other);
    EXPECT_EQ(ConfirmAndWait(scheduler(), std::move(confirm)).code(), absl::StatusCode::kNotFound);
    ReserveCall reserve = CallFor(spec);
    reserve.request = ref.request;
    EXPECT_FALSE(ReserveAndWait(scheduler(), reserve).ok());
  }
  prefill_->SendAll(decode_epoch(), grant->transfer_id, 1, 0);
  EXPECT_TRUE(ConfirmAndWait(scheduler(), Announcement(spec, *grant, std::move(first))).ok());
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
}

TEST_F(DecodeTransferTest, DeadlineWhileReceivingEndsAndTellsTheSender) {
  Start();
  RequestSpec spec = Spec("r", 200, 5);
  spec.deadline = Clock::now() + std::chrono::seconds(1);
  const auto sink = harness_->Submit(spec);
  ASSERT_TRUE(ReserveAndWait(scheduler(), CallFor(spec)).ok());
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(harness_->WaitIdle());
  EXPECT_EQ(harness_->notices().size(), 1u);
}

}  // namespace
}  // namespace decode_worker
