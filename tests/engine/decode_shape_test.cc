#include "engine/decode_shape.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engine {
namespace {

using ::testing::Each;

// Sequences of one row and `splits` splits each, all of them sampled.
void FillDecode(int32_t num_seqs, int32_t splits, model::StepPlan& plan) {
  plan.Clear();
  model::StepCounts& counts = plan.counts();
  for (int32_t seq = 0; seq < num_seqs; ++seq) {
    plan.token_ids[seq] = 7;
    plan.slots[seq] = seq;
    plan.kv_len[seq] = 1;
    plan.cu_seqlens_q[seq + 1] = seq + 1;
    plan.cu_seqlens_kv[seq + 1] = seq + 1;
    for (int32_t i = 0; i < splits; ++i) plan.splits[counts.num_splits++].seq = seq;
    plan.samples[seq] = {};
    plan.samples[seq].row = seq;
  }
  counts.num_tokens = counts.num_seqs = counts.num_samples = num_seqs;
  counts.num_absorbed_tokens = counts.num_absorbed_seqs = num_seqs;
}

class DecodeShapeTest : public ::testing::Test {
 protected:
  DecodeShapeTest() : plan_(Limits()) {}
  static model::StepLimits Limits() {
    return {.max_tokens = 128, .max_absorbed_tokens = 100, .max_seqs = 102, .max_samples = 101};
  }
  DecodeShape Shape(int32_t num_seqs, int32_t splits) {
    FillDecode(num_seqs, splits, plan_);
    return *ShapeOfDecode(plan_);
  }

  model::StepPlan plan_;
};

TEST_F(DecodeShapeTest, CountsAreRoundedUpAndStayWithinTheLimits) {
  EXPECT_EQ(Shape(1, 3), (DecodeShape{1, 3, 1}));
  EXPECT_EQ(Shape(16, 1), (DecodeShape{16, 16, 16}));
  EXPECT_EQ(Shape(17, 1), (DecodeShape{20, 20, 20}));
  EXPECT_EQ(Shape(17, 2), (DecodeShape{20, 40, 20}));
  EXPECT_EQ(Shape(65, 16), (DecodeShape{72, 15 * 72, 72}));
  EXPECT_EQ(Shape(98, 16), (DecodeShape{100, 1600, 101}));
}

TEST_F(DecodeShapeTest, AnythingElseHasNoShape) {
  EXPECT_FALSE(ShapeOfDecode(model::StepPlan(Limits())).has_value());
  for (int32_t model::StepCounts::*count :
       {&model::StepCounts::num_tokens, &model::StepCounts::num_seqs,
        &model::StepCounts::num_logit_rows, &model::StepCounts::num_copies,
        &model::StepCounts::num_penalty_resets}) {
    FillDecode(3, 1, plan_);
    ++(plan_.counts().*count);
    EXPECT_FALSE(ShapeOfDecode(plan_).has_value());
  }
}

// The engine copies states around Forward.
TEST_F(DecodeShapeTest, CopiesOfStatesDoNotShow) {
  const DecodeShape shape = Shape(3, 1);
  plan_.counts().num_state_copies = 2;
  plan_.counts().num_snapshots = 1;
  EXPECT_EQ(ShapeOfDecode(plan_), shape);
}

TEST_F(DecodeShapeTest, PaddedRowsGoNowhere) {
  const DecodeShape shape = Shape(17, 2);
  PadDecode(shape, plan_);
  EXPECT_EQ(plan_.counts().num_tokens, 20);
  EXPECT_EQ(plan_.counts().num_absorbed_seqs, 20);
  EXPECT_EQ(plan_.counts().num_splits, 40);
  EXPECT_EQ(plan_.counts().num_samples, 20);
  for (int32_t i = 0; i < 17; ++i) {
    EXPECT_EQ(plan_.token_ids[i], 7);
    EXPECT_EQ(plan_.samples[i].row, i);
  }
  for (int32_t i = 17; i < 20; ++i) {
    EXPECT_EQ(plan_.slots[i], -1);
    EXPECT_EQ(plan_.kv_len[i], 0);
    EXPECT_EQ(plan_.token_source[i], -1);
    EXPECT_EQ(plan_.cu_seqlens_q[i + 1], i + 1);
    EXPECT_EQ(plan_.cu_seqlens_kv[i + 1], 17);
    EXPECT_EQ(plan_.samples[i].temperature, 0);
    EXPECT_THAT(std::vector<int32_t>(plan_.block_table + i * plan_.block_table_stride(),
                                     plan_.block_table + (i + 1) * plan_.block_table_stride()),
                Each(-1));
  }
  for (int32_t i = 34; i < 40; ++i) EXPECT_GE(plan_.splits[i].seq, 20);
  EXPECT_EQ(*ShapeOfDecode(plan_), shape);
}

}  // namespace
}  // namespace engine
