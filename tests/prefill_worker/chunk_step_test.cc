#include "prefill_worker/chunk_step.h"

#include <deque>
#include <memory>

#include "engine/block_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/rolling_network.h"

namespace prefill_worker {
namespace {

using ::testing::ElementsAre;

constexpr int32_t kBlockSize = 64;
constexpr int32_t kChunkTokens = 100;
constexpr double kStepMs = 10;

class ChunkStepTest : public testing::Test {
 protected:
  ChunkStepTest() {
    fakes::RollingOptions network;
    network.block_size = kBlockSize;
    engine_ = fakes::CreateRollingEngine(network);
    step_ = std::make_unique<ChunkStep>(engine_->limits(),
                                        engine::SnapshotPolicy{.block_size = kBlockSize}, &pool_,
                                        &penalty_slots_);
  }

  PrefillRequest* AddPrompt(int32_t num_tokens) {
    PrefillRequest& request = requests_.emplace_back();
    request.seq.tokens.assign(num_tokens, 1);
    request.seq.num_prompt_tokens = num_tokens;
    EXPECT_TRUE(engine::GrowBlocks(request.seq, num_tokens, kBlockSize, pool_).ok());
    computing_.push_back(&request);
    return &request;
  }
  // Rows of each request in the next step, in the order of their arrival.
  std::vector<int32_t> RowsOfNextStep() {
    std::vector<int32_t> rows;
    for (const PrefillRequest& request : requests_) rows.push_back(-request.seq.num_computed);
    EXPECT_TRUE(step_->Build(++step_id_, computing_, kChunkTokens));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] += requests_[i].seq.num_computed;
    const std::vector<kernels::SampleResult> samples(requests_.size());
    engine::StepResult result;
    result.samples = samples;
    result.step_ms = kStepMs;
    step_->Collected(result);
    step_->KeepSnapshots();
    std::erase_if(computing_,
                  [](const PrefillRequest* one) { return one->next_branch == one->num_branches; });
    return rows;
  }

  std::unique_ptr<engine::Engine> engine_;
  engine::BlockPool pool_{256};
  engine::SlotPool penalty_slots_{1};
  std::unique_ptr<ChunkStep> step_;
  int64_t step_id_ = 0;
  std::deque<PrefillRequest> requests_;
  std::vector<PrefillRequest*> computing_;
};

TEST_F(ChunkStepTest, PromptsThatFitAStepGoInTheOrderOfTheirArrival) {
  AddPrompt(90);
  AddPrompt(80);
  AddPrompt(10);
  EXPECT_THAT(RowsOfNextStep(), ElementsAre(90, 10, 0));
  EXPECT_THAT(RowsOfNextStep(), ElementsAre(0, 70, 10));
}

TEST_F(ChunkStepTest, ShortPromptsDoNotWaitForAllOfALongOne) {
  AddPrompt(1000);
  AddPrompt(500);
  AddPrompt(40);
  AddPrompt(20);
  // Those that end within half of the step, the shortest first; then the oldest.
  EXPECT_THAT(RowsOfNextStep(), ElementsAre(80, 0, 0, 20));
  EXPECT_THAT(RowsOfNextStep(), ElementsAre(60, 0, 40, 0));
  EXPECT_THAT(RowsOfNextStep(), ElementsAre(100, 0, 0, 0));
}

TEST_F(ChunkStepTest, AStepsTimeIsThatOfItsRequestsByTokens) {
  const PrefillRequest* const first = AddPrompt(90);
  const PrefillRequest* const second = AddPrompt(80);
  RowsOfNextStep();  // 90 + 10
  EXPECT_DOUBLE_EQ(first->prefill_ms, 0.9 * kStepMs);
  EXPECT_DOUBLE_EQ(second->prefill_ms, 0.1 * kStepMs);
  RowsOfNextStep();  // 70
  EXPECT_DOUBLE_EQ(first->prefill_ms, 0.9 * kStepMs);
  EXPECT_DOUBLE_EQ(second->prefill_ms, 1.1 * kStepMs);
}

TEST_F(ChunkStepTest, ALongPromptAmongManyShortOnesTakesAtMostTwiceAsLong) {
  PrefillRequest* const prompt = AddPrompt(1000);
  int steps = 0;
  for (; prompt->next_branch == 0 && steps < 100; ++steps) {
    for (int i = 0; i < 3; ++i) AddPrompt(10);
    RowsOfNextStep();
  }
  EXPECT_LE(steps, 2 * 1000 / kChunkTokens);
}

}  // namespace
}  // namespace prefill_worker
