// A decode worker of a model that keeps a state per sequence: local prompts, follow-up turns,
// branches, transfers, and a slot pool that is always too small.  The text of every request is that
// of the request alone, and every slot comes back.

#include <algorithm>
#include <future>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "decode_worker/decode_scheduler.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/decode_worker/harness.h"
#include "tests/fakes/rolling_network.h"

namespace decode_worker {
namespace {

using kv_transfer::LoopbackFault;
using kv_transfer::MessageHeader;
using kv_transfer::MessageKind;
using ::testing::HasSubstr;

constexpr int32_t kBlockSize = 128;

class DecodeStateTest : public ::testing::Test {
 protected:
  DecodeStateTest() {
    options_.worker.chunk_stall = kPatience;
    options_.chunk_tokens = 200;
    network_.block_size = kBlockSize;
    network_.limits.max_tokens = 1024;
    network_.limits.max_seqs = 16;
  }

  void Start(const Room& room) {
    harness_ =
        std::make_unique<SchedulerHarness>(options_, fakes::CreateRollingEngine(network_), room);
    prefill_ = std::make_unique<FakePrefill>(fakes::CreateRollingEngine(network_),
                                             Room{.num_blocks = 32, .num_state_slots = 2},
                                             harness_->network());
    prefill_->Connect(harness_->runtime());
  }
  void TearDown() override {
    if (!HasFailure()) {
      EXPECT_TRUE(harness_->WaitIdle());
    }
    prefill_.reset();
    harness_.reset();
  }

  RequestSpec Spec(const std::string& id, std::vector<int32_t> tokens, int32_t max_tokens) {
    RequestSpec spec;
    spec.id = {.request_id = id, .attempt = 1};
    spec.num_prompt_tokens = static_cast<int32_t>(tokens.size());
    spec.tokens = std::move(tokens);
    spec.sampling.temperature = 0;
    spec.sampling.max_tokens = max_tokens;
    spec.cache_namespace = "test";
    spec.local_prefill = true;
    return spec;
  }
  RequestSpec Transferred(const std::string& id, std::vector<int32_t> tokens, int32_t max_tokens) {
    RequestSpec spec = Spec(id, std::move(tokens), max_tokens);
    spec.local_prefill = false;
    spec.prefill_epoch = prefill_->epoch();
    return spec;
  }
  std::vector<int32_t> Reference(const RequestSpec& spec, int32_t branch = 0) {
    return fakes::RollingReference(network_, spec.tokens, spec.sampling, branch);
  }
  void ExpectReference(const RequestSpec& spec, const RecordingSink& sink) {
    for (int32_t i = 0; i < spec.num_branches; ++i) {
      EXPECT_EQ(sink.tokens(i), Reference(spec, i)) << spec.id.request_id << " branch " << i;
    }
  }
  // Runs it whole; returns the prompt tokens that the worker had.
  int32_t Run(const RequestSpec& spec) {
    const auto sink = harness_->Submit(spec);
    if (!spec.local_prefill) {
      EXPECT_TRUE(Push(spec).ok());
    }
    EXPECT_TRUE(sink->Wait().ok());
    ExpectReference(spec, *sink);
    answer_ = sink->tokens();
    return sink->usage().cached_tokens;
  }
  // The tokens of a prompt and its answer, and one more: the next turn's prompt.
  std::vector<int32_t> NextTurn(const RequestSpec& spec) {
    std::vector<int32_t> tokens = spec.tokens;
    tokens.insert(tokens.end(), answer_.begin(), answer_.end());
    tokens.push_back(7);
    return tokens;
  }

