// Prompts whose blocks come from elsewhere: the text must be that of a local prompt, and the calls
// of a prefill worker are answered in words.

#include <atomic>
#include <future>
#include <memory>
#include <random>
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

TEST_F(DecodeTransferTest, TransferredPromptGivesTheTextOfALocalOne) {
  Start();
  for (const int32_t length : {1, 63, 64, 65, 128, 200}) {
    const RequestSpec spec = Spec(absl::StrCat("r", length), length, 100);
    const auto sink = harness_->Submit(spec);
    ASSERT_TRUE(Push(spec).ok()) << length;
    ASSERT_TRUE(sink->Wait().ok());
    ExpectReference(spec, *sink);
    EXPECT_EQ(sink->usage().computed_tokens, 0);
    EXPECT_EQ(sink->usage().kv_bytes_received,
              static_cast<uint64_t>(last_grant_.num_blocks * harness_->runtime().block_bytes()));
  }
}

TEST_F(DecodeTransferTest, BranchesForkFromTheTransferredPrompt) {
  Start();
  for (const int32_t length : {64, 100}) {
    RequestSpec spec = Spec(absl::StrCat("r", length), length, 80);
    spec.num_branches = 4;
    spec.sampling.temperature = 1;
    spec.sampling.seed = 7;
    spec.sampling.frequency_penalty = 0.5;
    const auto sink = harness_->Submit(spec);
    ASSERT_TRUE(Push(spec).ok());
    ASSERT_TRUE(sink->Wait().ok());
    ExpectReference(spec, *sink);
  }
}

TEST_F(DecodeTransferTest, SecondPromptWithTheSamePrefixIsSentOnlyInPart) {
  Start();
  const RequestSpec first = Spec("a", 200, 5);
  const auto a = harness_->Submit(first);
  ASSERT_TRUE(Push(first).ok());
  ASSERT_TRUE(a->Wait().ok());
  EXPECT_EQ(last_grant_.num_blocks, 4);
  RequestSpec second = first;
  second.id.request_id = "b";
  second.tokens.resize(300, 17);
  second.num_prompt_tokens = 300;
  const auto b = harness_->Submit(second);
  ASSERT_TRUE(Push(second).ok());
  ASSERT_TRUE(b->Wait().ok());
  EXPECT_EQ(last_grant_.cached_tokens, 192);
  EXPECT_EQ(last_grant_.num_blocks, 2);
  EXPECT_EQ(b->usage().cached_tokens, 192);
  ExpectReference(second, *b);
}

TEST_F(DecodeTransferTest, FirstTokenMayBeTheLast) {
  Start();
  const RequestSpec one = Spec("one", 70, 1);
  const auto sink = harness_->Submit(one);
  ASSERT_TRUE(Push(one).ok());
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(one, *sink);
  EXPECT_EQ(sink->finish(), FinishReason::kLength);

  RequestSpec stop = Spec("stop", 71, 50);
  stop.sampling.stop_token_ids = {ReferenceTokens(stop.tokens, stop.sampling, 0).front()};
  const auto stopped = harness_->Submit(stop);
  ASSERT_TRUE(Push(stop).ok());
  ASSERT_TRUE(stopped->Wait().ok());
  EXPECT_EQ(stopped->tokens().size(), 1u);
  EXPECT_EQ(stopped->finish(), FinishReason::kStop);
}

