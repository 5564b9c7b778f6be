// Sequences of a model that keeps a state, through a real engine: whatever way a prompt takes, the
// text is that of the plain function of its tokens.

#include "engine/prefix_reuse.h"

#include <cstring>
#include <numeric>
#include <random>

#include "engine/cache_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/rolling_network.h"

namespace engine {
namespace {

constexpr int32_t kBlockSize = 128;

class PrefixReuseTest : public testing::Test {
 protected:
  PrefixReuseTest() {
    options_.block_size = kBlockSize;
    options_.limits.max_tokens = 1024;
    options_.limits.max_seqs = 8;
    Start(/*num_blocks=*/40, /*num_slots=*/16);
  }

  void Start(int32_t num_blocks, int32_t num_slots) {
    engine_ = fakes::CreateRollingEngine(options_);
    const int64_t slot_bytes = options_.state_slot_bytes;
    blocks_ = std::make_unique<CacheMemory>(
        *CacheMemory::Map((num_blocks + 1) * engine_->cache_layout().block_bytes()));
    slots_ = std::make_unique<CacheMemory>(*CacheMemory::Map((num_slots + 1) * slot_bytes));
    // Reading what nobody wrote shows.
    std::memset(blocks_->data(), 0xff, blocks_->span().size());
    std::memset(slots_->data() + slot_bytes, 0xff, slots_->span().size() - slot_bytes);
    engine_->SetCache(blocks_->span(), slots_->span());
    pool_ = std::make_unique<BlockPool>(num_blocks + 1, num_slots + 1);
    plan_ = std::make_unique<model::StepPlan>(engine_->limits());
    builder_ = std::make_unique<PlanBuilder>(kBlockSize, *plan_);
  }

  Sequence Prompt(int32_t length, int32_t salt = 0) {
    Sequence seq;
    for (int32_t i = 0; i < length; ++i) {
      seq.tokens.push_back((i * 37 + salt * 11 + i / 50) % options_.vocab_size);
    }
    seq.num_prompt_tokens = length;
    seq.root = hasher_.Root("test");
    seq.sampling.temperature = 0;
    return seq;
  }

  // Tokens that were cached.
  int32_t Begin(Sequence& seq) {
    const int32_t blocks =
        ReusableBlocks(seq, Continuation::kComputed, kBlockSize, hasher_, *pool_);
    EXPECT_TRUE(TakePrefix(seq, {}, blocks, Continuation::kComputed, kBlockSize, *pool_).ok());
    return seq.num_computed;
  }

  // One step of at most `rows` new tokens; samples when it reaches the newest token.
  void Step(Sequence& seq, int32_t rows) {
    const auto known = static_cast<int32_t>(seq.tokens.size());
    const bool decoding = seq.num_output_tokens() > 0 && known - seq.num_computed == 1;
    const int32_t end =
        policy_.ChunkEnd(seq.num_computed, std::min(seq.num_computed + rows, known), known);
    ASSERT_TRUE(GrowBlocks(seq, end, kBlockSize, *pool_).ok());
    builder_->Begin(++step_);
    builder_->Add(seq, end - seq.num_computed, decoding, /*sample=*/end == known);
    const PendingSnapshot pending = policy_.Take(seq, decoding, *builder_, *pool_);
    const auto result = engine_->Collect(*engine_->Launch(*plan_));
    ASSERT_TRUE(result.ok()) << result.status();
    IndexFullBlocks(seq, end, kBlockSize, hasher_, *pool_);
    policy_.Keep(seq, pending, *pool_);
    pool_->state_slots()->Release(builder_->state_sources());
    if (end == known) AcceptToken(seq, step_, result->samples[0].token_id);
  }

  // Computes the prompt in chunks of `rows` and decodes `count` tokens in all.
  std::vector<int32_t> Generate(Sequence& seq, int32_t rows, int32_t count) {
    while (seq.num_output_tokens() < count) Step(seq, rows);
    return {seq.tokens.begin() + seq.num_prompt_tokens, seq.tokens.end()};
  }

  std::vector<int32_t> Reference(const Sequence& seq, int32_t count) {
    SamplingOptions sampling = seq.sampling;
    sampling.max_tokens = count;
    return fakes::RollingReference(options_,
                                   {seq.tokens.begin(), seq.tokens.begin() + seq.num_prompt_tokens},
                                   sampling, static_cast<int32_t>(sampling.branch));
  }

  void ExpectNothingHeld() {
    EXPECT_EQ(pool_->num_held(), 0);
    EXPECT_EQ(pool_->state_slots()->num_held(), 0);
  }