  ReserveCall CallFor(const RequestSpec& spec, absl::Duration wait = absl::ZeroDuration()) {
    return {.request = spec.id,
            .sender = prefill_->epoch(),
            .num_tokens = static_cast<int32_t>(spec.tokens.size()),
            .wait = wait};
  }
  uint64_t BytesOf(const ReserveGrant& grant) {
    return static_cast<uint64_t>(grant.num_blocks * prefill_->runtime().block_bytes() +
                                 network_.state_slot_bytes);
  }
  ConfirmCall Announcement(const RequestSpec& spec, const ReserveGrant& grant,
                           std::vector<FirstToken> first_tokens) {
    return {.request = spec.id,
            .transfer_id = grant.transfer_id,
            .sender = prefill_->epoch(),
            .num_blocks = grant.num_blocks,
            .num_bytes = BytesOf(grant),
            .first_tokens = std::move(first_tokens)};
  }
  // The whole of P's part.
  absl::Status Push(const RequestSpec& spec, absl::Duration wait = kPatience) {
    std::vector<FirstToken> first = prefill_->Compute(spec);
    const absl::StatusOr<ReserveGrant> grant =
        ReserveAndWait(harness_->scheduler(), CallFor(spec, wait));
    if (!grant.ok()) return grant.status();
    last_grant_ = *grant;
    prefill_->SendAll(harness_->runtime().epoch, grant->transfer_id, spec.id.attempt,
                      grant->cached_tokens / kBlockSize);
    return ConfirmAndWait(harness_->scheduler(), Announcement(spec, *grant, std::move(first)));
  }
  bool WaitFor(const std::function<bool(const DecodeScheduler::Snapshot&)>& wanted) {
    return harness_->scheduler().WaitForSnapshot(wanted, kPatience);
  }

