// A prefill worker of a model that keeps a state per sequence: what it sends is what a computation
// in one piece leaves, whatever the chunks, the cached prefix, the branches and the number of
// slots.

#include <random>
#include <thread>

#include "prefill_fixture.h"
#include "tests/fakes/rolling_network.h"

namespace prefill_worker {
namespace {

using ferry::v1::PrefillEvent;

fakes::RollingOptions Network() {
  fakes::RollingOptions network;
  network.vocab_size = kVocab;
  network.block_size = kBlockSize;
  network.state_slot_bytes = 512;
  network.limits = TestOptions().worker.engine.limits;
  network.limits.max_samples = 8;
  return network;
}

class PrefillStateTest : public PrefillFixture {
 protected:
  void Start(int32_t num_state_slots, int32_t snapshot_blocks = 2) {
    PrefillOptions options = TestOptions();
    options.worker.num_state_slots = num_state_slots;
    options.worker.snapshot_blocks = snapshot_blocks;
    StartWorker(options);
    decode_ = NewDecode();
  }
  std::unique_ptr<engine::Engine> NewEngine(const engine::EngineOptions&) override {
    return fakes::CreateRollingEngine(network_options_);
  }

  void ExpectTruth(const ferry::v1::PrefillRequest& request, FakeDecodeWorker& decode,
                   uint32_t attempt = 1) {
    const std::vector<uint32_t> tokens(request.spec().token_ids().begin(),
                                       request.spec().token_ids().end());
    const auto received = decode.received(request.spec().key().request_id(), attempt);
    ASSERT_NE(received, nullptr);
    const auto n = static_cast<int>(request.spec().sampling().n());
    ASSERT_EQ(received->done.first_tokens_size(), n);
    for (int branch = 0; branch < n; ++branch) {
      engine::SamplingOptions sampling;
      sampling.temperature = request.spec().sampling().temperature();
      sampling.seed = request.spec().sampling().seed();
      sampling.branch = static_cast<uint32_t>(branch);
      const auto truth = local_.Compute(tokens, sampling);
      if (branch == 0) ExpectSameRows(local_.layout(), truth, *received);
      EXPECT_EQ(received->done.first_tokens(branch).token_id(),
                static_cast<uint32_t>(truth.sample.token_id))
          << "branch " << branch;
    }
  }
  // Runs a request whole; returns the prompt tokens that the worker had.
  uint32_t Run(const ferry::v1::PrefillRequest& request) {
    const ferry::v1::PrefillDone done = Prefill(request);
    ExpectTruth(request, *decode_);
    return done.cached_tokens();
  }