  fakes::RollingOptions options_;
  SnapshotPolicy policy_{.block_size = kBlockSize, .every_blocks = 2};
  block_hash::BlockHasher hasher_{0};
  std::unique_ptr<CacheMemory> blocks_;
  std::unique_ptr<CacheMemory> slots_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<model::StepPlan> plan_;
  std::unique_ptr<PlanBuilder> builder_;
  int64_t step_ = 0;
  std::unique_ptr<Engine> engine_;  // last: it uses the rest
};

TEST_F(PrefixReuseTest, ChunksOfAnySizeAreTheWholePrompt) {
  for (const int32_t rows : {1000, 128, 97, 64, 7, 1}) {
    for (const int32_t length : {1, 127, 128, 129, 256, 300}) {
      SCOPED_TRACE(testing::Message() << length << " tokens in chunks of " << rows);
      pool_->ClearIndex();
      Sequence seq = Prompt(length);
      EXPECT_EQ(Begin(seq), 0);
      EXPECT_EQ(Generate(seq, rows, 20), Reference(seq, 20));
      ReleaseBlocks(seq, *pool_);
      ExpectNothingHeld();
    }
  }
}

TEST_F(PrefixReuseTest, APromptGoesOnBehindTheLastSnapshotItShares) {
  // Snapshots behind blocks 2 (every two), 4 (every two) and 5 (the last boundary before token
  // 700).
  Sequence first = Prompt(700);
  Begin(first);
  Generate(first, 300, 1);
  for (const auto& [shared, cached] : {std::pair{700, 640},
                                       {650, 640},
                                       {641, 640},
                                       {640, 640},
                                       {639, 512},
                                       {513, 512},
                                       {512, 512},
                                       {511, 256},
                                       {400, 256},
                                       {257, 256},
                                       {256, 256},
                                       {255, 0},
                                       {200, 0}}) {
    SCOPED_TRACE(testing::Message() << shared << " tokens shared");
    Sequence seq = Prompt(shared);
    for (int32_t i = 0; i < 40 && shared != 700; ++i) seq.tokens.push_back(i % 5);
    seq.num_prompt_tokens = static_cast<int32_t>(seq.tokens.size());
    EXPECT_EQ(Begin(seq), cached);
    EXPECT_EQ(Generate(seq, 300, 30), Reference(seq, 30));
    ReleaseBlocks(seq, *pool_);
  }
  ReleaseBlocks(first, *pool_);
  ExpectNothingHeld();
}

TEST_F(PrefixReuseTest, TheNextTurnGoesOnBehindTheNewestDecodedBoundary) {
  Sequence turn = Prompt(100);
  Begin(turn);
  Generate(turn, 1000, 450);
  // Boundaries 128, 256 (lasting), 384 (lasting is every second: 256, 512), 512.
  const StateSlots& slots = *pool_->state_slots();
  EXPECT_EQ(slots.num_snapshots(), 2) << "256 and 512; 128 and 384 were replaced";
  ReleaseBlocks(turn, *pool_);
  Sequence next;
  next.tokens = turn.tokens;
  next.tokens.push_back(3);
  next.num_prompt_tokens = static_cast<int32_t>(next.tokens.size());
  next.root = turn.root;
  next.sampling = turn.sampling;
  EXPECT_EQ(Begin(next), 512);
  EXPECT_EQ(Generate(next, 1000, 5), Reference(next, 5));
  ReleaseBlocks(next, *pool_);

  // A shorter history, whose newest boundary is no lasting one.
  Sequence other = Prompt(100, 1);
  Begin(other);
  Generate(other, 1000, 50);
  ReleaseBlocks(other, *pool_);
  other.num_prompt_tokens = static_cast<int32_t>(other.tokens.size());
  other.num_computed = other.num_indexed = 0;
  EXPECT_EQ(Begin(other), 128);
  EXPECT_EQ(Generate(other, 1000, 5), Reference(other, 5));
  ReleaseBlocks(other, *pool_);
  ExpectNothingHeld();
}

TEST_F(PrefixReuseTest, ForksGoOnFromACopyOfTheTrunksState) {
  Sequence trunk = Prompt(256);
  std::vector<Sequence> forks(3);
  std::vector<Sequence*> pointers;
  for (Sequence& fork : forks) pointers.push_back(&fork);
  ASSERT_TRUE(TakePrefix(trunk, pointers, 0, Continuation::kComputed, kBlockSize, *pool_).ok());
  EXPECT_EQ(pool_->state_slots()->num_held(), 4);
  Generate(trunk, 1000, 1);
  for (size_t i = 0; i < forks.size(); ++i) {
    Sequence& fork = forks[i];
    fork.sampling = trunk.sampling;
    fork.root = trunk.root;
    fork.tokens = {trunk.tokens.begin(), trunk.tokens.begin() + 256};
    fork.tokens.push_back(static_cast<int32_t>(i));  // "sampled"
    fork.num_prompt_tokens = 257;
    fork.num_computed = 256;
    fork.blocks = {trunk.blocks[0], trunk.blocks[1]};
    pool_->Share(fork.blocks);
    ForkState(trunk, fork, *pool_);
  }
  // The trunk moves on in the very plan that fills the forks' slots, and is gone before they move.
  builder_->Begin(++step_);
  for (Sequence& fork : forks) builder_->PrepareState(fork);
  ASSERT_TRUE(GrowBlocks(trunk, 257, kBlockSize, *pool_).ok());
  builder_->Add(trunk, 1, /*absorbed=*/true, /*sample=*/true);
  ASSERT_TRUE(engine_->Collect(*engine_->Launch(*plan_)).ok());
  EXPECT_THAT(builder_->state_sources(),
              testing::ElementsAre(trunk.state_slot, trunk.state_slot, trunk.state_slot));
  const int32_t snapshots = pool_->state_slots()->num_snapshots();
  ReleaseBlocks(trunk, *pool_);
  EXPECT_EQ(pool_->state_slots()->num_held(), 4) << "its slot still has readers";
  pool_->state_slots()->Release(builder_->state_sources());
  EXPECT_EQ(pool_->state_slots()->num_held(), 3);
  EXPECT_EQ(pool_->state_slots()->num_snapshots(), snapshots);
  for (Sequence& fork : forks) {
    EXPECT_EQ(Generate(fork, 1000, 5), Reference(fork, 5));
    ReleaseBlocks(fork, *pool_);
  }
  ExpectNothingHeld();
}

TEST_F(PrefixReuseTest, ALastSnapshotIsGoneOnFromInPlace) {
  Start(/*num_blocks=*/40, /*num_slots=*/2);
  Sequence first = Prompt(300);
  Begin(first);
  Generate(first, 1000, 1);
  ReleaseBlocks(first, *pool_);  // one snapshot, one free slot
  Sequence fork;
  Sequence* forks[] = {&fork};
  Sequence seq = Prompt(300);
  const int32_t blocks = ReusableBlocks(seq, Continuation::kComputed, kBlockSize, hasher_, *pool_);
  EXPECT_EQ(blocks, 2);
  ASSERT_TRUE(TakePrefix(seq, forks, blocks, Continuation::kComputed, kBlockSize, *pool_).ok());
  EXPECT_EQ(seq.state_source, kNoSlot);
  EXPECT_EQ(pool_->state_slots()->num_snapshots(), 0);
  EXPECT_EQ(Generate(seq, 1000, 5), Reference(seq, 5));
  ReleaseBlocks(seq, *pool_);
  ReleaseBlocks(fork, *pool_);
  ExpectNothingHeld();
}

TEST_F(PrefixReuseTest, WithoutASlotNothingIsTaken) {
  Start(/*num_blocks=*/40, /*num_slots=*/2);
  Sequence fork;
  Sequence other;
  Sequence* forks[] = {&fork, &other};
  Sequence seq = Prompt(300);
  const absl::Status refused =
      TakePrefix(seq, forks, 0, Continuation::kComputed, kBlockSize, *pool_);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.message(), "need 3 state slots, 2 are free or snapshots");
  ExpectNothingHeld();
  // A snapshot that finds no slot is not taken, and nothing fails.
  Start(/*num_blocks=*/40, /*num_slots=*/1);
  Begin(seq);
  EXPECT_EQ(Generate(seq, 1000, 300), Reference(seq, 300));
  EXPECT_EQ(pool_->state_slots()->num_snapshots(), 0);
  ReleaseBlocks(seq, *pool_);
  ExpectNothingHeld();
}

TEST_F(PrefixReuseTest, AReceivedPrefixNeedsNoSnapshot) {
  Sequence first = Prompt(500);
  Begin(first);
  Generate(first, 1000, 1);
  ReleaseBlocks(first, *pool_);
  StateSlots& slots = *pool_->state_slots();
  std::vector<SlotId> all;
  while (slots.num_available() > 0) all.push_back(*slots.Allocate());  // drops every snapshot
  slots.Release(all);
  Sequence seq = Prompt(500);
  EXPECT_EQ(ReusableBlocks(seq, Continuation::kComputed, kBlockSize, hasher_, *pool_), 0);
  EXPECT_EQ(ReusableBlocks(seq, Continuation::kReceived, kBlockSize, hasher_, *pool_), 3);
  ASSERT_TRUE(TakePrefix(seq, {}, 3, Continuation::kReceived, kBlockSize, *pool_).ok());
  EXPECT_EQ(seq.state_source, kNoSlot);
  ReleaseBlocks(seq, *pool_);
  ExpectNothingHeld();
}

TEST(SnapshotPolicyTest, AChunkEndsWhereASnapshotIsWanted) {
  const SnapshotPolicy policy{.block_size = 64, .every_blocks = 4};
  EXPECT_EQ(policy.ChunkEnd(0, 1000, 1000), 256);
  EXPECT_EQ(policy.ChunkEnd(255, 1000, 1000), 256);
  EXPECT_EQ(policy.ChunkEnd(256, 300, 1000), 300);
  EXPECT_EQ(policy.ChunkEnd(800, 1000, 1000), 960);  // the last boundary before token 1000
  EXPECT_EQ(policy.ChunkEnd(960, 1000, 1000), 1000);
  EXPECT_EQ(policy.ChunkEnd(0, 64, 64), 64);
  EXPECT_EQ(policy.ChunkEnd(0, 65, 65), 64);
  EXPECT_EQ(policy.ChunkEnd(0, 128, 128), 64);  // never the last token's own block
  EXPECT_EQ(SnapshotPolicy().ChunkEnd(0, 1000, 1000), 1000);
  const SnapshotPolicy rare{.block_size = 256, .every_blocks = 1 << 30};
  EXPECT_EQ(rare.ChunkEnd(512, 700, 700), 700);
}

}  // namespace
}  // namespace engine
