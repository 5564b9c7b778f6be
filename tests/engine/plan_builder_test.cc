#include "engine/plan_builder.h"

#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engine {
namespace {

using ::testing::ElementsAre;

constexpr int32_t kBlockSize = 64;

template <typename T>
std::vector<T> Take(const T* data, int64_t count) {
  return std::vector<T>(data, data + count);
}

class PlanBuilderTest : public testing::Test {
 protected:
  PlanBuilderTest() : plan_(Limits()), pool_(32), builder_(kBlockSize, plan_) {}

  static model::StepLimits Limits() {
    model::StepLimits limits;
    limits.max_tokens = 300;
    limits.max_seqs = 8;
    limits.max_blocks_per_seq = 20;
    limits.max_samples = 8;
    limits.max_logit_rows = 8;
    return limits;
  }

  Sequence Prompt(int32_t length) {
    Sequence seq;
    seq.tokens.resize(length);
    std::iota(seq.tokens.begin(), seq.tokens.end(), 1000);
    seq.num_prompt_tokens = length;
    EXPECT_TRUE(GrowBlocks(seq, length + 1, kBlockSize, pool_).ok());
    return seq;
  }

  model::StepPlan plan_;
  BlockPool pool_;
  PlanBuilder builder_;
};

TEST_F(PlanBuilderTest, AChunkHasItsPositionsSlotsAndLengths) {
  Sequence seq = Prompt(100);
  builder_.Begin(0);
  EXPECT_EQ(builder_.Add(seq, 70, /*absorbed=*/false, /*sample=*/false), -1);
  builder_.Begin(1);
  EXPECT_EQ(builder_.Add(seq, 30, /*absorbed=*/false, /*sample=*/true), 0);
  EXPECT_EQ(plan_.counts().num_tokens, 30);
  EXPECT_EQ(plan_.token_ids[0], 1070);
  EXPECT_EQ(plan_.positions[0], 70);
  EXPECT_EQ(plan_.slots[0], seq.blocks[1] * 64 + 6);
  EXPECT_THAT(Take(plan_.kv_len, 1), ElementsAre(100));
  EXPECT_THAT(Take(plan_.cu_seqlens_q, 2), ElementsAre(0, 30));
  EXPECT_THAT(Take(plan_.cu_seqlens_kv, 2), ElementsAre(0, 100));
  EXPECT_THAT(Take(plan_.block_table, 3), ElementsAre(seq.blocks[0], seq.blocks[1], -1));
  EXPECT_EQ(plan_.samples[0].row, 29);
  EXPECT_EQ(plan_.samples[0].position, 100u);
  EXPECT_EQ(plan_.counts().num_splits, 0);
}

// V4: the first position of each row's window.
TEST_F(PlanBuilderTest, RowsOfAModelWithAWindowSayWhereItBegins) {
  model::StepLimits limits = Limits();
  limits.sliding_window = 5;
  model::StepPlan plan(limits);
  PlanBuilder builder(kBlockSize, plan);
  Sequence seq = Prompt(70);
  builder.Begin(0);
  builder.Add(seq, 7, /*absorbed=*/false, /*sample=*/false);
  EXPECT_THAT(Take(plan.window_start, 7), ElementsAre(0, 0, 0, 0, 0, 1, 2));
  builder.Begin(1);
  builder.Add(seq, 1, /*absorbed=*/true, /*sample=*/false);
  EXPECT_THAT(Take(plan.window_start, 1), ElementsAre(3));
  Sequence without = Prompt(70);
  builder_.Begin(2);
  builder_.Add(without, 20, /*absorbed=*/false, /*sample=*/false);
  EXPECT_THAT(Take(plan_.window_start, 20), ::testing::Each(0));
}

TEST_F(PlanBuilderTest, ADecodeMayTakeWhatThePreviousStepSamples) {
  Sequence other = Prompt(3);
  Sequence seq = Prompt(63);
  builder_.Begin(5);
  builder_.Add(other, 3, false, true);
  builder_.Add(seq, 63, false, true);
  builder_.Begin(6);  // step 5 has not been collected
  builder_.Add(seq, 1, /*absorbed=*/true, true);
  EXPECT_EQ(plan_.token_source[0], 1);
  EXPECT_EQ(plan_.positions[0], 63);
  EXPECT_EQ(plan_.samples[0].position, 64u);
  AcceptToken(seq, 5, 7);  // step 6's sample is still pending
  EXPECT_EQ(seq.pending_sample, 0);
  EXPECT_EQ(seq.num_output_tokens(), 1);
  ASSERT_TRUE(GrowBlocks(seq, 66, kBlockSize, pool_).ok());
  builder_.Begin(7);
  builder_.Add(seq, 1, true, true);
  EXPECT_EQ(plan_.token_source[0], 0);
  EXPECT_EQ(plan_.positions[0], 64);
  EXPECT_EQ(plan_.slots[0], seq.blocks[1] * 64);
  AcceptToken(seq, 6, 8);
  AcceptToken(seq, 7, 9);
  EXPECT_EQ(seq.pending_sample, -1);
  builder_.Begin(8);
  builder_.Add(seq, 1, true, true);
  EXPECT_EQ(plan_.token_source[0], -1);
  EXPECT_EQ(plan_.token_ids[0], 9);
}

TEST_F(PlanBuilderTest, SplitsDependOnTheSequenceAlone) {
  Sequence seq = Prompt(600);
  seq.num_computed = 599;
  builder_.Begin(0);
  builder_.Add(seq, 1, true, true);
  ASSERT_EQ(plan_.counts().num_splits, 3);
  EXPECT_EQ(plan_.splits[0].kv_end, 256);
  EXPECT_EQ(plan_.splits[2].kv_begin, 512);
  EXPECT_EQ(plan_.splits[2].kv_end, 600);
  EXPECT_EQ(model::SplitTokens(1), 256);
  for (int32_t kv_len : {1, 255, 256, 257, 4096, 4097, 163840}) {
    const int32_t split = model::SplitTokens(kv_len);
    EXPECT_LE((kv_len + split - 1) / split, model::StepLimits::kMaxSplitsPerSeq) << kv_len;
    EXPECT_EQ(split % 64, 0);
  }
}

TEST_F(PlanBuilderTest, BranchesSampleFromOneRow) {
  Sequence seq = Prompt(10);
  Sequence branch = seq;
  branch.blocks.clear();
  seq.sampling.seed = branch.sampling.seed = 9;
  branch.sampling.branch = 1;
  builder_.Begin(0);
  EXPECT_EQ(builder_.Add(seq, 10, false, true), 0);
  EXPECT_EQ(builder_.AddBranchSample(branch), 1);
  EXPECT_EQ(plan_.samples[1].row, plan_.samples[0].row);
  EXPECT_EQ(plan_.samples[1].branch, 1u);
  EXPECT_EQ(branch.pending_sample, 1);
}

TEST_F(PlanBuilderTest, StopIdsAreBannedUntilMinTokens) {
  Sequence seq = Prompt(10);
  seq.sampling.min_tokens = 1;
  seq.sampling.stop_token_ids = {1, 5};
  builder_.Begin(0);
  builder_.Add(seq, 10, false, true);
  EXPECT_EQ(plan_.samples[0].num_banned, 2);
  builder_.Begin(1);
  builder_.Add(seq, 1, true, true);
  EXPECT_EQ(plan_.samples[0].num_banned, 0);
}

TEST_F(PlanBuilderTest, APenaltySlotIsSetOnce) {
  Sequence seq = Prompt(10);
  seq.tokens.push_back(77);  // an output token known at the start
  seq.penalty_slot = 3;
  seq.penalty_reset_needed = true;
  builder_.Begin(0);
  builder_.Add(seq, 11, false, true);
  ASSERT_EQ(plan_.counts().num_penalty_resets, 1);
  EXPECT_EQ(plan_.penalty_resets[0].prompt_len, 10);
  EXPECT_EQ(plan_.penalty_resets[0].output_len, 1);
  EXPECT_EQ(plan_.history_tokens[10], 77);
  builder_.Begin(1);
  builder_.Add(seq, 1, true, true);
  EXPECT_EQ(plan_.counts().num_penalty_resets, 0);
}

TEST_F(PlanBuilderTest, FullBlocksAreIndexedOnceTheirStepIsCollected) {
  const block_hash::BlockHasher hasher(0);
  Sequence seq = Prompt(130);
  seq.root = hasher.Root("n");
  IndexFullBlocks(seq, 127, kBlockSize, hasher, pool_);
  EXPECT_EQ(seq.num_indexed, 1);
  IndexFullBlocks(seq, 130, kBlockSize, hasher, pool_);
  EXPECT_EQ(seq.num_indexed, 2);
  const auto chain = hasher.Chain(seq.root, seq.tokens, kBlockSize);
  EXPECT_EQ(pool_.MatchPrefix(chain), 2);
  ReleaseBlocks(seq, pool_);
  EXPECT_EQ(pool_.num_cached(), 2);
  EXPECT_EQ(pool_.num_held(), 0);
}

TEST_F(PlanBuilderTest, ThePlanIsOnePieceOfBytes) {
  Sequence seq = Prompt(5);
  builder_.Begin(3);
  builder_.Add(seq, 5, false, true, /*logits=*/true);
  model::StepPlan copy(Limits());
  copy.CopyFrom(plan_);
  EXPECT_EQ(copy.counts().step_id, 3);
  EXPECT_THAT(Take(copy.logit_rows, 5), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(copy.token_ids[4], 1004);
  EXPECT_THAT(Take(copy.block_table, 1), ElementsAre(seq.blocks[0]));
}

// Of the tables only rows of sequences that there are, of histories only tokens.
TEST_F(PlanBuilderTest, WhatIsNotUsedIsNotCopied) {
  builder_.Begin(1);
  const size_t empty = plan_.used_bytes().size();
  Sequence seq = Prompt(5);
  builder_.Add(seq, 5, false, true);
  const size_t one = plan_.used_bytes().size();
  EXPECT_EQ(one - empty, sizeof(int32_t) * Limits().max_blocks_per_seq);
  EXPECT_LT(one, plan_.bytes().size());
  plan_.history_tokens[2] = 4711;
  plan_.counts().num_history_tokens = 3;
  model::StepPlan copy(Limits());
  copy.CopyFrom(plan_);
  EXPECT_EQ(copy.history_tokens[2], 4711);
}

TEST_F(PlanBuilderTest, PlansOfOtherLimitsCannotBeCopied) {
  model::StepLimits other = Limits();
  other.max_tokens = 1;
  model::StepPlan small(other);
  EXPECT_DEATH(small.CopyFrom(plan_), "a plan of other limits");
}

}  // namespace
}  // namespace engine