  DecodeOptions options_;
  fakes::RollingOptions network_;
  std::unique_ptr<SchedulerHarness> harness_;
  std::unique_ptr<FakePrefill> prefill_;
  ReserveGrant last_grant_;
  std::vector<int32_t> answer_;
};

TEST_F(DecodeStateTest, LocalPromptsOfEveryLengthGiveTheirText) {
  Start({.num_blocks = 64, .num_state_slots = 8});
  for (const int32_t length : {1, 127, 128, 129, 255, 256, 257, 500}) {
    EXPECT_EQ(Run(Spec(absl::StrCat("r", length), RandomTokens(length, 1 + length), 140)), 0);
  }
}

TEST_F(DecodeStateTest, FollowUpTurnsGoOnBehindTheNewestBoundary) {
  Start({.num_blocks = 64, .num_state_slots = 8});
  RequestSpec turn = Spec("turn0", RandomTokens(100, 5), 90);
  EXPECT_EQ(Run(turn), 0);
  for (int i = 1; i < 6; ++i) {
    const auto written = static_cast<int32_t>(turn.tokens.size() + answer_.size()) - 1;
    turn = Spec(absl::StrCat("turn", i), NextTurn(turn), 90);
    EXPECT_EQ(Run(turn), written / kBlockSize * kBlockSize) << i;
  }
}

TEST_F(DecodeStateTest, APromptGoesOnBehindTheLastSnapshotThatItShares) {
  Start({.num_blocks = 64, .num_state_slots = 16, .snapshot_blocks = 2});
  const std::vector<int32_t> shared = RandomTokens(700, 9);
  Run(Spec("first", shared, 1));
  // Snapshots behind tokens 256, 512 and 640.
  const auto prefix = [&](int32_t length, int32_t salt) {
    std::vector<int32_t> tokens(shared.begin(), shared.begin() + length);
    const std::vector<int32_t> more = RandomTokens(20, static_cast<uint64_t>(salt));
    tokens.insert(tokens.end(), more.begin(), more.end());
    return tokens;
  };
  EXPECT_EQ(Run(Spec("a", shared, 5)), 640);
  EXPECT_EQ(Run(Spec("b", prefix(650, 1), 5)), 640);
  EXPECT_EQ(Run(Spec("c", prefix(600, 2), 5)), 512);
  EXPECT_EQ(Run(Spec("d", prefix(440, 3), 5)), 256);  // leaves a snapshot behind token 384
  EXPECT_EQ(Run(Spec("e", prefix(390, 4), 5)), 384);
  EXPECT_EQ(Run(Spec("f", prefix(200, 5), 5)), 0);
}

TEST_F(DecodeStateTest, BranchesGoOnFromACopyOfTheTrunksState) {
  Start({.num_blocks = 64, .num_state_slots = 6});
  for (const int32_t length : {1, 127, 128, 129, 300}) {
    for (const bool local : {true, false}) {
      const std::string id = absl::StrCat(local ? "local" : "pushed", length);
      const std::vector<int32_t> tokens = RandomTokens(length, 3 + length);
      RequestSpec spec = local ? Spec(id, tokens, 150) : Transferred(id, tokens, 150);
      spec.num_branches = 5;
      spec.sampling.temperature = 1;
      spec.sampling.seed = 42;
      spec.sampling.stop_token_ids = {9};
      Run(spec);
    }
  }
}

TEST_F(DecodeStateTest, AForkThatWaitsForABlockKeepsTheStateAtItsBirth) {
  // One block for the prompt, one for whichever branch comes first: the trunk runs to its end while
  // the fork waits.
  Start({.num_blocks = 2, .num_state_slots = 2});
  for (const bool local : {true, false}) {
    const std::vector<int32_t> tokens = RandomTokens(kBlockSize, 8 + local);
    RequestSpec spec = local ? Spec("local", tokens, 100) : Transferred("pushed", tokens, 100);
    spec.num_branches = 2;
    spec.sampling.temperature = 1;
    Run(spec);
  }
}

TEST_F(DecodeStateTest, ATransferredPromptGivesTheTextOfALocalOne) {
  Start({.num_blocks = 64, .num_state_slots = 8});
  for (const int32_t length : {1, 127, 128, 129, 256, 400}) {
    const RequestSpec spec =
        Transferred(absl::StrCat("r", length), RandomTokens(length, length), 200);
    const auto sink = harness_->Submit(spec);
    ASSERT_TRUE(Push(spec).ok()) << length;
    ASSERT_TRUE(sink->Wait().ok());
    ExpectReference(spec, *sink);
    EXPECT_TRUE(last_grant_.state_slot);
    EXPECT_EQ(sink->usage().kv_bytes_received, BytesOf(last_grant_));
  }
}

TEST_F(DecodeStateTest, ATransferReusesBlocksWithoutASnapshotAndTheNextTurnIsLocal) {
  Start({.num_blocks = 64, .num_state_slots = 8});
  const std::vector<int32_t> tokens = RandomTokens(400, 11);
  EXPECT_EQ(Run(Transferred("a", tokens, 5)), 0);
  // Its blocks came without a snapshot: no use to a local prompt, all use to a transfer.
  EXPECT_EQ(Run(Transferred("b", tokens, 5)), 384);
  EXPECT_EQ(last_grant_.num_blocks, 1);
  EXPECT_EQ(Run(Spec("c", tokens, 5)), 0);
  RequestSpec turn = Transferred("d", RandomTokens(500, 12), 100);
  EXPECT_EQ(Run(turn), 0);
  EXPECT_EQ(Run(Spec("e", NextTurn(turn), 20)), 512);  // decoded here, so with a snapshot
}

TEST_F(DecodeStateTest, SlotsThatRunOutDelayAndFailNothing) {
  Start({.num_blocks = 64, .num_state_slots = 2});
  std::vector<RequestSpec> specs;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 8; ++i) {
    RequestSpec spec = Spec(absl::StrCat("r", i), RandomTokens(150, i % 3), 100);
    spec.num_branches = i % 4 == 1 ? 2 : 1;
    spec.sampling.temperature = 1;
    spec.sampling.seed = static_cast<uint64_t>(i);
    specs.push_back(spec);
    sinks.push_back(harness_->Submit(spec));
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    ASSERT_TRUE(sinks[i]->Wait().ok());
    ExpectReference(specs[i], *sinks[i]);
  }
}

TEST_F(DecodeStateTest, AReservationWaitsForASlot) {
  Start({.num_blocks = 64, .num_state_slots = 1});
  const RequestSpec running = Spec("running", RandomTokens(50, 1), 4000);
  const auto sink = harness_->Submit(running);
  sink->WaitTokens(1);
  const RequestSpec waiting = Transferred("waiting", RandomTokens(60, 2), 5);
  const auto waiting_sink = harness_->Submit(waiting);
  const absl::Status no_room = Push(waiting, absl::ZeroDuration());
  EXPECT_EQ(no_room.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(no_room.message()), HasSubstr("0 state slots"));
  // With patience it is taken when the running one has ended.
  std::promise<absl::StatusOr<ReserveGrant>> granted;
  harness_->scheduler().Reserve(CallFor(waiting, kPatience),
                                [&](const auto& grant) { granted.set_value(grant); });
  EXPECT_TRUE(harness_->scheduler().Cancel(running.id, "test"));
  const absl::StatusOr<ReserveGrant> grant = granted.get_future().get();
  ASSERT_TRUE(grant.ok()) << grant.status();
  const std::vector<FirstToken> first = prefill_->Compute(waiting);
  prefill_->SendAll(harness_->runtime().epoch, grant->transfer_id, 1, 0);
  EXPECT_TRUE(ConfirmAndWait(harness_->scheduler(), Announcement(waiting, *grant, first)).ok());
  EXPECT_TRUE(waiting_sink->Wait().ok());
  ExpectReference(waiting, *waiting_sink);
}

TEST_F(DecodeStateTest, NothingIsConfirmedBeforeTheSlotHasArrived) {
  Start({.num_blocks = 64, .num_state_slots = 4});
  harness_->network()->SetFaults([](const MessageHeader& header) {
    return header.kind == MessageKind::kStateSlot ? LoopbackFault::kDelay : LoopbackFault::kNone;
  });
  const RequestSpec spec = Transferred("r", RandomTokens(300, 3), 20);
  const auto sink = harness_->Submit(spec);
  std::vector<FirstToken> first = prefill_->Compute(spec);
  const auto grant = ReserveAndWait(harness_->scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  const auto outgoing = prefill_->Send(harness_->runtime().epoch, grant->transfer_id, 1, 0);
  std::promise<absl::Status> confirmed;
  harness_->scheduler().ConfirmTransfer(Announcement(spec, *grant, std::move(first)),
                                        [&](const absl::Status& s) { confirmed.set_value(s); });
  auto confirmation = confirmed.get_future();
  // The progress thread has passed every offer; all blocks are there.
  ASSERT_TRUE(harness_->runtime().transport->Fence(kv_transfer::Epoch::Random(), kPatience).ok());
  EXPECT_TRUE(WaitFor([](const auto& now) { return now.state_slots.reserved == 1; }));
  EXPECT_EQ(confirmation.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_TRUE(sink->tokens().empty());
  harness_->network()->ReleaseDelayed();
  EXPECT_TRUE(confirmation.get().ok());
  ASSERT_TRUE(sink->Wait().ok());
  ExpectReference(spec, *sink);
}

TEST_F(DecodeStateTest, ALostSlotIsNeverConfirmed) {
  options_.worker.chunk_stall = absl::Milliseconds(200);
  Start({.num_blocks = 64, .num_state_slots = 4});
  harness_->network()->SetFaults([](const MessageHeader& header) {
    return header.kind == MessageKind::kStateSlot ? LoopbackFault::kDrop : LoopbackFault::kNone;
  });
  const RequestSpec spec = Transferred("r", RandomTokens(300, 3), 20);
  const auto sink = harness_->Submit(spec);
  EXPECT_EQ(Push(spec).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(sink->tokens().empty());
}

TEST_F(DecodeStateTest, ASlotStaysInQuarantineWhileItsReceiveIsOpen) {
  // chunk_stall is also the grace before a fence.
  Start({.num_blocks = 64, .num_state_slots = 1});
  harness_->network()->SetFaults([](const MessageHeader& header) {
    return header.kind == MessageKind::kStateSlot ? LoopbackFault::kDelay : LoopbackFault::kNone;
  });
  const RequestSpec spec = Transferred("r", RandomTokens(300, 3), 20);
  const auto sink = harness_->Submit(spec);
  prefill_->Compute(spec);
  const auto grant = ReserveAndWait(harness_->scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  const auto outgoing = prefill_->Send(harness_->runtime().epoch, grant->transfer_id, 1, 0);
  ASSERT_TRUE(harness_->runtime().transport->Fence(kv_transfer::Epoch::Random(), kPatience).ok());
  EXPECT_TRUE(harness_->scheduler().Cancel(spec.id, "test"));
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(WaitFor([](const auto& now) {
    return now.state_slots.quarantined == 1 && now.state_slots.reserved == 0;
  }));
  // The only slot: nobody else gets it meanwhile.
  const RequestSpec local = Spec("local", RandomTokens(20, 4), 5);
  const auto waiting = harness_->Submit(local);
  waiting->WaitAccepted();
  EXPECT_EQ(harness_->scheduler().snapshot().state_slots.active, 0);
  EXPECT_TRUE(waiting->tokens().empty());
  harness_->network()->ReleaseDelayed();
  ASSERT_TRUE(waiting->Wait().ok());
  ExpectReference(local, *waiting);
}

TEST_F(DecodeStateTest, AStuckSlotIsFencedAndComesBack) {
  options_.worker.chunk_stall = absl::Milliseconds(200);
  Start({.num_blocks = 64, .num_state_slots = 1});
  harness_->network()->SetFaults([](const MessageHeader& header) {
    return header.kind == MessageKind::kStateSlot ? LoopbackFault::kDelay : LoopbackFault::kNone;
  });
  const RequestSpec spec = Transferred("stuck", RandomTokens(300, 3), 20);
  const auto sink = harness_->Submit(spec);
  prefill_->Compute(spec);
  const auto grant = ReserveAndWait(harness_->scheduler(), CallFor(spec));
  ASSERT_TRUE(grant.ok());
  const auto outgoing = prefill_->Send(harness_->runtime().epoch, grant->transfer_id, 1, 0);
  EXPECT_EQ(sink->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(harness_->WaitIdle());
  EXPECT_EQ(harness_->runtime().transport->stats().fences, 1u);
}

// Mixed lengths, branches, shared prefixes, turns, transfers and cancels over a pool in which both
// blocks and slots are always short.
TEST_F(DecodeStateTest, MixedRequestsEqualEachAloneHoweverFewSlotsThereAre) {
  options_.growth_tokens = 0;
  for (const int32_t slots : {1, 2, 3, 5, 9, 40}) {
    Start({.num_blocks = 14, .num_state_slots = slots, .snapshot_blocks = 2});
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE(testing::Message() << slots << " slots, seed " << seed);
    std::mt19937_64 random(seed);
    const auto below = [&](int32_t bound) {
      return static_cast<int32_t>(random() % static_cast<uint64_t>(bound));
    };
    const std::vector<int32_t> shared = RandomTokens(700, 99);
    struct Running {
      RequestSpec spec;
      std::shared_ptr<RecordingSink> sink;
      bool cancelled;
    };
    std::vector<Running> running;
    if (slots > 1) {
      // Two branches that begin together and whose blocks do not both fit when they have grown, 8
      // of 14 each: the younger one, or somebody younger, is preempted whatever else there is.
      RequestSpec growing =
          Spec(absl::StrCat("s", slots, "growing"), RandomTokens(100, random()), 900);
      growing.num_branches = 2;
      growing.sampling.temperature = 1.0f;
      growing.sampling.seed = random();
      running.push_back({growing, harness_->Submit(growing), false});
    }
    for (int32_t i = 0; i < 60; ++i) {
      const int32_t max_tokens = 1 + below(below(3) == 0 ? 200 : 30);
      const int32_t length = 1 + below(700 - max_tokens);
      std::vector<int32_t> tokens(shared.begin(), shared.begin() + length);
      for (int32_t t = below(2) == 0 ? length : below(length); t < length; ++t) {
        tokens[t] = below(50);
      }
      const bool push = below(4) == 0;
      const std::string id = absl::StrCat("s", slots, "r", i);
      RequestSpec spec = push ? Transferred(id, std::move(tokens), max_tokens)
                              : Spec(id, std::move(tokens), max_tokens);
      spec.num_branches = below(4) == 0 ? 1 + below(std::min(slots, 4)) : 1;
      spec.sampling.temperature = below(2) == 0 ? 0.0f : 1.0f;
      spec.sampling.seed = random();
      if (below(2) == 0) spec.sampling.stop_token_ids = {below(50), below(50)};
      const auto sink = harness_->Submit(spec);
      const uint64_t submission = harness_->last_submission();
      running.push_back({spec, sink, below(6) == 0});
      if (push) {
        EXPECT_TRUE(Push(spec).ok()) << id;
      }
      if (running.back().cancelled) {
        harness_->scheduler().CancelSubmission(submission, absl::CancelledError("test"));
      }
    }
    for (const Running& one : running) {
      const absl::Status status = one.sink->Wait();
      if (status.ok()) {
        ExpectReference(one.spec, *one.sink);
        continue;
      }
      EXPECT_TRUE(one.cancelled) << one.spec.id.request_id << ": " << status;
      for (int32_t b = 0; b < one.spec.num_branches; ++b) {
        const std::vector<int32_t> all = Reference(one.spec, b);
        const std::vector<int32_t> got = one.sink->tokens(b);
        ASSERT_LE(got.size(), all.size());
        EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin())) << one.spec.id.request_id;
      }
    }
    EXPECT_TRUE(harness_->WaitIdle());
    if (slots > 1) {
      EXPECT_GT(harness_->scheduler().snapshot().batch.preemptions, 0);
    }
    prefill_.reset();
    harness_.reset();
  }
  Start({.num_blocks = 14, .num_state_slots = 2});  // for TearDown
}

TEST_F(DecodeStateTest, ExactlyWhatIsToldIsReused) {
  Start({.num_blocks = 12, .num_state_slots = 5, .snapshot_blocks = 2});
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const block_hash::BlockHasher& hasher = *harness_->runtime().hasher;
  const std::vector<int32_t> shared = RandomTokens(900, 77);
  uint64_t seq = 1;
  std::map<block_hash::BlockHash, bool> told;  // whether a prompt can go on behind it
  int32_t reused = 0;
  for (int32_t i = 0; i < 80; ++i) {
    const auto length = static_cast<int32_t>(2 + random() % 898);
    std::vector<int32_t> tokens(shared.begin(), shared.begin() + length);
    if (random() % 2 == 0) tokens[random() % tokens.size()] = static_cast<int32_t>(random() % 97);
    const auto max_tokens = static_cast<int32_t>(1 + random() % 150);
    const RequestSpec spec = random() % 4 == 0
                                 ? Transferred(absl::StrCat("r", i), tokens, max_tokens)
                                 : Spec(absl::StrCat("r", i), tokens, max_tokens);
    ASSERT_TRUE(harness_->WaitIdle());
    for (const worker::KvEventLog::Frame& frame : harness_->events().Read(seq)) {
      seq = frame.seq + 1;
      for (const engine::BlockEvent& event : frame.events) {
        if (event.stored) {
          told[event.hash] = event.resumable;
        } else {
          EXPECT_EQ(told.erase(event.hash), 1u);
        }
      }
    }
    // As the router looks it up: the prompt's blocks, but that of its last token.
    int32_t held = 0;
    int32_t promised = 0;
    for (const block_hash::BlockHash& hash : hasher.Chain(
             hasher.Root("test"), absl::MakeConstSpan(tokens).first(length - 1), kBlockSize)) {
      if (!told.contains(hash)) break;
      held += kBlockSize;
      if (told[hash]) promised = held;
    }
    // A transfer brings its own state.
    EXPECT_EQ(Run(spec), spec.local_prefill ? promised : held);
    if (spec.local_prefill) reused += promised;
  }
  EXPECT_GT(reused, 0);
}

TEST_F(DecodeStateTest, ASlotOfManyMessagesArrivesWhole) {
  network_.state_slot_bytes = (int64_t{9} << 20) + 8;  // above kMaxMessageBytes
  Start({.num_blocks = 16, .num_state_slots = 3});
  EXPECT_EQ(Run(Transferred("r", RandomTokens(200, 3), 20)), 0);
  EXPECT_EQ(Run(Spec("next", NextTurn(Spec("", RandomTokens(200, 3), 20)), 20)), 0);
}

}  // namespace
}  // namespace decode_worker
