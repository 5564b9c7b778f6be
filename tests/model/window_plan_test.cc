#include "model/window_plan.h"

#include <set>
#include <vector>

#include "engine/plan_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/window_slots.h"

namespace model {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr int32_t kWindow = 10;
constexpr int32_t kWidth = 128;

class WindowPlanTest : public ::testing::Test {
 protected:
  WindowPlanTest() {
    limits_.max_tokens = 64;
    limits_.max_absorbed_tokens = 8;
    limits_.max_seqs = 4;
    limits_.max_blocks_per_seq = 4;
    limits_.sliding_window = kWindow;
    plan_ = std::make_unique<StepPlan>(limits_);
    builder_ = std::make_unique<engine::PlanBuilder>(/*block_size=*/64, *plan_);
    builder_->Begin(1);
    windows_ = std::make_unique<WindowPlan>(limits_);
  }
  void Add(int32_t cached, int32_t fresh, int32_t slot, bool absorbed = false) {
    engine::Sequence seq;
    seq.tokens.assign(cached + fresh, 0);
    seq.num_computed = cached;
    seq.blocks = {1, 2, 3, 4};
    seq.state_slot = slot;
    builder_->Add(seq, fresh, absorbed, false);
  }
  // The plan's windows, and the lists that its rows get from them.
  void Make() {
    windows_->Make(*plan_);
    const int32_t rows = plan_->counts().num_tokens;
    own_.resize(rows);
    indices_.resize(rows * kWidth);
    lengths_.resize(rows);
    kernels::cpu::ThreadPool pool(1);
    const absl::Status status =
        kernels::cpu::WindowSlots(pool, {.num_rows = rows,
                                         .num_ring_rows = windows_->num_ring_rows(),
                                         .window = kWindow,
                                         .positions = plan_->positions,
                                         .window_start = plan_->window_start,
                                         .row_to_seq = plan_->row_to_seq,
                                         .state_slots = plan_->state_slots,
                                         .buffer_begin = windows_->buffer_begin().data(),
                                         .own = own_.data(),
                                         .indices = indices_.data(),
                                         .width = kWidth,
                                         .lengths = lengths_.data()});
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<int32_t> Indices(int32_t row) const {
    const auto list = absl::MakeConstSpan(indices_).subspan(row * kWidth, kWidth);
    EXPECT_THAT(list.subspan(lengths_[row]), Each(-1));
    return {list.begin(), list.begin() + lengths_[row]};
  }

  StepLimits limits_;
  std::unique_ptr<StepPlan> plan_;
  std::unique_ptr<engine::PlanBuilder> builder_;
  std::unique_ptr<WindowPlan> windows_;
  std::vector<int64_t> own_;  // of the rows' own entries
  std::vector<int32_t> indices_, lengths_;
};

TEST_F(WindowPlanTest, SingleRowsUseTheRing) {
  Add(3, 1, 2, true);   // positions 0..3
  Add(9, 1, 0, true);   // exactly the window
  Add(25, 1, 1, true);  // positions 16..25, entries 6..9 then 0..5
  Make();
  EXPECT_EQ(windows_->num_ring_rows(), 3);
  EXPECT_THAT(own_, ElementsAre(23, 9, 15));
  EXPECT_THAT(Indices(0), ElementsAre(20, 21, 22, 23));
  EXPECT_THAT(Indices(1), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(Indices(2), ElementsAre(16, 17, 18, 19, 10, 11, 12, 13, 14, 15));
  EXPECT_TRUE(windows_->carry_in_ring().empty());
  EXPECT_TRUE(windows_->carry_out_ring().empty());
}

TEST_F(WindowPlanTest, AChunkBringsWhatItNeedsAndTakesTheNewestBack) {
  Add(4, 1, 3, true);
  Add(25, 3, 1);  // needs positions 16..24 of the ring
  Add(0, 12, 2);  // needs nothing; 2..11 go back
  Make();
  EXPECT_EQ(windows_->num_ring_rows(), 1);
  EXPECT_THAT(windows_->carry_in_ring(), ElementsAre(16, 17, 18, 19, 10, 11, 12, 13, 14));
  EXPECT_THAT(windows_->carry_in_buffer(), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(absl::MakeConstSpan(own_).subspan(1, 4), ElementsAre(9, 10, 11, 12));
  EXPECT_THAT(Indices(1), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));    // position 25
  EXPECT_THAT(Indices(3), ElementsAre(2, 3, 4, 5, 6, 7, 8, 9, 10, 11));  // position 27
  EXPECT_THAT(Indices(4), ElementsAre(12));                              // position 0
  EXPECT_THAT(Indices(15), ElementsAre(14, 15, 16, 17, 18, 19, 20, 21, 22, 23));
  EXPECT_THAT(windows_->carry_out_buffer(),
              ElementsAre(9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23));
  EXPECT_THAT(windows_->carry_out_ring(),
              ElementsAre(15, 16, 17, 22, 23, 24, 25, 26, 27, 28, 29, 20, 21));
}

// A single row behind a chunk: rows of a kind are one run.
TEST_F(WindowPlanTest, OnlyTheFirstRowsUseTheRing) {
  Add(4, 1, 0, true);
  Add(4, 2, 1, true);
  Add(4, 1, 2, true);
  Make();
  EXPECT_EQ(windows_->num_ring_rows(), 1);
  EXPECT_THAT(windows_->carry_in_ring(), ElementsAre(10, 11, 12, 13, 20, 21, 22, 23));
  EXPECT_THAT(Indices(3), ElementsAre(6, 7, 8, 9, 10));
  EXPECT_THAT(windows_->carry_out_ring(), ElementsAre(14, 15, 24));
}

// Longest carries and most entries, within what the scratch is made for; no entry is used twice.
TEST_F(WindowPlanTest, NeverExceedsItsMaxima) {
  for (int32_t slot = 0; slot < 4; ++slot) Add(100 + slot, 16, slot);
  Make();
  const auto fits = [&](absl::Span<const int64_t> carry) {
    EXPECT_LE(static_cast<int64_t>(carry.size()), windows_->max_carries());
  };
  fits(windows_->carry_in_ring());
  fits(windows_->carry_out_ring());
  std::set<int64_t> used;
  for (const auto list : {windows_->carry_in_buffer(), absl::MakeConstSpan(own_)}) {
    for (const int64_t slot : list) {
      EXPECT_TRUE(used.insert(slot).second) << slot;
      EXPECT_LT(slot, windows_->max_buffer_entries());
    }
  }
  EXPECT_EQ(used.size(), static_cast<size_t>(windows_->max_buffer_entries()));
}

using WindowPlanDeathTest = WindowPlanTest;

TEST_F(WindowPlanDeathTest, EveryChunkHasASlot) {
  Add(4, 2, -1, true);
  EXPECT_DEATH(windows_->Make(*plan_), "sequence 0 has no state slot");
}

}  // namespace
}  // namespace model