TEST_F(DecodeTransferTest, ReserveIsRefusedInWords) {
  Start();
  const RequestSpec spec = Spec("r", 100, 5);
  EXPECT_EQ(ReserveAndWait(scheduler(), CallFor(spec)).status().code(),
            absl::StatusCode::kNotFound);
  const auto sink = harness_->Submit(spec);
  ReserveCall call = CallFor(spec);
  call.num_tokens = 99;
  EXPECT_EQ(ReserveAndWait(scheduler(), call).status().code(), absl::StatusCode::kInvalidArgument);
  call = CallFor(spec);
  call.sender = kv_transfer::Epoch::Random();
  EXPECT_EQ(status::Reason(ReserveAndWait(scheduler(), call).status()), status::kStaleEpoch);
  call = CallFor(spec);
  call.request.attempt = 2;
  EXPECT_EQ(ReserveAndWait(scheduler(), call).status().code(), absl::StatusCode::kNotFound);
  call.request.attempt = 0;
  EXPECT_EQ(status::Reason(ReserveAndWait(scheduler(), call).status()), status::kStaleAttempt);

  RequestSpec local = Spec("local", 100, 3000);
  local.local_prefill = true;
  const auto running = harness_->Submit(local);
  EXPECT_EQ(ReserveAndWait(scheduler(), CallFor(local)).status().code(),
            absl::StatusCode::kInvalidArgument);

  RequestSpec unlinked = Spec("unlinked", 100, 5);
  unlinked.prefill_epoch = kv_transfer::Epoch::Random();
  const auto waits = harness_->Submit(unlinked);
  call = CallFor(unlinked);
  call.sender = unlinked.prefill_epoch;
  const absl::Status no_link = ReserveAndWait(scheduler(), call).status();
  EXPECT_EQ(no_link.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(no_link.message()), HasSubstr("handshake first"));

  ASSERT_TRUE(ReserveAndWait(scheduler(), CallFor(spec)).ok());
  EXPECT_EQ(ReserveAndWait(scheduler(), CallFor(spec)).status().code(),
            absl::StatusCode::kAlreadyExists);
  scheduler().EndAll(absl::CancelledError("test"));
}

TEST_F(DecodeTransferTest, ReserveWaitsForRoomAndThenGivesUp) {
  options_.growth_tokens = 0;
  Start(/*num_blocks=*/4);
  const RequestSpec big = Spec("big", 200, 5);
  const RequestSpec other = Spec("other", 201, 5);
  const auto a = harness_->Submit(big);
  const auto b = harness_->Submit(other);
  const absl::StatusOr<ReserveGrant> first = ReserveAndWait(scheduler(), CallFor(big));
  ASSERT_TRUE(first.ok());
  const absl::Status full = ReserveAndWait(scheduler(), CallFor(other)).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("4 blocks"));
  // One that waits is served when the first has ended.
  std::promise<absl::StatusOr<ReserveGrant>> promise;
  scheduler().Reserve(CallFor(other, kPatience),
                      [&](const absl::StatusOr<ReserveGrant>& grant) { promise.set_value(grant); });
  ASSERT_TRUE(scheduler().Cancel(big.id, "test"));
  const absl::StatusOr<ReserveGrant> second = promise.get_future().get();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->num_blocks, 4);
  scheduler().Cancel(other.id, "test");
}

