#include "kernels/cpu/window_slots.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kernels::cpu {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kMarker = 777777;
constexpr int32_t kWindow = 10;
constexpr int32_t kWidth = 128;

struct Rows {
  std::vector<int32_t> positions, starts, seqs;
  std::vector<int32_t> state_slots, buffer_begin;  // of the sequences
  int32_t num_ring_rows = 0;
  std::vector<int64_t> own = {};
  std::vector<int32_t> indices = {}, lengths = {};

  absl::Status Run(int32_t width = kWidth) {
    own.assign(positions.size(), kMarker);
    indices.assign(positions.size() * kWidth, kMarker);
    lengths.assign(positions.size(), kMarker);
    ThreadPool pool(2);
    return WindowSlots(pool, {.num_rows = static_cast<int32_t>(positions.size()),
                              .num_ring_rows = num_ring_rows,
                              .window = kWindow,
                              .positions = positions.data(),
                              .window_start = starts.data(),
                              .row_to_seq = seqs.data(),
                              .state_slots = state_slots.data(),
                              .buffer_begin = buffer_begin.empty() ? nullptr : buffer_begin.data(),
                              .own = own.data(),
                              .indices = indices.data(),
                              .width = width,
                              .lengths = lengths.data()});
  }
  std::vector<int32_t> Indices(int32_t row) const {
    const auto list = absl::MakeConstSpan(indices).subspan(row * kWidth, kWidth);
    EXPECT_THAT(list.subspan(lengths[row]), Each(-1));
    return {list.begin(), list.begin() + lengths[row]};
  }
};

TEST(WindowSlotsTest, WidthIsPaddedToTheMultipleOfSparseAttention) {
  EXPECT_EQ(WindowWidth(1), 128);
  EXPECT_EQ(WindowWidth(128), 128);
  EXPECT_EQ(WindowWidth(129), 256);
}

// Every position of three turns of a ring, against the definition.
TEST(WindowSlotsTest, ARingTurns) {
  for (int32_t position = 0; position < 3 * kWindow; ++position) {
    const int32_t start = std::max(0, position - kWindow + 1);
    Rows rows{{position}, {start}, {1}, {5, 3}, {}, 1};
    ASSERT_TRUE(rows.Run().ok());
    EXPECT_THAT(rows.own, ElementsAre(3 * kWindow + position % kWindow));
    std::vector<int32_t> expected;
    for (int32_t p = start; p <= position; ++p) expected.push_back(3 * kWindow + p % kWindow);
    EXPECT_EQ(rows.Indices(0), expected);
  }
}

TEST(WindowSlotsTest, RingRowsThenAPaddedOneThenRowsOfTheBuffer) {
  Rows rows{{12, 0, 25, 26, 0}, {3, 0, 16, 17, 0}, {0, 1, 2, 2, 3}, {4, -1, 2, 6}, {0, 0, -16, 11}};
  rows.num_ring_rows = 2;
  ASSERT_TRUE(rows.Run().ok());
  EXPECT_THAT(rows.own, ElementsAre(42, -1, 9, 10, 11));
  EXPECT_THAT(rows.lengths, ElementsAre(10, 0, 10, 10, 1));
  EXPECT_THAT(rows.Indices(0), ElementsAre(43, 44, 45, 46, 47, 48, 49, 40, 41, 42));
  EXPECT_THAT(rows.Indices(1), ElementsAre());
  EXPECT_THAT(rows.Indices(2), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
  EXPECT_THAT(rows.Indices(3), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
  EXPECT_THAT(rows.Indices(4), ElementsAre(11));
}

TEST(WindowSlotsTest, NamesWhatDoesNotFit) {
  const auto message = [](Rows rows, int32_t width = kWidth) {
    const absl::Status status = rows.Run(width);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(rows.indices, Each(kMarker));
    return std::string(status.message());
  };
  EXPECT_THAT(message({{3, 12}, {0, 2}, {0, 1}, {1, 2}, {}, 2}),
              HasSubstr("row 1 at position 12 attends from 2 in a window of 10"));
  EXPECT_THAT(message({{3}, {4}, {0}, {1}, {}, 1}),
              HasSubstr("row 0 at position 3 attends from 4"));
  EXPECT_THAT(message({{3}, {0}, {0}, {1}, {}, 2}), HasSubstr("1 rows, 2 of them in rings"));
  EXPECT_THAT(message({{3}, {0}, {0}, {1}, {}, 1}, 9), HasSubstr("width 9"));
  EXPECT_THAT(message({{3}, {0}, {0}, {1}, {}, 0}),
              HasSubstr("1 rows lie in a buffer that is not given"));
}

}  // namespace
}  // namespace kernels::cpu