  fakes::RollingOptions network_options_ = Network();
  std::unique_ptr<FakeDecodeWorker> decode_;
  LocalEngine local_{fakes::CreateRollingEngine(Network())};
};

TEST_F(PrefillStateTest, BlocksStateAndFirstTokenAreThoseOfALocalComputation) {
  Start(/*num_state_slots=*/4);
  for (const int32_t length : {1, 63, 64, 65, 127, 128, 129, 300}) {
    const auto request = Request(absl::StrCat("r", length), Tokens(length, 1 + length), *decode_);
    const ferry::v1::PrefillDone done = Prefill(request);
    ExpectTruth(request, *decode_);
    // Every byte is accounted for, and what is useful follows from the tokens alone.
    uint64_t useful = 0;
    uint64_t padding = 0;
    for (const auto& group : done.groups()) {
      useful += group.useful_bytes();
      padding += group.padding_bytes();
    }
    EXPECT_EQ(useful + padding, done.kv_bytes());
    EXPECT_EQ(useful, static_cast<uint64_t>(length * 2 * 24 + length / 4 * 3 * 40 +
                                            length / 64 * 72 + 512));
    EXPECT_EQ(done.groups(3).name(), "state");
    EXPECT_EQ(done.groups(3).useful_bytes(), 512u);
  }
  ExpectEverythingGivenBack();
}

TEST_F(PrefillStateTest, APromptGoesOnBehindTheLastSnapshotThatItShares) {
  Start(/*num_state_slots=*/12);
  const std::vector<uint32_t> shared = Tokens(400, 1);
  EXPECT_EQ(Run(Request("first", shared, *decode_)), 0u);
  // Snapshots behind tokens 128, 256, 384.
  const auto prefix = [&](size_t length, uint32_t salt) {
    std::vector<uint32_t> tokens(shared.begin(), shared.begin() + length);
    for (uint32_t i = 0; i < 10; ++i) tokens.push_back((i + salt * 7) % kVocab);
    return tokens;
  };
  EXPECT_EQ(Run(Request("a", shared, *decode_)), 384u);
  EXPECT_EQ(Run(Request("b", prefix(390, 1), *decode_)), 384u);
  EXPECT_EQ(Run(Request("c", prefix(330, 2), *decode_)), 256u);  // leaves one behind token 320
  EXPECT_EQ(Run(Request("d", prefix(350, 3), *decode_)), 320u);
  EXPECT_EQ(Run(Request("e", prefix(255, 4), *decode_)), 128u);
  EXPECT_EQ(Run(Request("f", prefix(100, 5), *decode_)), 0u);
  decode_->cached_blocks = 5;  // the decode worker has some: only the rest and the state go out
  EXPECT_EQ(Run(Request("g", shared, *decode_)), 384u);
  decode_->cached_blocks = 0;
  ferry::v1::PrefillRequest other = Request("h", shared, *decode_);
  other.mutable_spec()->set_cache_namespace("other");
  EXPECT_EQ(Run(other), 0u);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillStateTest, APromptOfWholeBlocksThatTheDecodeWorkerHasMovesItsState) {
  Start(/*num_state_slots=*/4);
  decode_->cached_blocks = 2;
  const auto request = Request("a", Tokens(128, 1), *decode_);
  const ferry::v1::PrefillDone done = Prefill(request);
  EXPECT_EQ(done.kv_blocks(), 0u);
  EXPECT_EQ(done.kv_bytes(), 512u);
  ExpectTruth(request, *decode_);
}

// Logits that are NaN, say: of that request alone, and it says so.
TEST_F(PrefillStateTest, LogitsWithoutATokenEndTheirRequestAndNoOther) {
  network_options_.poison_seed = 13;
  Start(/*num_state_slots=*/4);
  std::vector<ferry::v1::PrefillRequest> requests;
  std::vector<std::unique_ptr<PrefillCall>> calls;
  for (uint32_t i = 0; i < 4; ++i) {
    requests.push_back(Request(absl::StrCat("r", i), Tokens(150, i), *decode_));
    auto* sampling = requests.back().mutable_spec()->mutable_sampling();
    sampling->set_temperature(1);
    sampling->set_seed(i == 1 ? 13 : 1);
    sampling->set_n(2);
    calls.push_back(std::make_unique<PrefillCall>(stub_.get(), requests.back()));
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    const absl::Status status = calls[i]->Finish();
    if (i == 1) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      EXPECT_EQ(status::Reason(status), status::kBadLogits);
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("logits behind token 150"));
    } else {
      EXPECT_TRUE(status.ok()) << status;
      ExpectTruth(requests[i], *decode_);
    }
  }
  // The same prompt with another seed is served.
  requests[1].mutable_spec()->mutable_key()->set_request_id("again");
  requests[1].mutable_spec()->mutable_sampling()->set_seed(2);
  EXPECT_EQ(Prefill(requests[1]).kv_blocks(), 3u);
  ExpectTruth(requests[1], *decode_);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillStateTest, BranchesAreSampledTogetherHoweverFullTheSteps) {
  Start(/*num_state_slots=*/4);
  std::vector<ferry::v1::PrefillRequest> requests;
  std::vector<std::unique_ptr<PrefillCall>> calls;
  for (uint32_t i = 0; i < 12; ++i) {  // up to eight samples a step: they get in each other's way
    ferry::v1::PrefillRequest request =
        Request(absl::StrCat("r", i), Tokens(70 + 20 * i, i), *decode_);
    auto* sampling = request.mutable_spec()->mutable_sampling();
    sampling->set_temperature(1);
    sampling->set_seed(i);
    sampling->set_n(1 + (i * 5) % 8);
    requests.push_back(request);
    calls.push_back(std::make_unique<PrefillCall>(stub_.get(), request));
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i]->Until(PrefillEvent::kDone);
    EXPECT_TRUE(calls[i]->Finish().ok());
    ExpectTruth(requests[i], *decode_);
  }
  ferry::v1::PrefillRequest too_many = Request("many", Tokens(10, 1), *decode_);
  too_many.mutable_spec()->mutable_sampling()->set_n(9);
  const absl::Status refused = PrefillCall(stub_.get(), too_many).Finish();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "n is 9, this worker samples 8 at a time");
  ExpectEverythingGivenBack();
}