TEST_F(DecodeTransferTest, ConfirmingTwiceIsOkAndAnUnknownTransferIsNot) {
  Start();
  engine_->Hold();
  const RequestSpec spec = Spec("r", 100, 50);
  const auto sink = harness_->Submit(spec);
  std::vector<FirstToken> first = prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  prefill_->SendAll(decode_epoch(), grant->transfer_id, 1, 0);
  const ConfirmCall call = Announcement(spec, *grant, first);
  ConfirmCall unknown = call;
  unknown.transfer_id[0] ^= 1;
  EXPECT_EQ(ConfirmAndWait(scheduler(), unknown).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(ConfirmAndWait(scheduler(), call).ok());
  std::promise<absl::Status> again;
  scheduler().ConfirmTransfer(call, [&](const absl::Status& status) { again.set_value(status); });
  engine_->Go();
  EXPECT_TRUE(again.get_future().get().ok());
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
}

TEST_F(DecodeTransferTest, ReleasedReservationCanBeMadeAgain) {
  Start();
  const RequestSpec spec = Spec("r", 200, 20);
  const auto sink = harness_->Submit(spec);
  const absl::StatusOr<ReserveGrant> grant = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  std::promise<absl::Status> released;
  scheduler().ReleaseTransfer(
      {.request = spec.id, .transfer_id = grant->transfer_id, .sender = prefill_->epoch()},
      [&](const absl::Status& status) { released.set_value(status); });
  EXPECT_TRUE(released.get_future().get().ok());
  EXPECT_TRUE(
      WaitFor([](const auto& now) { return now.blocks.reserved + now.blocks.quarantined == 0; }));
  ASSERT_TRUE(Push(spec).ok());
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
}

TEST_F(DecodeTransferTest, NewerAttemptWinsOverAnOpenTransfer) {
  Start();
  RequestSpec spec = Spec("r", 200, 40);
  const auto old = harness_->Submit(spec);
  prefill_->Compute(spec);
  const absl::StatusOr<ReserveGrant> stale = ReserveAndWait(scheduler(), CallFor(spec));
  ASSERT_TRUE(stale.ok());
  spec.id.attempt = 2;
  const auto sink = harness_->Submit(spec);
  EXPECT_EQ(status::Reason(old->Wait()), status::kStaleAttempt);
  // Late bytes of the old attempt are refused.
  const kv_transfer::OutgoingResult late =
      prefill_->SendAll(decode_epoch(), stale->transfer_id, 1, 0);
  EXPECT_FALSE(late.status.ok());
  ASSERT_TRUE(Push(spec).ok());
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
}

TEST_F(DecodeTransferTest, MixedHistoriesInATinyPool) {
  options_.growth_tokens = 0;
  Start(/*num_blocks=*/10);
  std::mt19937_64 random(5);
  const auto below = [&](int32_t bound) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(bound));
  };
  harness_->network()->SetFaults(
      [&, count = std::make_shared<std::atomic<int>>(0)](const kv_transfer::MessageHeader&) {
        const int n = ++*count;
        return n % 7 == 0 ? LoopbackFault::kDuplicate : LoopbackFault::kNone;
      });
  std::vector<std::pair<RequestSpec, std::shared_ptr<RecordingSink>>> running;
  for (int32_t i = 0; i < 150; ++i) {
    RequestSpec spec = Spec(absl::StrCat("r", i), 1 + below(400), 1 + below(120));
    spec.num_branches = below(3) == 0 ? 2 : 1;
    spec.sampling.temperature = 1;
    spec.sampling.seed = random();
    spec.local_prefill = below(3) == 0;
    const auto sink = harness_->Submit(spec);
    running.emplace_back(spec, sink);
    if (spec.local_prefill) continue;
    const int32_t how = below(8);
    if (how == 0) {  // gone before the reservation
      scheduler().Cancel(spec.id, "test");
      continue;
    }
    if (how <= 2) {  // gone with blocks on their way
      prefill_->Compute(spec);
      const absl::StatusOr<ReserveGrant> grant =
          ReserveAndWait(scheduler(), CallFor(spec, kPatience));
      ASSERT_TRUE(grant.ok()) << grant.status();
      const auto outgoing =
          prefill_->Send(decode_epoch(), grant->transfer_id, 1, grant->cached_tokens / kBlockSize);
      scheduler().Cancel(spec.id, "test");
      std::promise<void> drained;
      outgoing->Finish([&](const kv_transfer::OutgoingResult&) { drained.set_value(); });
      drained.get_future().wait();
      continue;
    }
    const absl::Status pushed = Push(spec, kPatience);
    EXPECT_TRUE(pushed.ok()) << pushed;
  }
  int32_t completed = 0;
  for (const auto& [spec, sink] : running) {
    const absl::Status status = sink->Wait();
    if (status.ok()) {
      ExpectReference(spec, *sink);
      ++completed;
    } else {
      EXPECT_TRUE(status.code() == absl::StatusCode::kCancelled ||
                  status.code() == absl::StatusCode::kAborted)
          << status;
    }
  }
  EXPECT_GT(completed, 80);
}

}  // namespace
}  // namespace decode_worker