// Two prompts end in one step, which has samples for one of them and a half.
TEST(ChunkStepTest, AModelWithStateComputesNoRowTwice) {
  for (const int64_t state_slot_bytes : {512, 0}) {
    fakes::RollingOptions network = Network();
    network.state_slot_bytes = state_slot_bytes;
    const auto engine = fakes::CreateRollingEngine(network);
    constexpr int32_t kNumBlocks = 9;
    constexpr int32_t kNumSlots = 3;
    auto blocks = *engine::CacheMemory::Map(kNumBlocks * engine->cache_layout().block_bytes());
    auto slots = *engine::CacheMemory::Map(kNumSlots * 512);
    engine->SetCache(blocks.span(), slots.span().first(kNumSlots * state_slot_bytes));
    engine::BlockPool pool(kNumBlocks, state_slot_bytes == 0 ? 0 : kNumSlots);
    const engine::SnapshotPolicy snapshots = {.block_size = kBlockSize,
                                              .every_blocks = state_slot_bytes == 0 ? 0 : 2};
    engine::SlotPool penalty_slots(1);
    ChunkStep step(engine->limits(), snapshots, &pool, &penalty_slots);
    const block_hash::BlockHasher hasher(0);
    PrefillRequest requests[2];
    std::vector<PrefillRequest*> computing;
    for (int i = 0; i < 2; ++i) {
      engine::Sequence& seq = requests[i].seq;
      for (const uint32_t token : Tokens(30 + i, i)) seq.tokens.push_back(token);
      seq.num_prompt_tokens = 30 + i;
      seq.sampling.temperature = 1;
      requests[i].num_branches = 5;
      ASSERT_TRUE(
          engine::TakePrefix(seq, {}, 0, engine::Continuation::kComputed, kBlockSize, pool).ok());
      ASSERT_TRUE(engine::GrowBlocks(seq, 30 + i, kBlockSize, pool).ok());
      computing.push_back(&requests[i]);
    }
    std::vector<int32_t> rows;
    for (int64_t id = 1; step.Build(id, computing, 96); ++id) {
      rows.push_back(step.num_tokens());
      const auto result = engine->Collect(*engine->Launch(step.plan()));
      ASSERT_TRUE(result.ok()) << result.status();
      step.Collected(*result);
      step.KeepSnapshots();
    }
    // With state the second prompt's last row waits for a step with room for its five samples.
    EXPECT_EQ(rows, state_slot_bytes == 0 ? (std::vector<int32_t>{61, 1})
                                          : (std::vector<int32_t>{60, 1}));
    for (PrefillRequest& request : requests) {
      engine::SamplingOptions sampling = request.seq.sampling;
      sampling.max_tokens = 1;
      ASSERT_EQ(request.first_tokens.size(), 5u);
      for (int32_t branch = 0; branch < 5; ++branch) {
        EXPECT_EQ(request.first_tokens[branch].sample.token_id,
                  fakes::RollingReference(network, request.seq.tokens, sampling, branch)[0])
            << "branch " << branch;
      }
      engine::ReleaseBlocks(request.seq, pool);
    }
    EXPECT_EQ(pool.num_held(), 0);
  }
}

TEST_F(PrefillStateTest, FewSlotsDelayAndFailNothing) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  Start(/*num_state_slots=*/2);
  std::vector<ferry::v1::PrefillRequest> requests;
  std::vector<std::unique_ptr<PrefillCall>> calls;
  for (int i = 0; i < 30; ++i) {
    requests.push_back(Request(absl::StrCat("r", i),
                               Tokens(1 + static_cast<int32_t>(random() % 400), random() % 3),
                               *decode_));
    calls.push_back(std::make_unique<PrefillCall>(stub_.get(), requests.back()));
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i]->Until(PrefillEvent::kDone);
    EXPECT_TRUE(calls[i]->Finish().ok());
    ExpectTruth(requests[i], *decode_);
  }
  ExpectEverythingGivenBack();
}

TEST_F(PrefillStateTest, HeldBlocksAndTheirStateGoToAnotherDecodeWorker) {
  Start(/*num_state_slots=*/2);
  decode_->refuse = true;
  const auto request = Request("a", Tokens(300, 1), *decode_);
  PrefillCall call(stub_.get(), request);
  call.Until(PrefillEvent::kHeld);
  WaitForLoad([](const auto& load) { return load.state_slots().held() == 1; });
  // Others use what is left meanwhile; the held slot is nobody else's.
  const auto other = NewDecode();
  const auto between = Request("b", Tokens(200, 2), *other);
  Prefill(between);
  ExpectTruth(between, *other);
  ferry::v1::PrefillDone done;
  ASSERT_TRUE(PushHeld("a", 1, 2, *other, &done).ok());
  EXPECT_EQ(done.kv_blocks(), 5u);
  ExpectTruth(request, *other, /*attempt=*/2);
  call.Until(PrefillEvent::kDone);
  EXPECT_TRUE(call.Finish().ok());
  ExpectEverythingGivenBack();
}

TEST_F(PrefillStateTest, CancelInAnyPhaseGivesTheSlotBack) {
  Start(/*num_state_slots=*/1);
  decode_->reserve_gate.Close();
  PrefillCall first(stub_.get(), Request("first", Tokens(300, 1), *decode_));
  decode_->reserve_gate.WaitForArrivals(1);
  PrefillCall waiting(stub_.get(), Request("waiting", Tokens(300, 2), *decode_));
  waiting.Until(PrefillEvent::kAccepted);
  waiting.Cancel();
  EXPECT_EQ(waiting.Finish().code(), absl::StatusCode::kCancelled);
  first.Cancel();
  EXPECT_EQ(first.Finish().code(), absl::StatusCode::kCancelled);
  decode_->reserve_gate.Open();
  const auto request = Request("next", Tokens(100, 3), *decode_);
  Prefill(request);
  ExpectTruth(request, *decode_);
  ExpectEverythingGivenBack();
}

TEST_F(PrefillStateTest, ADecodeWorkerThatReservesNoSlotIsRefused) {
  Start(/*num_state_slots=*/2);
  decode_->state_slot_bytes = 0;
  PrefillCall call(stub_.get(), Request("a", Tokens(100, 1), *decode_));
  const absl::Status status = call.Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(
      std::string(status.message()),
      testing::HasSubstr("does not fit a prompt of 100 tokens in 2 blocks and a state slot"));
  ExpectEverythingGivenBack();
}

}  // namespace
}  // namespace prefill_worker
